"""Networks with one planted fault each: inside real architectures, in losses, in backward, between ordinary layers."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from corpus import BF16, FP16, WIDE, Training, planted
from corpus.architectures import Block, class_loss, sandwich, token_loss
from corpus.draws import noise, whole
from corpus.loops import network


class Smoother(nn.Module):
    """A running mean over 200 time steps, kept in the type of its input."""

    def forward(self, x):
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = state * 0.99 + x[:, t] * 0.01
            out.append(state)
        return torch.stack(out, 1)


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.smooth, self.head = nn.Linear(4, 8), Smoother(), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.smooth(self.up(x))[:, -1])


def running_mean(dtype: torch.dtype = BF16) -> Training:
    return network(Series(), noise(6, 200, 4, key=4) + 1, F.mse_loss, noise(6, 2, key=4), dtype)


class Slope(nn.Module):
    """A finite difference with a step that the format can hardly tell from nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        x = x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x
        return (self.field(x + 0.004) - self.field(x)) / 0.004


class Physics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.slope, self.head = nn.Linear(4, 16), Slope(16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.slope(self.lift(x)))


def finite_difference(dtype: torch.dtype = BF16) -> Training:
    return network(Physics(), noise(8, 4, key=4), F.mse_loss, noise(8, 2, key=4), dtype)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.norm(self.up(x)))


def layernorm_rows(dtype: torch.dtype = BF16) -> Training:
    """The CPU kernel sums the gradients of the affine parameters in bf16: with 8000 rows most of them are swallowed."""
    model, x = Rows(), noise(8000, 4, key=4)
    nn.init.constant_(model.head.weight, 0.3)
    return network(model, x, lambda out, y: (out * y).sum() / 100, torch.ones(8000, 2), dtype)


class OffsetHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32))
        self.head = nn.Linear(32, 20)
        nn.init.constant_(self.head.bias, 250.0)

    def forward(self, x):
        return self.head(self.body(x))


def logits_far_from_zero(dtype: torch.dtype = BF16) -> Training:
    """Its gradients are 7 % off, and in 120 steps it learns what it learns in FP32: nothing to diagnose."""
    return network(OffsetHead(), noise(16, 16, key=4), class_loss, whole(20, 16), dtype)


class Rotation(nn.Module):
    def forward(self, x):
        position = torch.arange(30000, 30000 + x.shape[1], device=x.device).to(x.dtype)
        rates = (10000.0 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])).to(x.dtype)
        angle = position[:, None] * rates
        a, b = x[..., ::2], x[..., 1::2]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.q, self.k, self.v = nn.Embedding(40, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.rope, self.head = Rotation(), nn.Linear(32, 40)

    def forward(self, ids):
        x = self.token(ids)
        q, k = self.rope(self.q(x)), self.rope(self.k(x))
        return self.head((q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ self.v(x))


def far_positions(dtype: torch.dtype = BF16) -> Training:
    ids = whole(40, 4, 24)
    return network(Rotary(), ids, token_loss, ids, dtype)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)
        nn.init.constant_(self.gate.bias, 60.0)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        chosen = self.gate(x).topk(1, -1).indices
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            picked = (chosen[:, 0] == i).to(x.dtype)[:, None]
            out = out + picked * expert(x)
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.moe, self.head = nn.Linear(8, 16), Experts(), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.moe(F.gelu(self.lift(x))))


def router_in_half(dtype: torch.dtype = BF16) -> Training:
    return network(Routed(), noise(200, 8, key=4), class_loss, whole(4, 200), dtype)


class Counter(nn.Module):
    """Positions as a running count of the tokens that are no padding, in the type of the activations."""

    def forward(self, x):
        count = torch.ones_like(x[..., :1]).cumsum(1)
        return x + torch.sin(count * 0.5)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.positions = nn.Linear(4, 8), Counter()
        self.mix, self.head = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x):
        x = self.positions(self.lift(x))
        return self.head(self.mix(x.transpose(1, 2)).transpose(1, 2))


def counted_positions(dtype: torch.dtype = BF16) -> Training:
    return network(Counted(), noise(2, 700, 4, key=4), F.mse_loss, noise(2, 700, 2, key=4), dtype)


class WideResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(32, 4, 0.0) for _ in range(3))
        self.shift = Shift()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 6)

    def forward(self, x):
        x = self.lift(x)
        for i, block in enumerate(self.blocks):
            x = block(x) if i != 1 else self.shift(block(x))
        return self.head(self.norm(x)[:, 0])


class Shift(nn.Module):
    """All channels get a large common part, which the last norm takes out again."""

    def forward(self, x):
        return (x + 600.0).to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x + 600.0


