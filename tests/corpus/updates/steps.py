"""Single steps in which weights, averages and moments stand still."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import BF16, FP16, FP32, WIDE, Training, planted
from corpus.architectures import Between, between
from corpus.draws import noise
from corpus.loops import repeated


def adam_in_half(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    model = Between(nn.ReLU())
    model = model if fixed else model.half()
    x, y = noise(8, 16), noise(8, 4, key=2)
    kept = FP32 if fixed else dtype
    return repeated(
        model, lambda: F.mse_loss(model(x.to(kept)).float(), y) * 1e-3, dtype if fixed else None,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-3, foreach=False),
    )  # fmt: skip


def updates_in_bf16(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Tanh()).to(FP32 if fixed else dtype)
    x, y = noise(32, 16), noise(32, 4, key=2)
    kept = next(model.parameters()).dtype
    return repeated(
        model, lambda: F.mse_loss(model(x.to(kept)).float(), y), dtype if fixed else None,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-4),
    )  # fmt: skip


def average_in_bf16(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Tanh())
    averages = [(p.detach() * 1.05).to(FP32 if fixed else dtype) for p in model.parameters()]
    x, y = noise(32, 16), noise(32, 4, key=2)

    def average() -> None:
        with torch.no_grad():
            for mean, p in zip(averages, model.parameters()):
                mean.mul_(0.9995).add_(p.to(mean.dtype), alpha=0.0005)

    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype, after=average)


def decay_that_rounds_to_one(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Tanh()).to(FP32 if fixed else dtype)
    kept = next(model.parameters()).dtype
    x, y = noise(32, 16).to(kept), noise(32, 4, key=2)
    return repeated(
        model, lambda: F.mse_loss(model(x).float(), y), dtype if fixed else None,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    )  # fmt: skip


def second_moment_that_cannot_fall(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Tanh()).to(FP32 if fixed else dtype)
    kept = next(model.parameters()).dtype
    x, y = noise(32, 16).to(kept), noise(32, 4, key=2)
    adam = torch.optim.Adam(model.parameters(), lr=0.02, foreach=False)
    program = repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype if fixed else None, optimizer=lambda _: adam)
    program.step(0)
    for state in adam.state.values():
        state["exp_avg_sq"].fill_(1.0)
        state["step"].fill_(500.0)
        state["exp_avg"].fill_(0.5)
    return program


def statistics_kept_in_bf16(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(16, dtype=FP32 if fixed else dtype))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.mul_(0.999).add_(x.detach().mean(0).to(self.mean.dtype), alpha=0.001)
            return x - self.mean.to(x.dtype)

    model = Between(Centre())
    x, y = noise(32, 16), noise(32, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def fused_updates_in_bf16(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.ReLU()).to(FP32 if fixed else dtype)
    kept = next(model.parameters()).dtype
    x, y = noise(8, 16).to(kept), noise(8, 4, key=2)
    return repeated(
        model, lambda: F.mse_loss(model(x).float(), y), dtype if fixed else None,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True),
    )  # fmt: skip


def decay_that_always_rounds_up(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def leak(x: Tensor) -> Tensor:
        state = x.float() if fixed else x
        for _ in range(300):
            state = state * 0.999
        return state.to(x.dtype)

    return between(leak, dtype, rows=rows, width=width)


PROGRAMS = [
    *planted(
        adam_in_half,
        "adam_eps_underflow_fp16",
        "optimizer",
        "optimizer.eps",
        steps=8,
        hazards="constant_lost zero_divisor",
        findings="EPS_UNDERFLOW WEIGHT_NONFINITE",
    ),
    *planted(
        updates_in_bf16,
        "update_lost",
        "first.weight",
        "last.weight",
        "first.bias",
        "last.bias",
        "optimizer",
        steps=8,
        hazards="update_lost",
        findings="LOST_UPDATE",
    ),
    *planted(average_in_bf16, "ema_stagnation", "loop:ema", steps=8, hazards="average state_still"),
    *planted(
        decay_that_rounds_to_one,
        "weight_decay_lost",
        "first.weight",
        "last.weight",
        "first.bias",
        "last.bias",
        tools="",
        steps=8,
        hazards="decay_lost",
    ),
    *planted(second_moment_that_cannot_fall, "ema_stagnation", "optimizer", steps=8, hazards="state_still"),
    *planted(statistics_kept_in_bf16, "ema_stagnation", "fault", "fault.mean", steps=8, hazards="average state_still"),
    *planted(
        fused_updates_in_bf16,
        "update_lost",
        "first.weight",
        "last.weight",
        "first.bias",
        "last.bias",
        "optimizer",
        steps=8,
        hazards="update_lost",
        findings="LOST_UPDATE",
    ),
    *planted(
        decay_that_always_rounds_up,
        "ema_stagnation",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="biased_rounding",
    ),
]
