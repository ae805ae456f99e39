"""Further programs with the same mechanisms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examine.sanitizer_programs import BF16, FP16, Between, Program, between, fault, noise, training


@fault("cancellation absorption", "catastrophic_cancellation", "fault")
def distances_by_expansion(fixed: bool) -> Program:
    def kernel(x: Tensor) -> Tensor:
        x = x * 0.1 + 4
        wide = x.float() if fixed else x
        squares = (wide * wide).sum(-1)
        apart = (
            torch.cdist(wide, wide) if fixed else (squares[:, None] + squares[None] - 2 * wide @ wide.T).clamp_min(1e-3).sqrt()
        )
        return x * torch.exp(-apart).mean(-1, keepdim=True).to(x.dtype) * 10

    return between(kernel, BF16)


@fault("cancellation", "catastrophic_cancellation", "fault")
def slope_by_a_small_step(fixed: bool) -> Program:
    def slope(x: Tensor) -> Tensor:
        x = x.float() if fixed else x
        return (torch.sin(3 * (x + 0.01)) - torch.sin(3 * x)) / 0.01

    return between(slope, BF16)


@fault("saturated_probability", "saturated_probability_loss", "op:rsub op:log op:sigmoid")
def focal_loss_on_probabilities(fixed: bool) -> Program:
    model = Between(nn.Identity(), outputs=1)
    x, y = noise(64, 16), (noise(64, 1, seed=2) > 0).float()

    def step_loss() -> Tensor:
        logits = model(x) * 60
        with torch.autocast("cpu", enabled=False):
            if fixed:
                hit, miss = F.logsigmoid(logits.float()), F.logsigmoid(-logits.float())
                return -(y * miss.exp() ** 2 * hit + (1 - y) * hit.exp() ** 2 * miss).mean()
            p = torch.sigmoid(logits)
            wanted = y.to(p.dtype)
            hit, miss = torch.log(p + 1e-12), torch.log(1 - p + 1e-12)
            return -(wanted * (1 - p) ** 2 * hit + (1 - wanted) * p**2 * miss).mean().float()

    return training(model, step_loss, BF16)


@fault("accumulation", "low_precision_scatter_add", "fault")
def hits_counted_in_bf16(fixed: bool) -> Program:
    def load(x: Tensor) -> Tensor:
        dtype = torch.float32 if fixed else x.dtype
        hits = torch.zeros(4, dtype=dtype).index_add(0, torch.zeros(4096, dtype=torch.long), torch.ones(4096, dtype=dtype))
        return x * (hits[0] / 4096).to(x.dtype)

    return between(load, BF16)


@fault("average state_still", "ema_stagnation", "fault fault.mean")
def statistics_kept_in_bf16(fixed: bool) -> Program:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(16, dtype=torch.float32 if fixed else BF16))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.mul_(0.999).add_(x.detach().mean(0).to(self.mean.dtype), alpha=0.001)
            return x - self.mean.to(x.dtype)

    model = Between(Centre())
    x, y = noise(32, 16), noise(32, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), BF16)


@fault("singular_backward", "singular_gradient", "fault", in_reference=True)
def division_hidden_by_where(fixed: bool) -> Program:
    def guarded(x: Tensor) -> Tensor:
        zero = x * 0
        return torch.where(x.abs() < 10, x, 1 / (zero + 1 if fixed else zero))

    return between(guarded, BF16)


@fault("overflow", "reduction_overflow_fp16", "fault")
def cumulative_sum(fixed: bool) -> Program:
    def share(x: Tensor) -> Tensor:
        parts = torch.ones_like(x) * 1e4
        return x * 0.5 + (parts.float() if fixed else parts).cumsum(-1).div(1e5).to(x.dtype)

    return between(share, FP16)


@fault("update_lost", "bf16_update_lost", "first.weight last.weight first.bias last.bias optimizer")
def fused_updates_in_bf16(fixed: bool) -> Program:
    model = Between(nn.ReLU()).to(torch.float32 if fixed else BF16)
    dtype = next(model.parameters()).dtype
    x, y = noise(8, 16).to(dtype), noise(8, 4, seed=2)
    return training(
        model, lambda: F.mse_loss(model(x).float(), y), BF16 if fixed else None,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True),
    )  # fmt: skip


@fault("biased_rounding", "ema_stagnation", "fault")
def decay_that_always_rounds_up(fixed: bool) -> Program:
    def leak(x: Tensor) -> Tensor:
        state = x.float() if fixed else x
        for _ in range(300):
            state = state * 0.999
        return state.to(x.dtype)

    return between(leak, BF16)