def loud_residual_stream(dtype: torch.dtype = BF16) -> Training:
    return network(WideResidual(), noise(4, 6, 16, key=4), class_loss, whole(6, 4), dtype)


class OffsetScores(nn.Module):
    """Softmax does not care for the 500, the format does; the scores are no module's output."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1) + 500.0
        return self.o(scores.softmax(-1) @ self.v(x))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.attn, self.head = nn.Linear(8, 16), OffsetScores(), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.attn(self.lift(x)).mean(1))


def offset_between_layers(dtype: torch.dtype = BF16) -> Training:
    return network(Attending(), noise(6, 10, 8, key=4) * 3, class_loss, whole(4, 6), dtype)


class Centring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.body, self.head = nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, ids):
        h = self.body(self.token(ids)) + 300
        return self.head((h - h.mean(1, keepdim=True))[:, 0])


def offset_in_the_root(dtype: torch.dtype = BF16) -> Training:
    return network(Centring(), whole(30, 8, 6), class_loss, whole(5, 8), dtype)


def _bce(out, y):
    return F.binary_cross_entropy(out.sigmoid()[:, 0], y)


def saturated_probabilities(dtype: torch.dtype = BF16) -> Training:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    nn.init.constant_(model[2].bias, 9.0)
    return network(model, noise(32, 8, key=4), _bce, (noise(32, key=4) > 0).float(), dtype)


class Biased(nn.Module):
    """The batch norm takes the 800 out again, but bf16 has stored the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)
        nn.init.constant_(self.conv.bias, 800.0)

    def forward(self, x):
        return self.head(F.relu(self.bn(self.conv(x))).mean((2, 3)))


def bias_before_norm(dtype: torch.dtype = BF16) -> Training:
    return network(Biased(), noise(8, 3, 8, 8, key=4), class_loss, whole(4, 8), dtype)


def embedding_rows(dtype: torch.dtype = BF16) -> Training:
    """Three rows get 4000 gradients, summed in bf16."""
    model = nn.Sequential()
    model.add_module("table", nn.Embedding(3, 8))
    model.add_module("head", nn.Linear(8, 2))
    return network(model, whole(3, 4000), lambda out, y: (out.float() * y).sum() / 100, torch.ones(4000, 2), dtype)


