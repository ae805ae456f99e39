"""Numbers on their way from the device to the host, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def reads_freely(device: torch.device) -> bool:
    """Is reading a value on this device free of a wait?"""
    return device.type == "cpu"


def copy_of(scalar: Tensor) -> Tensor:
    """One of its own, in a type that the host can read."""
    return scalar.detach().to(torch.float64 if scalar.dtype == torch.float64 else torch.float32, copy=True)


def number_of(scalar: Tensor) -> Tensor | float:
    """At once where that is free, else a copy that is read later."""
    is_plain = type(scalar) is Tensor and scalar.layout is torch.strided and not _is_functorch_wrapped(scalar)
    return float(scalar.item()) if is_plain and scalar.numel() == 1 and reads_freely(scalar.device) else copy_of(scalar)


def is_finite(tensor: Tensor | float) -> bool:
    """Asked on the host: it waits."""
    if isinstance(tensor, float):
        return math.isfinite(tensor)
    is_number = tensor.numel() == 1 and tensor.is_floating_point()
    return math.isfinite(tensor.item()) if is_number else bool(tensor.isfinite().all())


class PendingRead:
    """Copies device tensors to pinned memory and says when they have arrived. On the CPU they are there at once, as are numbers
    and arrays that were never elsewhere.

    Pinned memory is a must: a non-blocking copy to pageable memory may be read before it was written.
    """

    def __init__(self, tensors: Sequence[Tensor | np.ndarray | float | None]) -> None:
        self._host: list[Any] = []
        events: dict[torch.device, Any] = {}
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.is_cpu:
                self._host.append(tensor)
                continue
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            self._host.append(host)
            events[tensor.device] = None
        self._events = [torch.Event(device) for device in events]
        for event in self._events:
            event.record()

    @property
    def is_on_host(self) -> bool:
        return not self._events

    def ready(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def numbers(self) -> list[float | None]:
        """Of tensors with one element each; call it when ready, or it waits."""
        self.wait()
        return [float(host.item()) if isinstance(host, Tensor) else host for host in self._host]

    def arrays(self) -> list[Any]:
        """numpy arrays; call it when ready, or it waits."""
        self.wait()
        return [host.numpy() if isinstance(host, Tensor) else host for host in self._host]
