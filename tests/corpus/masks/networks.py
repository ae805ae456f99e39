"""Networks with one planted fault each: inside real architectures, in losses, in backward, between ordinary layers."""

from __future__ import annotations

import torch
from torch import nn

from corpus import FP16, Training, planted
from corpus.architectures import class_loss
from corpus.draws import noise, whole
from corpus.loops import network


class MaskedRow(nn.Module):
    """A mask of -1e5 is -inf in fp16, and a row of nothing else has no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / 4
        return (scores + (mask - 1.0).to(scores.dtype)[:, None, :] * 1e5).softmax(-1) @ self.v(x)


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.attn, self.head = nn.Linear(8, 16), MaskedRow(), nn.Linear(16, 3)

    def forward(self, x, mask):
        return self.head(self.attn(self.lift(x), mask).mean(1))


def masked_row(dtype: torch.dtype = FP16) -> Training:
    mask = torch.ones(4, 6)
    mask[2] = 0
    return network(Masking(), (noise(4, 6, 8, key=4), mask), class_loss, whole(3, 4), dtype)


PROGRAMS = [
    *planted(masked_row, "mask_inf_full_row", "attn", tools="diagnose diff", steps=8, hazards="masked_rows", findings="NAN"),
]
