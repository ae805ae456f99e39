"""Precision loss in sums: accumulators, scattered gradients, residual streams, terms of unlike size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import Training, planted
from corpus.draws import generator
from corpus.loops import ends_above, supervised


def chunked_corpus(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A bf16 regression on 1024 micro-batches per step; their gradients are added up in `.grad`, which is bf16."""
    relation = torch.rand(8, 1, generator=generator(1)) + 0.5
    model = nn.Sequential(nn.Linear(8, 1, bias=False)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
    weight = model[0].weight
    nn.init.zeros_(weight)
    micro_batches = 1024

    def step(i: int) -> Tensor:
        x = torch.rand(micro_batches, 4, 8, generator=generator(2, i))
        y = (x @ relation).to(dtype)
        total, whole = torch.zeros(()), torch.zeros_like(weight, dtype=torch.float32)
        optimizer.zero_grad()
        for rows, wanted in zip(x.to(dtype), y):
            loss = F.mse_loss(model(rows), wanted) / micro_batches
            loss.backward()
            total += loss.detach().float()
            if fixed:
                whole += weight.grad.float()
                weight.grad = None
        if fixed:
            weight.grad = whole.to(dtype)
        optimizer.step()
        return total

    return Training(model, optimizer, step)


class Tastes(nn.Module):
    """Score of an item for a user: dot product of two tables."""

    def __init__(self, items: int, users: int, table: torch.dtype) -> None:
        super().__init__()
        self.user = nn.Embedding(users, 4)
        self.item = nn.Embedding(items, 4).to(table)
        nn.init.constant_(self.user.weight, 0.5)
        nn.init.zeros_(self.item.weight)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(-1)


def popular_items(fixed: bool = False, dtype: torch.dtype = torch.bfloat16, items: int = 50) -> Training:
    """A recommender with a bf16 item table; half of 8192 clicks per batch are one best-seller."""
    model = Tastes(items, 20, torch.float32 if fixed else dtype)
    optimizer = torch.optim.SGD([{"params": model.item.weight, "lr": 0.5}, {"params": model.user.weight, "lr": 0.1}])
    score = torch.rand(items, generator=generator(5)) * 0.2
    score[17] = 2.0

    def batch(i: int) -> list[Tensor]:
        draw = generator(6, i)
        user = torch.randint(20, (8192,), generator=draw)
        item = torch.randint(items, (8192,), generator=draw)
        item[:4096] = 17
        return [user, item, score[item]]

    return supervised(model, optimizer, batch, F.mse_loss, torch.float32)


class HashGrid(nn.Module):
    """A feature grid looked up by cell, as neural graphics do; a small MLP reads the feature."""

    def __init__(self, table: torch.dtype) -> None:
        super().__init__()
        self.grid = nn.Parameter(torch.zeros(64, 2, dtype=table))
        self.mlp = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, cell: Tensor) -> Tensor:
        return self.mlp(self.grid[cell].float()).squeeze(-1)


