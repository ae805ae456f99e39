"""State that stands still, and what the training loop does wrong."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examine.sanitizer_programs import BF16, FP16, Between, Program, between, fault, low, noise, training


@fault("update_lost", "bf16_update_lost", "first.weight last.weight first.bias last.bias optimizer")
def updates_in_bf16(fixed: bool) -> Program:
    model = Between(nn.Tanh()).to(torch.float32 if fixed else BF16)
    x, y = noise(32, 16), noise(32, 4, seed=2)
    dtype = next(model.parameters()).dtype
    return training(
        model, lambda: F.mse_loss(model(x.to(dtype)).float(), y), BF16 if fixed else None,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-4),
    )  # fmt: skip


@fault("average state_still", "ema_stagnation", "loop:ema")
def average_in_bf16(fixed: bool) -> Program:
    model = Between(nn.Tanh())
    averages = [(p.detach() * 1.05).to(torch.float32 if fixed else BF16) for p in model.parameters()]
    x, y = noise(32, 16), noise(32, 4, seed=2)

    def average() -> None:
        with torch.no_grad():
            for mean, p in zip(averages, model.parameters()):
                mean.mul_(0.9995).add_(p.to(mean.dtype), alpha=0.0005)

    return training(model, lambda: F.mse_loss(model(x).float(), y), BF16, after=average)


@fault("gradient_sum accumulation", "low_precision_grad_accumulation", "first.weight last.weight first.bias last.bias")
def micro_batches_in_bf16(fixed: bool) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("last", nn.Linear(4, 2, dtype=torch.float32 if fixed else BF16))
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = 1 + noise(8, 4).to(dtype), 3 + noise(8, 2, seed=2)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(400):
            (F.mse_loss(model(x).float(), y) / 400).backward()
        optimizer.step()

    return Program(model, step)


@fault("overflow", "grad_norm_overflow_fp16", "loop:clip")
def clipping_by_a_norm_in_half(fixed: bool) -> Program:
    model = Between(nn.ReLU()).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, y = noise(32, 16).half(), 4000 * noise(32, 4, seed=2)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x).float(), y).backward()
        grads = [p.grad for p in model.parameters()]
        wide = torch.float32 if fixed else FP16
        norm = sum((g.to(wide) ** 2).sum() for g in grads).sqrt()
        for g in grads:
            g.mul_((2000 / (norm + 1e-6)).clamp(max=1.0).to(g.dtype))
        optimizer.step()

    return Program(model, step)


@fault("given_nonfinite", "stale_inf_grads", "loop:zero_grad")
def gradients_left_from_a_bad_step(fixed: bool) -> Program:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, seed=2)
    if not fixed:
        for p in model.parameters():
            p.grad = torch.full_like(p, math.inf)

    def step() -> None:
        with low(BF16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()

    return Program(model, step)


@fault("given_nonfinite", "bn_stats_poisoned", "fault")
def poisoned_statistics(fixed: bool) -> Program:
    model = Between(nn.BatchNorm1d(16))
    model.fault.running_var.fill_(1.0 if fixed else math.inf)
    x, y = noise(8, 16), noise(8, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), FP16)


@fault("overflow", "static_loss_scale_overflow", "scaler.scale")
def loss_scaled_by_hand(fixed: bool) -> Program:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y) * (128.0 if fixed else 2.0**22), FP16, scaled=False)


@fault("decay_lost", "weight_decay_lost", "first.weight last.weight first.bias last.bias")
def decay_that_rounds_to_one(fixed: bool) -> Program:
    model = Between(nn.Tanh()).to(torch.float32 if fixed else BF16)
    dtype = next(model.parameters()).dtype
    x, y = noise(32, 16).to(dtype), noise(32, 4, seed=2)
    return training(
        model, lambda: F.mse_loss(model(x).float(), y), BF16 if fixed else None,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    )  # fmt: skip


@fault("state_still", "ema_stagnation", "optimizer")
def second_moment_that_cannot_fall(fixed: bool) -> Program:
    model = Between(nn.Tanh()).to(torch.float32 if fixed else BF16)
    dtype = next(model.parameters()).dtype
    x, y = noise(32, 16).to(dtype), noise(32, 4, seed=2)
    adam = torch.optim.Adam(model.parameters(), lr=0.02, foreach=False)
    program = training(model, lambda: F.mse_loss(model(x).float(), y), BF16 if fixed else None, optimizer=lambda _: adam)
    program.step()
    for state in adam.state.values():
        state["exp_avg_sq"].fill_(1.0)
        state["step"].fill_(500.0)
        state["exp_avg"].fill_(0.5)
    return program


@fault("decision absorption", "target_in_low_precision", "op:argmax op:addmm op:linear teacher")
def labels_of_a_rounded_teacher(fixed: bool) -> Program:
    torch.manual_seed(1)
    model = nn.ModuleDict({"student": Between(nn.ReLU(), outputs=6), "teacher": nn.Linear(16, 6)}).requires_grad_(True)
    model["teacher"].requires_grad_(False)
    with torch.no_grad():
        model["teacher"].weight.mul_(0.05)
        model["teacher"].bias.fill_(30.0)
    x = noise(128, 16)

    def step_loss() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=not fixed, dtype=BF16):
            labels = model["teacher"](x).argmax(-1)
        return F.cross_entropy(model["student"](x), labels)

    return training(model, step_loss, BF16)


@fault("saturation", "fp8_scale_stale", "fault")
def scale_of_yesterday(fixed: bool) -> Program:
    def quantised(x: Tensor) -> Tensor:
        scale = 448 / (x.abs().max() if fixed else x.abs().max() / 8)
        return x + ((x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x).detach()

    return between(quantised, BF16)
