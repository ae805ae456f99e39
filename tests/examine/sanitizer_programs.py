"""What the programs of the sanitizer's tests are made of: tiny training steps with one fault each, or repaired."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

FP16, BF16 = torch.float16, torch.bfloat16


@dataclass
class Program:
    model: nn.Module
    step: Callable[[], Any]
    scaler: GradScaler | None = None


@dataclass(frozen=True)
class Fault:
    name: str
    kinds: tuple[str, ...]
    cause: str
    culprits: tuple[str, ...]
    build: Callable[[bool], Program]
    in_reference: bool = False


FAULTS: dict[str, Fault] = {}


def fault(kinds: str, cause: str, culprits: str, in_reference: bool = False) -> Callable[[Any], Any]:
    def register(build: Any) -> Any:
        FAULTS[build.__name__] = Fault(build.__name__, tuple(kinds.split()), cause, tuple(culprits.split()), build, in_reference)
        return build

    return register


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low(dtype: torch.dtype | None) -> Any:
    return torch.autocast("cpu", dtype=dtype) if dtype is not None else contextlib.nullcontext()


def training(
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    dtype: torch.dtype | None = BF16,
    optimizer: Callable[[Any], Any] | None = None,
    scaled: bool | None = None,
    after: Callable[[], None] | None = None,
) -> Program:
    """One ordinary step; a GradScaler where the type is fp16."""
    chosen = (optimizer or (lambda p: torch.optim.SGD(p, lr=1e-3)))(model.parameters())
    scaled = dtype == FP16 if scaled is None else scaled
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=scaled)

    def step() -> None:
        chosen.zero_grad()
        with low(dtype):
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.step(chosen)
        scaler.update()
        if after is not None:
            after()

    return Program(model, step, scaler if scaled else None)


class Between(nn.Module):
    """Layers around the module `fault`, under test."""

    def __init__(self, fault: nn.Module, width: int = 16, outputs: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.fault = fault
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fault(self.first(x)))


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def between(function: Callable[[Tensor], Tensor], dtype: torch.dtype, scaled: bool | None = None, rows: int = 32) -> Program:
    model = Between(Call(function))
    x, y = noise(rows, 16), noise(rows, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), dtype, scaled=scaled)
