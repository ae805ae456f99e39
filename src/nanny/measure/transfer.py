"""Numbers on their way from the device to the host, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def reads_freely(device: torch.device) -> bool:
    """Is reading a value on this device free of a wait?"""
    return device.type == "cpu"


class PendingRead:
    """Copies device tensors to pinned memory and says when they have arrived. On the CPU they are there at once.

    Pinned memory is a must: a non-blocking copy to pageable memory may be read before it was written.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._host: list[Tensor | None] = []
        events: dict[torch.device, Any] = {}
        for tensor in tensors:
            if tensor is None or tensor.device.type == "cpu":
                self._host.append(tensor)
                continue
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            self._host.append(host)
            events[tensor.device] = None
        self._events = [torch.Event(device) for device in events]
        for event in self._events:
            event.record()

    def ready(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def numbers(self) -> list[float | None]:
        """Of tensors with one element each; call it when ready, or it waits."""
        self.wait()
        return [None if host is None else float(host.item()) for host in self._host]

    def arrays(self) -> list[Any]:
        """numpy arrays; call it when ready, or it waits."""
        self.wait()
        return [None if host is None else host.numpy() for host in self._host]
