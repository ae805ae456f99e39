"""The loop that most users write, and the harm that a look at the loss curve shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from . import Run, Training, low
from .amp_loop import usual

Batch = Sequence[Tensor]


def supervised(
    model: nn.Module,
    optimizer: Any,
    batch: Callable[[int], Batch],
    criterion: Callable[..., Tensor],
    dtype: torch.dtype,
    scaler: GradScaler | None = None,
    clip: float | None = None,
) -> Training:
    """`criterion(model(*inputs), target)` under autocast, with a scaler only if there is one; a batch ends with its target."""

    def loss_of(*tensors: Tensor) -> Tensor:
        *inputs, target = tensors
        return criterion(model(*inputs), target)

    if scaler is not None:
        return usual(model, optimizer, batch, loss_of, dtype, scaler=scaler, clip=clip)

    def step(i: int) -> Tensor:
        tensors = batch(i)
        optimizer.zero_grad(set_to_none=True)
        with low(dtype):
            loss = loss_of(*tensors)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def ends_above(limit: float) -> Callable[[Run], bool]:
    """The last quarter of the losses is, on average, above `limit` or not finite."""

    def shows(run: Run) -> bool:
        tail = run.losses[-max(1, len(run.losses) // 4) :]
        return not sum(tail) / len(tail) <= limit

    return shows


def named(model: nn.Module, *also: str) -> tuple[str, ...]:
    """All parameters: each is a fair name for what concerns all of them."""
    return (*(name for name, _ in model.named_parameters()), *also)
