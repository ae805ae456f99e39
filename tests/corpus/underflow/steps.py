"""Single steps with numbers below the range of the format."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import FP16, WIDE, Training, planted
from corpus.architectures import Between, between
from corpus.draws import noise
from corpus.loops import repeated


def tiny_eps(fixed: bool = False, dtype: torch.dtype = FP16, rows: int = 32, width: int = 16) -> Training:
    def normalise(x: Tensor) -> Tensor:
        x = torch.where(torch.arange(x.shape[0])[:, None] == 1, torch.zeros_like(x), x)
        wide = x.float() if fixed else x
        return wide / (wide.abs().sum(-1, keepdim=True) + 1e-8)

    return between(normalise, dtype, rows=rows, width=width)


def functional_normalize(fixed: bool = False, dtype: torch.dtype = FP16, rows: int = 32, width: int = 16) -> Training:
    def normalise(x: Tensor) -> Tensor:
        x = F.relu(x) * (torch.arange(x.shape[0])[:, None] != 2)
        return F.normalize(x, dim=-1, eps=1e-4 if fixed else 1e-12)

    return between(normalise, dtype, rows=rows, width=width)


def product_of_probabilities(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    def likelihood(x: Tensor) -> Tensor:
        p = torch.sigmoid(x) * 0.2 + 0.05
        together = p[:, :1]
        for i in range(1, p.shape[1]):
            together = together * p[:, i : i + 1]
        logs = p.log().sum(-1, keepdim=True) if fixed else together.log()
        return x * logs / 10

    return between(likelihood, dtype)


def gradients_without_scaler(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y) * 1e-6, dtype, scaled=fixed and None)


PROGRAMS = [
    *planted(
        tiny_eps,
        "eps_underflow_fp16",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="constant_lost",
        findings="NAN",
    ),
    *planted(
        functional_normalize,
        "eps_underflow_fp16",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="constant_lost",
        findings="NAN",
    ),
    *planted(
        product_of_probabilities,
        "product_underflow_fp16",
        "fault",
        tools="diagnose diff",
        steps=8,
        hazards="zero_divisor",
        findings="NAN OVERFLOW",
    ),
    *planted(
        gradients_without_scaler,
        "grad_underflow_no_scaling",
        "scaler",
        "first.weight",
        "first.bias",
        steps=8,
        twin="diagnose examine",
        hazards="flush",
        findings="UNDERFLOW",
    ),
]
