"""Any tensor as one dense line of floating-point values, without copying where that is possible."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# What has kernels for aminmax, sum and norm; everything else (fp8) is widened piece by piece.
NATIVE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
PIECE = 1 << 24


def local_part(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that lives on this rank; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def fills_memory(tensor: Tensor) -> bool:
    """Is every element of its memory range used exactly once (contiguous but for the order of dimensions)?"""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def as_line(tensor: Tensor) -> Tensor:
    """All elements in memory order: order does not matter to statistics, and no copy is made of a transposed tensor."""
    tensor = local_part(tensor.detach())
    if tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.reshape(-1)
    if fills_memory(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)


def pieces(line: Tensor) -> Iterator[Tensor]:
    """The line in parts that torch can reduce, widened to fp32 where its own type has no kernels."""
    if line.dtype in NATIVE:
        yield line
        return
    for start in range(0, line.numel(), PIECE):
        yield line[start : start + PIECE].float()


RUN = 8


def thin(line: Tensor, most: int) -> Tensor:
    """At most `most` elements in short runs, evenly spread.

    Runs, because a lone element costs a whole cache line (12 ms instead of 2 for 100 tensors of 1M elements). The distance of the
    runs shares no factor with the length, hence with no dimension: a regular layout (channels, heads) cannot hide between them.
    """
    n = line.numel()
    if n <= most:
        return line
    distance = -(-n * RUN // most)
    while math.gcd(distance, n) != 1:
        distance += 1
    runs = (n - RUN) // distance + 1
    return line.as_strided((runs, RUN), (distance, 1)).reshape(-1)
