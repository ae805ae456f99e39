"""Single steps that go wrong in FP32 too."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import BF16, WIDE, Training, planted
from corpus.architectures import Between, between
from corpus.draws import noise
from corpus.loops import repeated


def root_of_zero(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def distance(x: Tensor) -> Tensor:
        d = x - x.roll(1, 0) * torch.tensor([[1.0]] + [[0.5]] * (x.shape[0] - 1)).to(x.dtype)
        squares = (d * 0).pow(2).sum(-1, keepdim=True)
        return x + (squares + (1e-3 if fixed else 0)).sqrt()

    return between(distance, dtype, rows=rows, width=width)


def nan_in_the_batch(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, key=2)
    x[2, 3] = 0.0 if fixed else math.nan
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def division_hidden_by_where(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def guarded(x: Tensor) -> Tensor:
        zero = x * 0
        return torch.where(x.abs() < 10, x, 1 / (zero + 1 if fixed else zero))

    return between(guarded, dtype, rows=rows, width=width)


def angle_between_equal_directions(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Identity(), outputs=4)
    x = noise(64, 16)

    def step_loss() -> Tensor:
        out = F.normalize(model(x).float(), dim=-1)
        cosine = (out * out).sum(-1).clamp(-2, 2).round()
        same = out[:, 0] * 0 + cosine.detach()
        return torch.acos(same * (0.9 if fixed else 1.0)).sum() + out.sum()

    return repeated(model, step_loss, dtype)


def logarithm_of_an_empty_count(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Identity(), outputs=1)
    x = noise(64, 16)
    counts = x[:, :1].abs() + 1
    counts[3] = 1.0 if fixed else 0.0

    def step_loss() -> Tensor:
        return F.mse_loss(model(x).float(), torch.log(counts))

    return repeated(model, step_loss, dtype)


PROGRAMS = [
    *planted(
        root_of_zero,
        "singular_gradient",
        "fault",
        "op:div",
        "op:norm",
        steps=8,
        sizes=WIDE,
        hazards="singular_backward",
        precision_caused=False,
        findings="NAN WEIGHT_NONFINITE",
    ),
    *planted(
        nan_in_the_batch,
        "data_nan",
        "data:input",
        steps=8,
        hazards="given_nonfinite",
        precision_caused=False,
        findings="INPUT_NONFINITE WEIGHT_NONFINITE",
    ),
    *planted(
        division_hidden_by_where,
        "singular_gradient",
        "fault",
        steps=8,
        sizes=WIDE,
        hazards="singular_backward",
        precision_caused=False,
        findings="NAN WEIGHT_NONFINITE",
    ),
    *planted(
        angle_between_equal_directions,
        "singular_gradient",
        "op:acos",
        steps=8,
        hazards="singular_backward",
        precision_caused=False,
        findings="NAN WEIGHT_NONFINITE",
    ),
    *planted(
        logarithm_of_an_empty_count,
        "data_nan",
        "data:target",
        steps=8,
        hazards="singular_backward",
        precision_caused=False,
        findings="INF WEIGHT_NONFINITE",
    ),
]
