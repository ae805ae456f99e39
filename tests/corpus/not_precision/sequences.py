"""Sequences and graphs that fail in every precision: memories that fade, attention that sees one neighbour."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import Training, planted
from corpus.draws import generator
from corpus.loops import ends_above, supervised


class Memory(nn.Module):
    """A tanh recurrence that must remember the first of 24 inputs."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.read = nn.Linear(3, 16)
        self.carry = nn.Linear(16, 16, bias=False)
        self.answer = nn.Linear(16, 1)
        self.gated = gated
        nn.init.orthogonal_(self.carry.weight, gain=0.3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.read(x[:, 0]))
        for t in range(1, x.shape[1]):
            new = torch.tanh(self.carry(state) + 0.1 * self.read(x[:, t]))
            state = state + 0.02 * new if self.gated else new
        return self.answer(state).squeeze(-1)


def fading_memory(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Each step keeps less than a third: of the first input 1e-12 is left, and as much of its gradient."""
    model = Memory(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 24, 3, generator=generator(151, i))
        return [x, torch.tanh(x[:, 0].sum(-1))]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class GraphAttention(nn.Module):
    """A dense graph attention: each node asks all nodes."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.ask, self.offer, self.give = (nn.Linear(6, 12) for _ in range(3))
        self.temperature = temperature

    def forward(self, nodes: Tensor) -> Tensor:
        scores = self.ask(nodes) @ self.offer(nodes).transpose(-1, -2) / self.temperature
        return scores.softmax(-1) @ self.give(nodes)


class Neighbourhood(nn.Module):
    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.gather = GraphAttention(temperature)
        self.readout = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, nodes: Tensor) -> Tensor:
        return self.readout(self.gather(nodes)).squeeze(-1)


def cold_attention(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A temperature of 0.003 where sqrt(d) was meant: every node listens to one other, and cannot know the mean."""
    model = Neighbourhood(12**0.5 if fixed else 0.003)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def batch(i: int) -> list[Tensor]:
        nodes = torch.randn(16, 10, 6, generator=generator(152, i)) + torch.randn(16, 1, 6, generator=generator(153, i))
        return [nodes, nodes.mean((1, 2))[:, None].expand(-1, 10)]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


PROGRAMS = [
    *planted(
        fading_memory,
        "vanishing_architecture",
        *("carry", "carry.weight", "read", "read.weight", "read.bias", "op:tanh"),
        shows=ends_above(0.3),
        steps=40,
        precision_caused=False,
    ),
    *planted(
        cold_attention,
        "attention_entropy_collapse",
        *("gather", "gather.ask", "gather.offer", "gather.ask.weight", "gather.offer.weight"),
        shows=ends_above(0.05),
        steps=40,
        precision_caused=False,
    ),
]
