"""Any tensor as one dense line of floating-point values, without copying where that is possible."""

from __future__ import annotations

import functools
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
    """The line in parts that torch can reduce, widened to fp32 where its own type has no kernels.

    16-bit lines come in parts too: the CPU reduces them through an fp32 copy of the whole part.
    """
    if line.dtype in (torch.float32, torch.float64):
        yield line
        return
    for start in range(0, line.numel(), PIECE):
        part = line[start : start + PIECE]
        yield part if line.dtype in NATIVE else part.float()


RUN = 16  # a cache line of fp32
_ADVANCE = 0xC13FA9A9  # 0.7548776662 (1 / plastic number) of 2**32: of eleven candidates the one that missed the fewest channels


def thin(line: Tensor, most: int) -> Tensor:
    """At most `most` elements (16 or more) in short runs, one in each of equally long sections of the line (one may come twice).

    Runs, because a lone element costs a whole cache line. The place in the section advances by an irrational share: at a fixed
    distance, runs fall into step with a dimension of the tensor (all of 1024 x 64 x 32 x 32 came from 6 of the 64 channels).
    Of 16384 elements, some lie in every index of any dimension up to 128, and in nearly all of a larger one.
    """
    if line.numel() <= most:
        return line
    rows = line.numel() // RUN
    whole = line if rows * RUN == line.numel() else line[: rows * RUN]
    return whole.view(rows, RUN).index_select(0, _starts(rows, most // RUN, line.device)).view(-1)


@functools.lru_cache(maxsize=1024)  # a model's tensors come back every step; 8 kB each
def _starts(rows: int, runs: int, device: torch.device) -> Tensor:
    section = torch.arange(runs, device=device)
    fraction = (section * _ADVANCE).bitwise_and_(0xFFFFFFFF)  # of a section, in 2**-32
    return fraction.add_(section, alpha=1 << 32).floor_divide_(runs).mul_(rows).bitwise_right_shift_(32)
