"""More precision loss: in fp16, whose three bits more do not always suffice, and in log-ratios of whole texts."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from corpus import Training, planted
from corpus.draws import generator
from corpus.loops import ends_above, low, supervised
from corpus.rounding.signals import rises


def scaler_for(dtype: torch.dtype) -> GradScaler:
    return GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)


class Restoration(nn.Module):
    """Corrects a picture given in sensor counts near 12,000 by three residual stages."""

    def __init__(self, stream: torch.dtype) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)) for _ in range(3)
        )
        self.stream = stream

    def forward(self, counts: Tensor, hint: Tensor) -> Tensor:
        x = counts.to(self.stream)
        for stage in self.stages:
            x = x + stage(hint)
        return x.float() - counts


def sensor_counts(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """At 12,000 the spacing of fp16 is 8: corrections of one or two counts never arrive."""
    model = Restoration(torch.float32 if fixed else dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def batch(i: int) -> list[Tensor]:
        draw = generator(141, i)
        hint = torch.randn(8, 1, 8, 8, generator=draw)
        counts = torch.randint(1400, 1600, (8, 1, 8, 8), generator=draw) * 8.0
        return [counts, hint, 2 * torch.tanh(hint)]

    return supervised(model, optimizer, batch, F.mse_loss, dtype, scaler_for(dtype))


class Places(nn.Module):
    """Places on a sphere of radius 60."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return 60 * F.normalize(self.net(x).float(), dim=-1)


def near_places(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Squared distances of neighbours (about 1) as |a|^2 + |b|^2 - 2ab: terms of 3600 and 7200 in fp16, spacing 2 and 4."""
    model = Places()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    scaler = scaler_for(dtype)

    def squared(a: Tensor, b: Tensor) -> Tensor:
        if fixed:
            return (a - b).square().sum(-1)
        a, b = a.to(dtype), b.to(dtype)
        return ((a * a).sum(-1) + (b * b).sum(-1) - 2 * (a * b).sum(-1)).float()

    def step(i: int) -> Tensor:
        draw = generator(142, i)
        x = torch.randn(32, 6, generator=draw)
        near = x + 0.02 * torch.randn(32, 6, generator=draw)
        wanted = (20 * (near - x)).square().sum(-1)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.smooth_l1_loss(squared(model(x), model(near)), wanted)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


class Speaker(nn.Module):
    """A convolutional language model: the next of 32 symbols from the last three."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 12)
        self.mix = nn.Conv1d(12, 12, 3)
        self.head = nn.Linear(12, 32)

    def forward(self, text: Tensor) -> Tensor:
        x = F.pad(self.embed(text[:, :-1]).transpose(1, 2), (2, 0))
        return self.head(self.mix(x).relu().transpose(1, 2))


def stay_close(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Reward ranking by whole-text log-ratios: policy and reference are near -420, where bf16 knows only even numbers."""
    policy = Speaker()
    frozen = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0005)

    def ratio(text: Tensor) -> Tensor:
        def total(model: nn.Module) -> Tensor:
            logits = model(text)
            logits = logits.float() if fixed else logits
            return logits.log_softmax(-1).gather(-1, text[:, 1:, None]).squeeze(-1).sum(-1)

        with torch.no_grad():
            base = total(frozen)
        return total(policy) - base

    def step(i: int) -> Tensor:
        draw = generator(143, i)
        good, bad = torch.randint(0, 20, (6, 120), generator=draw), torch.randint(12, 32, (6, 120), generator=draw)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.softplus(ratio(bad) - ratio(good)).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(policy, optimizer, step)


PROGRAMS = [
    *planted(sensor_counts, "residual_absorption", "op:add", hazards="residual", shows=ends_above(1), steps=24),
    *planted(
        near_places,
        "catastrophic_cancellation",
        *("op:sub", "op:add", "op:rsub"),
        hazards="absorption",
        shows=ends_above(0.5),
        steps=24,
    ),
    *planted(
        stay_close,
        "logprob_rounding",
        *("op:sum", "op:sub", "op:log_softmax", "op:_log_softmax"),
        hazards="cancellation",
        examined=1,
        shows=rises,
        steps=24,
    ),
]
