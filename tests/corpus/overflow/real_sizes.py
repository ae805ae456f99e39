"""Overflow at the sizes of real layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corpus import FP16, Training, planted
from corpus.draws import noise
from corpus.loops import usual


class Squares(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * x * self.gain


def squares_of_a_wide_layer(fixed: bool = False, dtype: torch.dtype = FP16, rows: int = 64, width: int = 128) -> Training:
    """Linear -> x * x * 1e5 -> Linear: the largest of 64 x 128 squares times 1e5 are beyond fp16, which FP32 does not mind."""
    model = nn.Sequential(nn.Linear(width, width), Squares(1.0 if fixed else 1e5), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if fixed else 1e-13)

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(rows, width, key=(161, i))
        return x, x[:, :1].square()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x).float(), y)

    return usual(model, optimizer, data, loss_of, dtype)


PROGRAMS = [
    *planted(
        squares_of_a_wide_layer,
        "product_overflow_fp16",
        "1",
        survives=False,
        hazards="overflow",
        findings="OVERFLOW INF NAN",
        shows=lambda run: run.stuck,
        seeds=tuple(range(1, 8)),
        sizes=({"rows": 16, "width": 512}, {"rows": 256, "width": 128}),
    )
]
