"""The AMP loop of the PyTorch documentation, for cases whose fault is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from . import Training, low


def usual(
    model: nn.Module,
    optimizer: Any,
    data: Callable[[int], tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    dtype: torch.dtype,
    *,
    scaler: GradScaler | None = None,
    clip: float | None = None,
) -> Training:
    """Autocast around forward and loss, a scaler for fp16, clipping at the right place."""
    scaler = scaler or GradScaler("cpu", enabled=dtype == torch.float16)

    def step(i: int) -> Tensor:
        batch = data(i)
        optimizer.zero_grad()
        with low(dtype):
            loss = loss_of(*batch)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)
