"""Planted masks that leave a softmax row without a finite entry."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from corpus import Training, planted
from corpus.draws import noise
from corpus.loops import usual


class CrossAttention(nn.Module):
    def __init__(self, width: int, masked: float | None) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.masked = masked

    def forward(self, x, memory, present):
        k, v = self.kv(memory).chunk(2, -1)
        scores = self.q(x) @ k.transpose(1, 2) / x.shape[-1] ** 0.5
        if self.masked is None:
            scores = scores.masked_fill(present[:, None, :] == 0, torch.finfo(scores.dtype).min)
        else:
            scores = scores + (1 - present.to(scores.dtype))[:, None, :] * self.masked
        return self.out(scores.softmax(-1) @ v)


class Layer(nn.Module):
    def __init__(self, width: int, masked: float | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.cross = CrossAttention(width, masked)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x, memory, present):
        x = x + self.cross(self.norm(x), memory, present)
        return x + self.mlp(x)


class Captioner(nn.Module):
    def __init__(self, masked: float | None) -> None:
        super().__init__()
        self.word = nn.Embedding(20, 24)
        self.decoder = nn.ModuleList(Layer(24, masked) for _ in range(2))
        self.next = nn.Linear(24, 20)

    def forward(self, words, memory, present):
        x = self.word(words)
        for layer in self.decoder:
            x = layer(x, memory, present)
        return self.next(x)


def caption_without_a_region(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """-1e9 is -inf in fp16; from step 7 on one picture has no detected region at all, so its whole row is -inf."""
    model = Captioner(masked=None if fixed else -1e9)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def data(i):
        words = (torch.arange(8) + (noise(10, 1, key=(51, i)).abs() * 8).long()) % 20
        present = torch.ones(10, 6)
        present[:, 4:] = 0
        if i >= 7:
            present[4] = 0
        return words, noise(10, 6, 24, key=(52, i)), present

    def loss_of(words, memory, present):
        return F.cross_entropy(model(words[:, :-1], memory, present).flatten(0, 1), words[:, 1:].flatten())

    return usual(model, optimizer, data, loss_of, dtype)


class GraphAttention(nn.Module):
    def __init__(self, width: int, loops: bool) -> None:
        super().__init__()
        self.node, self.sends, self.takes = nn.Linear(width, width), nn.Linear(width, 1), nn.Linear(width, 1)
        self.loops = loops

    def forward(self, x, edges):
        h = self.node(x)
        score = F.leaky_relu(self.takes(h) + self.sends(h).T)
        linked = edges | torch.eye(len(x), dtype=torch.bool) if self.loops else edges
        return F.elu(score.masked_fill(~linked, float("-inf")).softmax(-1) @ h)


class Gat(nn.Module):
    def __init__(self, loops: bool) -> None:
        super().__init__()
        self.gat1, self.gat2 = GraphAttention(12, loops), GraphAttention(12, loops)
        self.kind = nn.Linear(12, 3)

    def forward(self, x, edges):
        return self.kind(self.gat2(self.gat1(x, edges), edges))


def isolated_node_in_a_graph(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A node without neighbours: masked_fill(-inf) leaves its row empty, softmax gives NaN in any precision."""
    model = Gat(loops=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def data(i):
        kind = torch.arange(20) % 3
        x = noise(20, 12, key=(53, i)) + 2 * F.one_hot(kind, 12)
        edges = (kind[:, None] == kind) & (noise(20, 20, key=(54, i)) > -1)
        edges[13] = False
        return x, edges, kind

    def loss_of(x, edges, kind):
        return F.cross_entropy(model(x, edges), kind)

    return usual(model, optimizer, data, loss_of, dtype)


PROGRAMS = [
    *planted(
        caption_without_a_region,
        "mask_inf_full_row",
        "decoder.0.cross",
        findings="NAN SCALE_DECLINE",
        hazards="masked_rows",
        examined=7,
        shows=lambda run: run.stuck,
    ),
    *planted(
        isolated_node_in_a_graph,
        "mask_inf_full_row",
        "gat1",
        findings="NAN WEIGHT_NONFINITE",
        hazards="masked_rows",
        shows=lambda run: not run.weights_finite,
        precision_caused=False,
    ),
]
