"""Networks with one planted fault each: inside real architectures, in losses, in backward, between ordinary layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from corpus import FP16, WIDE, Training, planted
from corpus.architectures import Transformer, class_loss, sandwich, token_loss
from corpus.draws import noise, whole
from corpus.loops import network


class HandNorm(nn.Module):
    """Squares in the type of its input: beyond 256 they are infinite in fp16, and rsqrt(inf) is 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class LoudStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.block = nn.Sequential(HandNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.embed(x) * 400
        return self.head(self.block(x))


def norm_squares(dtype: torch.dtype = FP16) -> Training:
    return network(LoudStream(), noise(8, 16, key=4) * 3, class_loss, whole(5, 8), dtype)


def attention_logits(dtype: torch.dtype = FP16) -> Training:
    model, ids = Transformer(3), whole(50, 4, 16)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[:64].mul_(400)
    return network(model, ids, token_loss, ids, dtype)


def _squares_in_half(out, y):
    return ((out.half() - y.half()) ** 2).mean()


def loss_out_of_range(dtype: torch.dtype = FP16) -> Training:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    return network(model, noise(8, 16, key=4), _squares_in_half, noise(8, 3, key=4) * 500, dtype)


class OwnExp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.rate = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return torch.log(self.rate(torch.tanh(self.body(x))).mul(30).exp() + 1)


def exp_in_the_root(dtype: torch.dtype = FP16) -> Training:
    return network(OwnExp(), noise(8, 16, key=4), F.mse_loss, noise(8, 4, key=4).abs(), dtype)


class Inflated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.gate = nn.Conv2d(8, 8, 1)
        self.up = nn.Conv2d(8, 8, 1)
        self.glu = Gated()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        h = F.relu(self.stem(x))
        return self.head(self.glu(self.gate(h) * 300, self.up(h) * 300).mean((2, 3)))


class Gated(nn.Module):
    def forward(self, gate, up):
        return F.silu(gate) * up / 90000


def gated_convolution(dtype: torch.dtype = FP16) -> Training:
    return network(Inflated(), noise(4, 3, 8, 8, key=4) * 3, class_loss, whole(4, 4), dtype)


def _dice(out, y):
    p = out.sigmoid()
    return 1 - (2 * (p * y).sum() + 1e-6) / (p.sum() + y.sum() + 1e-6)


def dice_in_half(dtype: torch.dtype = FP16) -> Training:
    """Sums of 90,000 probabilities in fp16: infinite, and x / inf pins the loss at 1 without any gradient."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
    nn.init.constant_(model[2].bias, 3.0)
    y = (noise(2, 1, 256, 256, key=4) > -1).half()
    return network(model, noise(2, 1, 256, 256, key=4), _dice, y, dtype)


def _contrastive(out, y):
    z = F.normalize(out, dim=-1)
    similar = (z @ z.t() / 0.05).exp()
    return -(similar.diagonal() / similar.sum(-1)).log().mean()


def contrastive_loss(dtype: torch.dtype = FP16) -> Training:
    return network(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), noise(8, 16, key=4), _contrastive, whole(3, 8), dtype
    )


class SumOutOfRange(nn.Module):
    """No infinity comes out: x / inf is 0."""

    def forward(self, x):
        w = (x.abs() + 1) * 8000
        return x * (w / w.sum(-1, keepdim=True)) * 24


def sum_out_of_range(dtype: torch.dtype = FP16, rows: int = 6, width: int = 24) -> Training:
    return sandwich(SumOutOfRange(), dtype, rows=rows, width=width)


PROGRAMS = [
    *planted(norm_squares, "norm_square_overflow_fp16", "block.0", tools="diagnose diff", steps=8, hazards="overflow"),
    *planted(
        attention_logits,
        "attention_logit_overflow_fp16",
        "blocks.1.attn",
        tools="diagnose diff",
        steps=8,
        hazards="overflow",
        findings="OVERFLOW",
    ),
    *planted(
        loss_out_of_range,
        "loss_computed_in_fp16",
        "op:pow",
        "op:square",
        tools="diagnose diff",
        steps=8,
        hazards="overflow",
        findings="INF",
    ),
    *planted(
        exp_in_the_root,
        "exp_overflow_fp16",
        "op:exp",
        tools="diagnose diff",
        steps=8,
        hazards="exp_range",
        findings="INF OVERFLOW",
    ),
    *planted(
        gated_convolution,
        "product_overflow_fp16",
        "glu",
        tools="diagnose diff",
        steps=8,
        hazards="overflow",
        findings="INF NAN OVERFLOW",
    ),
    *planted(
        dice_in_half, "reduction_overflow_fp16", "op:sum", tools="diagnose diff", steps=8, hazards="overflow", findings="OVERFLOW"
    ),
    *planted(
        contrastive_loss, "exp_overflow_fp16", "op:exp", tools="diagnose diff", steps=8, hazards="exp_range", findings="OVERFLOW"
    ),
    *planted(
        sum_out_of_range, "reduction_overflow_fp16", "fault", sizes=WIDE, tools="diagnose diff", steps=8, hazards="overflow"
    ),
]
