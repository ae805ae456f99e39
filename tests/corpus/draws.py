"""Random data of the programs, apart from torch's global generator; `drawing` gives other data of the same kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Drawing:
    seed: int = 0
    transposed: bool = False


_now = Drawing()


@contextmanager
def drawing(seed: int = 0, transposed: bool = False) -> Iterator[None]:
    """Other random numbers, or the same ones in another memory layout, for what is built and trained inside."""
    before = (_now.seed, _now.transposed)
    _now.seed, _now.transposed = seed, transposed
    try:
        seed_torch()
        yield
    finally:
        _now.seed, _now.transposed = before


def seed_torch(seed: int = 0) -> None:
    torch.manual_seed(seed + 1000 * _now.seed)


def generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed((hash(key) + 7919 * _now.seed) % 2**31)


def plain_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 1000 * _now.seed)


def noise(*shape: int, key: tuple[int, ...] | int = 1) -> Tensor:
    return laid_out(torch.randn(*shape, generator=plain_generator(key) if isinstance(key, int) else generator(*key)))


def whole(top: int, *shape: int, key: int = 3) -> Tensor:
    """Whole numbers below `top`."""
    return torch.randint(0, top, shape, generator=plain_generator(key))


def laid_out(data: Any) -> Any:
    """The same numbers, with the strides of channels last or of a transposed matrix where that is asked for."""
    if not _now.transposed or not isinstance(data, Tensor) or data.dim() < 2 or not data.is_contiguous():
        return data
    if data.dim() == 4:
        return data.contiguous(memory_format=torch.channels_last)
    return data.transpose(0, -1).contiguous().transpose(0, -1)
