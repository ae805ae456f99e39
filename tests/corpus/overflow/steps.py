"""Single steps with numbers beyond the range of the format."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import BF16, FP16, FP32, WIDE, Training, planted
from corpus.architectures import Attention, Between, attending, between
from corpus.draws import noise, seed_torch
from corpus.loops import repeated


def gated_product(fixed: bool = False, dtype: torch.dtype = FP16, rows: int = 32, width: int = 16) -> Training:
    return between(lambda x: ((x.float() if fixed else x) * 400) * (x * 400) / 160000, dtype, rows=rows, width=width)


def loud_layer(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    seed_torch(1)
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.mul_(1 if fixed else 3e5)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(16, 16))
    model.add_module("fault", layer)
    model.add_module("norm", nn.LayerNorm(16))
    model.add_module("last", nn.Linear(16, 4))
    x, y = noise(8, 16), noise(8, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def attention_scores(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    return attending(Attention(0.5 if fixed else 300.0), dtype)


class IntoMemory(Attention):
    """baddbmm into memory that nobody has written: with beta=0 it is not read."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = (part(x) * self.gain for part in (self.q, self.k))
        memory = x.new_tensor([math.nan]).to(q.dtype).expand(len(x), x.shape[1], x.shape[1])
        return torch.baddbmm(memory.contiguous(), q, k.transpose(-2, -1), beta=0).softmax(-1) @ self.v(x)


def scores_into_unwritten_memory(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    return attending(IntoMemory(0.5 if fixed else 300.0), dtype)


def loss_in_half(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    model = Between(nn.Identity())
    x, y = noise(8, 16), 500 * noise(8, 4, key=2)

    def step_loss() -> Tensor:
        out = model(x)
        with torch.autocast("cpu", enabled=False):
            out = out.float() if fixed else out
            return ((out - y.to(out.dtype)) ** 2).mean()

    return repeated(model, step_loss, dtype)


def sum_of_many(fixed: bool = False, dtype: torch.dtype = FP16, rows: int = 16, width: int = 16) -> Training:
    def dice(x: Tensor) -> Tensor:
        p = torch.sigmoid(x).repeat(1, 1024)
        total = p.float().sum() if fixed else p.sum()
        return x * (1 + 100 * p.mean() / total * p.numel() / 100)

    return between(dice, dtype, rows=rows, width=width)


def exponential(fixed: bool = False, dtype: torch.dtype = FP16, rows: int = 32, width: int = 16) -> Training:
    return between(
        lambda x: torch.exp(x - x.amax() if fixed else x.clamp(-1, 1) * 0 + 12 + x * 0.01) * 1e-5, dtype, rows=rows, width=width
    )


def hand_written_norm(fixed: bool = False, dtype: torch.dtype = FP16, rows: int = 32, width: int = 16) -> Training:
    def norm(x: Tensor) -> Tensor:
        x = x * 1000
        wide = x.float() if fixed else x
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    return between(norm, dtype, rows=rows, width=width)


def raw_feature(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    model = Between(nn.LayerNorm(16))
    x, y = noise(8, 16), noise(8, 4, key=2)
    x[:, 3] = x[:, 3] if fixed else 1.6e9 + 1e3 * x[:, 3]
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def clipping_by_a_norm_in_half(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    model = Between(nn.ReLU()).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, y = noise(32, 16).half(), 4000 * noise(32, 4, key=2)

    def step(i: int) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x).float(), y).backward()
        grads = [p.grad for p in model.parameters()]
        wide = FP32 if fixed else dtype
        norm = sum((g.to(wide) ** 2).sum() for g in grads).sqrt()
        for g in grads:
            g.mul_((2000 / (norm + 1e-6)).clamp(max=1.0).to(g.dtype))
        optimizer.step()

    return Training(model, optimizer, step)


def poisoned_statistics(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    model = Between(nn.BatchNorm1d(16))
    model.fault.running_var.fill_(1.0 if fixed else math.inf)
    x, y = noise(8, 16), noise(8, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def scale_of_yesterday(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def quantised(x: Tensor) -> Tensor:
        scale = 448 / (x.abs().max() if fixed else x.abs().max() / 8)
        return x + ((x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x).detach()

    return between(quantised, dtype, rows=rows, width=width)


def cumulative_sum(fixed: bool = False, dtype: torch.dtype = FP16, rows: int = 32, width: int = 16) -> Training:
    def share(x: Tensor) -> Tensor:
        parts = torch.ones_like(x) * 1e4
        return x * 0.5 + (parts.float() if fixed else parts).cumsum(-1).div(1e5).to(x.dtype)

    return between(share, dtype, rows=rows, width=width)


def twice_a_sum_at_the_end_of_the_range(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    model = Between(nn.Identity(), outputs=1)
    x = noise(64, 16)

    def step_loss() -> Tensor:
        out = model(x)
        weights = torch.full((64, 1), 700.0, dtype=FP32 if fixed else dtype)
        return out.float().pow(2).mean() / (weights.sum() * 3 + 1) * 1e4

    return repeated(model, step_loss, dtype)


PROGRAMS = [
    *planted(
        gated_product,
        "product_overflow_fp16",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="overflow",
        findings="INF NAN OVERFLOW",
    ),
    *planted(
        loud_layer, "activation_overflow_fp16", "fault", steps=8, survives=False, hazards="overflow", findings="NAN OVERFLOW"
    ),
    *planted(scores_into_unwritten_memory, "attention_logit_overflow_fp16", "fault", steps=8, hazards="overflow"),
    *planted(attention_scores, "attention_logit_overflow_fp16", "fault", steps=8, hazards="overflow", findings="OVERFLOW"),
    *planted(
        loss_in_half,
        "loss_computed_in_fp16",
        "op:pow",
        "op:mul",
        "op:sum",
        "op:mean",
        "op:mse_loss",
        steps=8,
        hazards="overflow",
        findings="INF",
    ),
    *planted(sum_of_many, "reduction_overflow_fp16", "fault", tools="diagnose diff", steps=8, sizes=WIDE, hazards="overflow"),
    *planted(
        exponential,
        "exp_overflow_fp16",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="exp_range",
        findings="NAN OVERFLOW",
    ),
    *planted(
        hand_written_norm,
        "norm_square_overflow_fp16",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="overflow",
        findings="UNDERFLOW",
    ),
    *planted(
        raw_feature, "input_out_of_range_fp16", "data:input", steps=8, survives=False, hazards="overflow", findings="NAN OVERFLOW"
    ),
    *planted(clipping_by_a_norm_in_half, "grad_norm_overflow_fp16", "loop:clip", steps=8, hazards="overflow"),
    *planted(poisoned_statistics, "bn_stats_poisoned", "fault", steps=8, hazards="given_nonfinite"),
    *planted(scale_of_yesterday, "fp8_scale_stale", "fault", tools="diagnose diff", steps=8, sizes=WIDE, hazards="saturation"),
    *planted(
        cumulative_sum,
        "reduction_overflow_fp16",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="overflow",
        findings="INF NAN OVERFLOW",
    ),
    *planted(twice_a_sum_at_the_end_of_the_range, "reduction_overflow_fp16", "op:sum", steps=8, hazards="overflow"),
]
