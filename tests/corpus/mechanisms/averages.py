"""Averages of weights kept in bf16, in every spelling; averages in FP32, and references that nobody trains."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from corpus import Training, healthy, planted
from corpus.draws import noise
from corpus.loops import low

AVERAGE = ("loop:ema", "op:sub", "op:lerp", "op:add", "op:foreach_lerp")


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))


def _train(model: nn.Module, after: object, dtype: torch.dtype, key: int) -> Training:
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    want = noise(8, 3, key=(key,)) / 2

    def step(i: int) -> Tensor:
        x = noise(24, 8, key=(key + 1, i))
        optimizer.zero_grad()
        with low(dtype):
            loss = F.mse_loss(model(x).float(), x @ want)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            after()
        return loss.detach()

    return Training(model, optimizer, step)


def average_by_subtraction(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """s -= (1 - 0.9995) * (s - p) on bf16 shadows: the step is below half a spacing of s."""
    model = _net()
    shadows = [p.detach().clone().to(torch.float32 if fixed else dtype) for p in model.parameters()]

    def after() -> None:
        for s, p in zip(shadows, model.parameters()):
            s -= (1 - 0.9995) * (s - p)

    return _train(model, after, dtype, 340)


def average_by_lerp(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    model = _net()
    shadows = [p.detach().clone().to(torch.float32 if fixed else dtype) for p in model.parameters()]

    def after() -> None:
        for s, p in zip(shadows, model.parameters()):
            s.lerp_(p.to(s.dtype), 5e-4)

    return _train(model, after, dtype, 342)


def average_by_foreach(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    model = _net()
    shadows = [p.detach().clone().to(torch.float32 if fixed else dtype) for p in model.parameters()]

    def after() -> None:
        torch._foreach_mul_(shadows, 0.9995)
        torch._foreach_add_(shadows, [p.to(s.dtype) for s, p in zip(shadows, model.parameters())], alpha=0.0005)

    return _train(model, after, dtype, 344)


def average_by_foreach_lerp(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    model = _net()
    shadows = [p.detach().clone().to(torch.float32 if fixed else dtype) for p in model.parameters()]

    def after() -> None:
        torch._foreach_lerp_(shadows, [p.to(s.dtype) for s, p in zip(shadows, model.parameters())], 5e-4)

    return _train(model, after, dtype, 346)


def average_by_the_library(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """AveragedModel of a copy in bf16, with the library's own exponential average."""
    model = _net()
    average = AveragedModel(copy.deepcopy(model).to(torch.float32 if fixed else dtype), multi_avg_fn=get_ema_multi_avg_fn(0.9995))
    source = copy.deepcopy(model).to(torch.float32 if fixed else dtype)

    def after() -> None:
        for s, p in zip(source.parameters(), model.parameters()):
            s.copy_(p)
        average.update_parameters(source)

    return _train(model, after, dtype, 348)


def average_made_anew(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """shadow[name] = decay * shadow[name] + (1 - decay) * p: a new tensor at every step."""
    model = _net()
    wide = torch.float32 if fixed else dtype
    shadows = {n: p.detach().clone().to(wide) for n, p in model.named_parameters()}

    def after() -> None:
        for n, p in model.named_parameters():
            shadows[n] = 0.9995 * shadows[n] + (1 - 0.9995) * p.to(wide)

    return _train(model, after, dtype, 350)


def average_copied_back(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """s.copy_(decay * s + (1 - decay) * p), as timm does: written over, and yet made of itself."""
    model = _net()
    shadows = [p.detach().clone().to(torch.float32 if fixed else dtype) for p in model.parameters()]

    def after() -> None:
        for s, p in zip(shadows, model.parameters()):
            s.copy_(0.9995 * s + (1 - 0.9995) * p)

    return _train(model, after, dtype, 356)


def copies_of_a_target(dtype: torch.dtype = torch.bfloat16) -> Training:
    """A target network in bf16 that is written over by the weights: nothing of it is kept, and nothing lost."""
    model = _net()
    target = [p.detach().clone().to(dtype) for p in model.parameters()]

    def after() -> None:
        for s, p in zip(target, model.parameters()):
            s.copy_(0.9 * p)

    return _train(model, after, dtype, 358)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).float().log_softmax(-1)


def divergence_from_a_frozen_reference(dtype: torch.dtype = torch.bfloat16) -> Training:
    """A policy is held near its frozen reference, which runs without gradients in bf16; no loss fits the reference."""
    model = Policy()
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i: int) -> Tensor:
        x = noise(48, 6, key=(352, i))
        optimizer.zero_grad()
        with low(dtype):
            now = model(x)
            with torch.no_grad():
                then = reference(x)
        gain = (now.exp() * torch.tensor([1.0, 0.0, 0.0, 0.5, 0.0])).sum(-1).mean()
        apart = (now.exp() * (now - then)).sum(-1).mean()
        loss = 0.1 * apart - gain
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def preferences_beside_a_reference(dtype: torch.dtype = torch.bfloat16) -> Training:
    """The loss of pairs: margins of the policy minus those of a frozen reference without gradients."""
    model = Policy()
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i: int) -> Tensor:
        x = noise(48, 6, key=(353, i))
        chosen, rejected = (x[:, 0] > 0).long(), 2 + (x[:, 1] > 0).long()
        optimizer.zero_grad()
        with low(dtype):
            now = model(x)
            with torch.no_grad():
                then = reference(x)
        margin = (now - then).gather(1, chosen[:, None]) - (now - then).gather(1, rejected[:, None])
        loss = -F.logsigmoid(0.5 * margin).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


PROGRAMS = [
    *planted(average_by_subtraction, "ema_stagnation", *AVERAGE, steps=12),
    *planted(average_by_lerp, "ema_stagnation", *AVERAGE, steps=12),
    *planted(average_by_foreach, "ema_stagnation", *AVERAGE, steps=12),
    *planted(average_by_foreach_lerp, "ema_stagnation", *AVERAGE, steps=12),
    *planted(average_by_the_library, "ema_stagnation", *AVERAGE, steps=12),
    *planted(average_made_anew, "ema_stagnation", *AVERAGE, steps=12, fixed_names=True),
    *planted(average_copied_back, "ema_stagnation", *AVERAGE, steps=12),
    *healthy(copies_of_a_target, tools="diagnose monitor examine", survives=None, steps=12),
    *healthy(divergence_from_a_frozen_reference, tools="diagnose monitor examine", survives=None, steps=30),
    *healthy(preferences_beside_a_reference, tools="diagnose monitor examine", survives=None, steps=30),
]