def feature_grid(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Most rays end in the empty sky: one cell of the bf16 grid is read 6000 times per batch."""
    model = HashGrid(torch.float32 if fixed else dtype)
    optimizer = torch.optim.SGD(
        [{"params": [model.grid], "lr": 2.0}, {"params": model.mlp.parameters(), "lr": 0.002}], momentum=0.5
    )
    colour = torch.rand(64, generator=generator(7))
    colour[9] = 3.0

    def batch(i: int) -> list[Tensor]:
        cell = torch.randint(64, (8000,), generator=generator(8, i))
        cell[:6000] = 9
        return [cell, colour[cell]]

    return supervised(model, optimizer, batch, F.mse_loss, torch.float32)


class Orbit(nn.Module):
    """A neural ODE: explicit Euler steps of a small field from a starting point."""

    def __init__(self, fp32_state: bool) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.fp32_state = fp32_state

    def forward(self, start: Tensor) -> Tensor:
        state = start.float() if self.fp32_state else start
        for _ in range(100):
            state = state + 0.01 * self.field(state - 8)
        return state


def neural_ode(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """The state is near 8 and stored in bf16 (spacing 0.06); a step of 0.01 * f does not reach half of that."""
    model = Orbit(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def batch(i: int) -> list[Tensor]:
        start = 8 + torch.randn(16, 2, generator=generator(9, i)) * 0.2
        return [start.to(dtype), start.flip(1) + 0.5]

    return supervised(model, optimizer, batch, lambda out, y: F.mse_loss(out.float(), y), dtype)


class BagOfWords(nn.Module):
    """Averages the gates of a document's words in a loop, then classifies."""

    def __init__(self, fp32_sum: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.gate = nn.Linear(8, 8)
        self.classify = nn.Linear(8, 3)
        self.fp32_sum = fp32_sum
        nn.init.constant_(self.gate.bias, 2.0)

    def forward(self, words: Tensor) -> Tensor:
        gates = torch.sigmoid(self.gate(self.embed(words)))
        total = torch.zeros(len(words), 8, dtype=torch.float32 if self.fp32_sum else gates.dtype)
        for t in range(words.shape[1]):
            total = total + gates[:, t]
        return self.classify(total / words.shape[1] * 20 - 15)


def long_document(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """400 words per document: the bf16 total stops at 256, and the words that tell the class come after that."""
    model = BagOfWords(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def batch(i: int) -> list[Tensor]:
        draw = generator(10, i)
        label = torch.randint(3, (16,), generator=draw)
        words = torch.randint(30, (16, 400), generator=draw)
        words[:, 310:] = torch.where(torch.rand(16, 90, generator=draw) < 0.8, 31 + label[:, None], words[:, 310:])
        return [words, label]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype)


class CrossBlock(nn.Module):
    """Adds to the stream what the memory says."""

    def __init__(self, width: int, memory: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width + memory, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(torch.cat([self.norm(x), memory], -1))))


class Decoder(nn.Module):
    """A query that picks up a memory in four residual blocks, a norm, a head."""

    def __init__(self, stream: torch.dtype, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("query", torch.randint(150, 170, (width,), generator=generator(11)) * 16.0)  # near 2560
        self.blocks = nn.ModuleList(CrossBlock(width, 6) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 1)
        self.stream = stream

    def forward(self, memory: Tensor) -> Tensor:
        x = self.query.to(self.stream).expand(len(memory), -1)
        for block in self.blocks:
            x = block(x, memory)
        return self.out(self.norm(x.float() - self.query)).squeeze(-1)


def grown_stream(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A residual stream near 2560, where bf16 has a spacing of 16: what the blocks add never arrives."""
    model = Decoder(torch.float32 if fixed else dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    relation = torch.randn(6, generator=generator(12))

    def batch(i: int) -> list[Tensor]:
        memory = torch.randn(32, 6, generator=generator(16, i))
        return [memory, torch.tanh(memory @ relation)]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class Tables(nn.Module):
    """Raw weather columns, a linear layer, batch norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_columns = nn.Linear(4, 24)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed_columns(x).float()).relu()).squeeze(-1)


def weather_table(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Year and air pressure (about 2019 and 101325 Pa) share a sum with temperature and humidity (about 1), which decide."""
    model = Tables()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    usual, spread = torch.tensor([2019.0, 101325.0, 0.0, 0.5]), torch.tensor([1.0, 5.0, 1.0, 0.3])

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 4, generator=generator(13, i)) * spread + usual
        y = torch.tanh(x[:, 2] + 2 * (x[:, 3] - 0.5))
        return [(x - usual) / spread if fixed else x, y]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 16, 1)
        self.bn1 = nn.BatchNorm1d(16)
        self.conv2 = nn.Conv1d(16, 32, 1)
        self.bn2 = nn.BatchNorm1d(32)
        self.classify = nn.Linear(32, 2)

    def forward(self, points: Tensor) -> Tensor:
        x = self.bn1(self.conv1(points)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return self.classify(x.amax(-1))


def map_tile(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Points in map coordinates (easting about 3200 m); whether a scan is flat or round is told by centimetres to metres."""
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    origin = torch.tensor([3200.0, 870.0, 0.0]).view(1, 3, 1)

    def batch(i: int) -> list[Tensor]:
        draw = generator(14, i)
        label = torch.randint(2, (32,), generator=draw)
        points = torch.randn(32, 3, 24, generator=draw)
        points = F.normalize(points, dim=1) * (1 + 0.5 * label.view(-1, 1, 1))
        return [points if fixed else points + origin, label]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype)


class TokenNorm(nn.Module):
    """Tokens, a projection, layer norm whose gain and bias are the calibration that must be learnt."""

    def __init__(self, fp32_norm: bool) -> None:
        super().__init__()
        self.project = nn.Linear(4, 8)
        self.norm_out = nn.LayerNorm(8)
        self.fp32_norm = fp32_norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        return self.norm_out(h.float() if self.fp32_norm else h)


def many_tokens(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """8192 tokens through one LayerNorm on a CPU: its gradients are summed over the tokens in bf16."""
    model = TokenNorm(fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.0)
    target_bias = torch.full((8,), 2.0)

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 256, 4, generator=generator(15, i))
        return [x, target_bias]

    def criterion(out: Tensor, wanted: Tensor) -> Tensor:
        return (out.float() - wanted).square().mean()

    return supervised(model, optimizer, batch, criterion, dtype)


PROGRAMS = [
    *planted(
        chunked_corpus,
        "low_precision_grad_accumulation",
        "0.weight",
        "loop:accumulation",
        hazards="accumulation",
        shows=ends_above(2),
        steps=6,
    ),
    *planted(
        popular_items,
        "low_precision_scatter_add",
        "item",
        "item.weight",
        sizes=({"items": 5000},),
        hazards="accumulation",
        shows=ends_above(0.1),
    ),
    *planted(
        feature_grid,
        "low_precision_scatter_add",
        *("grid", "op:index", "op:index_put", "op:_index_put_impl_", "op:index_backward"),
        hazards="accumulation",
        shows=ends_above(0.5),
    ),
    *planted(neural_ode, "absorption_in_accumulator", "op:add", hazards="accumulator", shows=ends_above(0.2)),
    *planted(
        long_document, "absorption_in_accumulator", "op:add", hazards="accumulator absorption", shows=ends_above(0.7), steps=24
    ),
    *planted(
        grown_stream,
        "residual_absorption",
        *(f"blocks.{i}" for i in range(4)),
        hazards="residual",
        shows=ends_above(0.4),
        steps=30,
    ),
    *planted(
        weather_table,
        "scale_imbalance_absorption",
        "embed_columns",
        "data:input",
        hazards="absorption",
        shows=ends_above(0.2),
        steps=30,
    ),
    *planted(
        map_tile, "scale_imbalance_absorption", "conv1", "data:input", hazards="absorption", shows=ends_above(0.3), steps=30
    ),
    *planted(
        many_tokens,
        "kernel_low_precision_accumulation",
        "norm_out",
        "norm_out.weight",
        "norm_out.bias",
        hazards="accumulation",
        shows=ends_above(1),
        steps=12,
    ),
]
