"""Programs whose mechanisms look alike and are to be told apart."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examine.sanitizer_programs import BF16, FP16, Between, Program, between, fault, noise, training


@fault("absorption cancellation", "target_in_low_precision", "op:to")
def heights_above_sea_in_bf16(fixed: bool) -> Program:
    model = Between(nn.Identity(), outputs=1)
    x = noise(64, 16)
    heights = 2100 + x[:, :1]
    dtype = torch.float32 if fixed else BF16

    def step_loss() -> Tensor:
        return F.l1_loss(model(x).float() * 3 + 2100, heights.to(dtype).float())

    return training(model, step_loss, BF16)


@fault("integers", "integer_in_low_precision", "fault")
def hours_rounded_before_their_angles(fixed: bool) -> Program:
    hours = torch.randint(0, 8760, (64,), generator=torch.Generator().manual_seed(3))

    def daytime(x: Tensor) -> Tensor:
        rounded = hours.float() if fixed else hours.to(BF16).float()
        return x * torch.cos(rounded * (2 * math.pi / 24))[:, None].to(x.dtype)

    return between(daytime, BF16, rows=64)


@fault("phase", "position_precision_loss", "fault")
def angles_of_many_frequencies(fixed: bool) -> Program:
    at = 700 * torch.rand(64, generator=torch.Generator().manual_seed(4))

    def waves(x: Tensor) -> Tensor:
        dtype = torch.float32 if fixed else BF16
        speeds = 1000.0 ** -(torch.arange(x.shape[1]) / x.shape[1])
        return x * torch.sin(at[:, None].to(dtype) * speeds.to(dtype)).to(x.dtype)

    return between(waves, BF16, rows=64)


@fault("overflow", "reduction_overflow_fp16", "op:sum")
def twice_a_sum_at_the_end_of_the_range(fixed: bool) -> Program:
    model = Between(nn.Identity(), outputs=1)
    x = noise(64, 16)

    def step_loss() -> Tensor:
        out = model(x)
        weights = torch.full((64, 1), 700.0, dtype=torch.float32 if fixed else FP16)
        return out.float().pow(2).mean() / (weights.sum() * 3 + 1) * 1e4

    return training(model, step_loss, FP16)


@fault("singular_backward", "singular_gradient", "op:acos", in_reference=True)
def angle_between_equal_directions(fixed: bool) -> Program:
    model = Between(nn.Identity(), outputs=4)
    x = noise(64, 16)

    def step_loss() -> Tensor:
        out = F.normalize(model(x).float(), dim=-1)
        cosine = (out * out).sum(-1).clamp(-2, 2).round()
        same = out[:, 0] * 0 + cosine.detach()
        return torch.acos(same * (0.9 if fixed else 1.0)).sum() + out.sum()

    return training(model, step_loss, BF16)


@fault("integers", "integer_in_low_precision", "op:to")
def ids_kept_in_bf16(fixed: bool) -> Program:
    table = nn.Embedding(5000, 4)
    ids = torch.randint(300, 5000, (256,), generator=torch.Generator().manual_seed(5))
    kept = ids if fixed else ids.to(BF16)

    def step_loss() -> Tensor:
        return table(kept.long().clamp(max=4999)).tanh().mean()

    return training(table, step_loss, BF16)


@fault("accumulation", "low_precision_scatter_add", "0")
def one_word_for_all_behind_equal_weights(fixed: bool) -> Program:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].to(torch.float32 if fixed else BF16)
    with torch.no_grad():
        model[2].weight.fill_(0.3).add_(noise(1, 8) * 1e-3)
    words = torch.zeros(4096, dtype=torch.long)

    def step_loss() -> Tensor:
        return (model(words).float() - 2).pow(2).mean()

    return training(model, step_loss, BF16)


@fault("accumulator absorption", "absorption_in_accumulator", "fault")
def small_terms_after_a_large_start(fixed: bool) -> Program:
    def integrate(x: Tensor) -> Tensor:
        parts = F.softplus(x)
        total = torch.full_like(x, 300.0, dtype=torch.float32 if fixed else x.dtype)
        for i in range(24):
            total = total + parts.roll(i, 0)
        return ((total - 300) / 10).to(x.dtype)

    return between(integrate, BF16)


@fault("singular_backward", "data_nan", "data:target", in_reference=True)
def logarithm_of_an_empty_count(fixed: bool) -> Program:
    model = Between(nn.Identity(), outputs=1)
    x = noise(64, 16)
    counts = x[:, :1].abs() + 1
    counts[3] = 1.0 if fixed else 0.0

    def step_loss() -> Tensor:
        return F.mse_loss(model(x).float(), torch.log(counts))

    return training(model, step_loss, BF16)
