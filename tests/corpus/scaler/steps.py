"""Single steps that scale their loss wrongly."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from corpus import BF16, FP16, Training, planted
from corpus.architectures import Between
from corpus.draws import noise
from corpus.loops import low, repeated


def gradients_left_from_a_bad_step(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, key=2)
    if not fixed:
        for p in model.parameters():
            p.grad = torch.full_like(p, math.inf)

    def step(i: int) -> None:
        with low(dtype):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()

    return Training(model, None, step)


def loss_scaled_by_hand(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y) * (128.0 if fixed else 2.0**22), dtype, scaled=False)


PROGRAMS = [
    *planted(
        gradients_left_from_a_bad_step, "stale_inf_grads", "loop:zero_grad", steps=8, hazards="given_nonfinite", findings="INF"
    ),
    *planted(
        loss_scaled_by_hand,
        "static_loss_scale_overflow",
        "scaler.scale",
        "loop:scale",
        steps=8,
        hazards="overflow",
        findings="NAN WEIGHT_NONFINITE",
    ),
]