class VarianceOfSquares(nn.Module):
    """Cancellation: the mean of the squares minus the square of the mean, of data far from zero."""

    def forward(self, x):
        x = x * 0.05 + 3
        return (x - x.mean(-1, keepdim=True)) / ((x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2).abs().sqrt()


def variance_of_shifted_squares(dtype: torch.dtype = BF16, rows: int = 6, width: int = 24) -> Training:
    return sandwich(VarianceOfSquares(), dtype, rows=rows, width=width)


class Offset(nn.Module):
    """Absorption: a large constant is added and the next layers only need what varies."""

    def forward(self, x):
        return x + 1000.0


class Unmean(nn.Module):
    def forward(self, x):
        return x - 1000.0


def offset_before_a_difference(dtype: torch.dtype = BF16, rows: int = 6, width: int = 24) -> Training:
    return sandwich(Offset(), dtype, after=Unmean(), rows=rows, width=width)


class RoundedPositions(nn.Module):
    """Positions beyond 256 (bf16) and 2048 (fp16) made in the type of the activations."""

    def forward(self, x):
        position = torch.arange(4000, 4000 + x.shape[-1], dtype=x.dtype, device=x.device)
        return x + torch.sin(position * 0.7)


def positions_of_four_thousand(dtype: torch.dtype = BF16, rows: int = 6, width: int = 24) -> Training:
    return sandwich(RoundedPositions(), dtype, rows=rows, width=width)


class HalfSoftmax(nn.Module):
    """A softmax over long rows whose sum is kept, piece by piece, in the type of the activations."""

    def forward(self, x):
        rows = (x[:, :1] * torch.linspace(-1, 1, 4000, dtype=x.dtype, device=x.device)).exp()
        total = torch.zeros_like(rows[:, 0])
        for part in rows.split(8, dim=1):
            total = total + part.sum(1)
        return x + torch.linspace(-1, 1, 24, dtype=x.dtype) * (rows[:, -1:] / total[:, None] * 1000)


def softmax_summed_in_pieces(dtype: torch.dtype = BF16) -> Training:
    return sandwich(HalfSoftmax(), dtype)


class HandMadeDistances(nn.Module):
    """|a|^2 + |b|^2 - 2ab of points far from the origin."""

    def forward(self, x):
        y = x * 0.1 + 5
        distance = (y * y).sum(-1, keepdim=True) + (y * y).sum(-1)[None] - 2 * y @ y.t()
        return torch.cat([distance, x[:, distance.shape[1] :]], -1)


def distances_far_from_the_origin(dtype: torch.dtype = BF16) -> Training:
    return sandwich(HandMadeDistances(), dtype)


class LogOfOnePlus(nn.Module):
    def forward(self, x):
        return torch.log(1 + x * 1e-3) * 1000


def logarithm_of_one_plus(dtype: torch.dtype = BF16, rows: int = 6, width: int = 24) -> Training:
    return sandwich(LogOfOnePlus(), dtype, rows=rows, width=width)


class LargeStream(nn.Module):
    def forward(self, x):
        return (x + 2000) - 1999


def large_stream(dtype: torch.dtype = BF16, rows: int = 6, width: int = 24) -> Training:
    return sandwich(LargeStream(), dtype, rows=rows, width=width)


PROGRAMS = [
    *planted(running_mean, "", "smooth", tools="diff"),
    *planted(
        finite_difference,
        "catastrophic_cancellation",
        "slope",
        tools="diagnose diff",
        steps=8,
        hazards="cancellation",
        also=(FP16,),
    ),
    *planted(
        layernorm_rows,
        "kernel_low_precision_accumulation",
        "norm",
        "norm.bias",
        "norm.weight",
        tools="diagnose diff",
        steps=8,
        hazards="accumulation",
    ),
    *planted(logits_far_from_zero, "", "head", tools="diff"),
    *planted(
        far_positions,
        "position_precision_loss",
        "rope",
        tools="diagnose diff",
        steps=8,
        hazards="integers phase",
        policies=("full",),
        also=(FP16,),
    ),
    *planted(
        router_in_half,
        "router_low_precision",
        "moe",
        "moe.gate",
        tools="diagnose diff",
        steps=8,
        hazards="absorption decision",
    ),
    *planted(
        counted_positions,
        "position_precision_loss",
        "positions",
        tools="diagnose diff",
        steps=8,
        hazards="integers phase",
    ),
    *planted(
        loud_residual_stream,
        "scale_imbalance_absorption",
        "shift",
        tools="diagnose diff",
        steps=8,
        hazards="absorption",
        also=(FP16,),
    ),
    *planted(
        offset_between_layers,
        "scale_imbalance_absorption",
        "attn",
        tools="diagnose diff",
        steps=8,
        hazards="absorption amplification",
    ),
    *planted(
        offset_in_the_root,
        "scale_imbalance_absorption",
        "op:add",
        tools="diagnose diff",
        steps=8,
        hazards="absorption",
        also=(FP16,),
    ),
    *planted(
        saturated_probabilities,
        "saturated_probability_loss",
        "op:sigmoid",
        "op:binary_cross_entropy",
        tools="diagnose diff",
        steps=8,
        hazards="saturated_probability",
        also=(FP16,),
    ),
    *planted(bias_before_norm, "scale_imbalance_absorption", "conv", tools="diagnose diff", steps=8, hazards="absorption"),
    *planted(embedding_rows, "", "table.weight", "table", tools="diff", policies=("full",)),
    *planted(
        variance_of_shifted_squares,
        "catastrophic_cancellation",
        "fault",
        sizes=WIDE,
        tools="diagnose diff",
        steps=8,
        hazards="cancellation zero_divisor",
        also=(FP16,),
        findings="NAN WEIGHT_NONFINITE",
    ),
    *planted(
        offset_before_a_difference,
        "catastrophic_cancellation",
        "fault",
        sizes=WIDE,
        tools="diagnose diff",
        steps=8,
        hazards="absorption cancellation",
        also=(FP16,),
    ),
    *planted(
        positions_of_four_thousand,
        "position_precision_loss",
        "fault",
        sizes=WIDE,
        tools="diagnose diff",
        steps=8,
        hazards="integers phase",
        also=(FP16,),
    ),
    *planted(
        softmax_summed_in_pieces,
        "absorption_in_accumulator",
        "fault",
        tools="diagnose diff",
        steps=8,
        hazards="accumulator absorption",
    ),
    *planted(
        distances_far_from_the_origin,
        "catastrophic_cancellation",
        "fault",
        tools="diagnose diff",
        steps=8,
        hazards="cancellation absorption",
        also=(FP16,),
    ),
    *planted(
        logarithm_of_one_plus,
        "scale_imbalance_absorption",
        "fault",
        sizes=WIDE,
        tools="diagnose diff",
        steps=8,
        hazards="absorption",
        also=(FP16,),
    ),
    *planted(
        large_stream,
        "catastrophic_cancellation",
        "fault",
        sizes=WIDE,
        tools="diagnose diff",
        steps=8,
        hazards="absorption cancellation",
        also=(FP16,),
    ),
]
