"""Healthy habits of experienced users that look odd from outside: adapters, sparse tables, penalties, islands, schedules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from corpus import Training, healthy
from corpus.draws import generator
from corpus.loops import Run, low, supervised


class Lora(nn.Module):
    """A frozen bf16 layer and a low-rank fp32 adapter, whose second factor begins at zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).to(torch.bfloat16).requires_grad_(False)
        self.a = nn.Linear(inputs, 4, bias=False)
        self.b = nn.Linear(4, outputs, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(torch.bfloat16)).float() + self.b(self.a(x.float())).float()


def adapters_on_a_frozen_bf16_model(dtype: torch.dtype = torch.bfloat16) -> Training:
    model = nn.Sequential(Lora(8, 32), nn.GELU(), Lora(32, 1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    relation = torch.randn(8, generator=generator(121)) / 2

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 8, generator=generator(122, i))
        return [x, torch.tanh(x @ relation)[:, None]]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(200, 8, sparse=True), nn.Embedding(300, 8, sparse=True)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(-1)


def sparse_gradients(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Sparse embedding gradients with SparseAdam: most rows of the tables have none in a step."""
    model = Factors()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    liked = torch.randn(200, 300, generator=generator(123)).sign()

    def batch(i: int) -> list[Tensor]:
        draw = generator(124, i % 4)
        user, item = torch.randint(200, (64,), generator=draw), torch.randint(300, (64,), generator=draw)
        return [user, item, liked[user, item]]

    return supervised(model, optimizer, batch, lambda out, y: F.softplus(-out.float() * y).mean(), dtype)


def gradient_penalty(dtype: torch.dtype = torch.bfloat16) -> Training:
    """A Wasserstein critic: its gradient's norm is part of the loss (a second backward), in fp32."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Softplus(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.0, 0.9))

    def step(i: int) -> Tensor:
        draw = generator(125, i)
        real, fake = torch.randn(32, 4, generator=draw) + 1, torch.randn(32, 4, generator=draw)
        optimizer.zero_grad()
        with low(dtype):
            gap = model(fake).float().mean() - model(real).float().mean()
        between = (0.5 * (real + fake)).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        loss = gap + 10 * (torch.linalg.vector_norm(slope, dim=-1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


class Island(nn.Module):
    """Rotary phases of far positions in an fp32 island; cosines are rounded afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qk, self.out = nn.Embedding(8, 16), nn.Linear(16, 32), nn.Linear(16, 8)
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(8) / 8))

    def forward(self, words: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(words)
        with torch.autocast("cpu", enabled=False):
            phase = positions.float()[:, None] * self.frequencies
            cos, sin = phase.cos(), phase.sin()
        q, k = (self.turned(part, cos, sin) for part in self.qk(x).chunk(2, -1))
        return self.out((q @ k.transpose(-1, -2) / 4).softmax(-1) @ x + x)

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def rotary_island(dtype: torch.dtype = torch.bfloat16) -> Training:
    model = Island()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def batch(i: int) -> list[Tensor]:
        words = torch.randint(8, (8, 12), generator=generator(126, i))
        return [words, torch.arange(60000, 60012), words]

    return supervised(model, optimizer, batch, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), dtype)


def counts_through_log1p(dtype: torch.dtype = torch.float16) -> Training:
    """Whole numbers up to 80,000 stay fp32 until log1p has made them small."""
    body = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(body.parameters(), lr=0.02)

    def batch(i: int) -> list[Tensor]:
        counts = torch.exp(torch.rand(32, 5, generator=generator(127, i)) * 11.2).round()
        small = torch.log1p(counts) / 6 - 1
        return [small, torch.tanh(small[:, :1] - small[:, 1:2])]

    return supervised(body, optimizer, batch, F.mse_loss, dtype, GradScaler("cpu", init_scale=2.0**12))


def schedule_down_to_zero(dtype: torch.dtype = torch.bfloat16) -> Training:
    """The learning rate ends at exactly 0: the last steps change nothing, on purpose."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: max(0.0, 1 - i / 24))
    relation = torch.randn(8, generator=generator(128)) / 2

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 8, generator=generator(129, i))
        return [x, torch.tanh(x @ relation)[:, None]]

    training = supervised(model, optimizer, batch, F.mse_loss, dtype)
    train = training.step

    def step(i: int) -> Tensor:
        loss = train(i)
        schedule.step()
        return loss

    training.step = step
    return training


def some_units_are_dead(dtype: torch.dtype = torch.float16) -> Training:
    """Two of 32 ReLU units never fire, and half of all other outputs are zero: every wide network has that."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    model[0].bias.data[[3, 17]] = -20.0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    relation = torch.randn(8, generator=generator(130)) / 2

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 8, generator=generator(131, i))
        return [x, torch.tanh(x @ relation)[:, None]]

    return supervised(model, optimizer, batch, F.mse_loss, dtype, GradScaler("cpu", init_scale=2.0**12))


def sure_and_right(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Separable classes and a large rate: logits reach 20, probabilities are exactly 0 and 1, and that is the truth."""
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def batch(i: int) -> list[Tensor]:
        draw = generator(132, i)
        y = torch.randint(2, (32,), generator=draw)
        return [torch.randn(32, 4, generator=draw) * 0.3 + 2.0 * (2 * y[:, None] - 1), y.float()[:, None]]

    return supervised(model, optimizer, batch, F.binary_cross_entropy_with_logits, dtype)


def large_inputs_in_bf16(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Pixels from 0 to 255 and a batch norm right behind the first layer: large, but of one size."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    stripes = torch.tensor([1.0, 0.0]).repeat(4).expand(8, 8)

    def batch(i: int) -> list[Tensor]:
        draw = generator(133, i)
        label = torch.randint(2, (16,), generator=draw)
        picture = torch.stack([stripes, stripes.t()])[label][:, None] * 150 + torch.rand(16, 1, 8, 8, generator=draw) * 105
        return [picture.round(), label]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype)


def still_at_the_end(run: Run) -> bool:
    return run.learned and run.weights_finite


PROGRAMS = [
    *healthy(adapters_on_a_frozen_bf16_model, steps=30),
    *healthy(sparse_gradients, steps=24),
    *healthy(gradient_penalty, steps=30),
    *healthy(rotary_island, steps=24),
    *healthy(counts_through_log1p, steps=30),
    *healthy(schedule_down_to_zero, steps=30, shows=still_at_the_end),
    *healthy(some_units_are_dead, steps=30),
    *healthy(sure_and_right, steps=30),
    *healthy(large_inputs_in_bf16, steps=30),
]
