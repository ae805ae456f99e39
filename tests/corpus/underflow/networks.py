"""Networks with one planted fault each: inside real architectures, in losses, in backward, between ordinary layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from corpus import FP16, WIDE, Training, planted
from corpus.architectures import class_loss, sandwich
from corpus.draws import noise, whole
from corpus.loops import network


class Chain(nn.Module):
    """The probability of a path as a product of 24 factors, then its logarithm."""

    def forward(self, x):
        return torch.log(torch.sigmoid(x).prod(-1, keepdim=True))


class Likelihood(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.chain, self.last = nn.Linear(16, 24), Chain(), nn.Linear(1, 1)

    def forward(self, x):
        return self.last(self.chain(self.first(x) - 2))


def probability_of_a_path(dtype: torch.dtype = FP16) -> Training:
    return network(Likelihood(), noise(8, 16, key=4), F.mse_loss, noise(8, 1, key=4), dtype)


class Standardise(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-8)


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        with torch.no_grad():
            self.first.weight[3] = 0
        self.standard, self.last = Standardise(), nn.Linear(24, 4)

    def forward(self, x):
        return self.last(self.standard(self.first(x)))


def constant_feature(dtype: torch.dtype = FP16) -> Training:
    return network(Constant(), noise(8, 16, key=4), class_loss, whole(4, 8), dtype)


class Pairwise(nn.Module):
    """A distance whose gradient is infinite where fp16 has rounded the sum of squares to 0."""

    def forward(self, a, b):
        return ((a - b).pow(2).sum(-1) * 1e-7 + 1e-10).sqrt() * 1e3


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.distance = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)), Pairwise()

    def forward(self, a, b):
        return self.distance(self.tower(a), self.tower(b))


def distance_backward(dtype: torch.dtype = FP16) -> Training:
    a = noise(8, 16, key=4)
    b = a + noise(8, 16, key=4).flip(0) * 0.01
    return network(Siamese(), (a, b), lambda out: out.float().square().mean(), None, dtype)


def _tiny_squares(out, y):
    return ((out.half().exp() * 1e-5) ** 2).sum() * 1e10


def loss_below_the_range(dtype: torch.dtype = FP16) -> Training:
    return network(
        nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)),
        noise(16, 8, key=4),
        _tiny_squares,
        noise(16, 4, key=4),
        dtype,
    )


def _focal(out, y):
    p = out.softmax(-1).gather(1, y[:, None])[:, 0]
    return (-((1 - p) ** 2) * torch.log(p)).mean()


def focal_loss(dtype: torch.dtype = FP16) -> Training:
    """Probabilities below the range of fp16 are 0, and their logarithm is infinite."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        model[2].weight.mul_(60)
    return network(model, noise(32, 16, key=4), _focal, whole(10, 32), dtype)


class Underflow(nn.Module):
    def forward(self, x):
        return (x * 1e-4) * (x * 1e-4) * 1e8


def squares_below_the_range(dtype: torch.dtype = FP16, rows: int = 6, width: int = 24) -> Training:
    return sandwich(Underflow(), dtype, rows=rows, width=width)


PROGRAMS = [
    *planted(probability_of_a_path, "", "chain", tools="diff", policies=("full",)),
    *planted(
        constant_feature,
        "eps_underflow_fp16",
        "standard",
        tools="diagnose diff",
        steps=8,
        hazards="constant_lost",
        findings="NAN",
    ),
    *planted(
        distance_backward,
        "eps_underflow_fp16",
        "distance",
        tools="diagnose diff",
        steps=8,
        hazards="constant_lost",
        findings="UNDERFLOW",
    ),
    *planted(loss_below_the_range, "", "op:mul", "op:pow", tools="diff"),
    *planted(
        focal_loss,
        "saturated_probability_loss",
        "op:log",
        "op:softmax",
        tools="diagnose diff",
        steps=8,
        hazards="saturated_probability",
    ),
    *planted(
        squares_below_the_range,
        "product_underflow_fp16",
        "fault",
        sizes=WIDE,
        tools="diagnose diff",
        steps=8,
        hazards="flush",
        findings="UNDERFLOW",
    ),
]
