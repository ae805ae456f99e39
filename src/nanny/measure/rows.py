"""One packed row of numbers per tensor: minimum, maximum, sum of squares, sum (and an exponent histogram if asked).

`pack_rows` only enqueues work on the device; `read_rows` copies the packed numbers to the host, once for all tensors. NaN and
infinities need no pass of their own: aminmax carries both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..records import TensorStats
from .flatten import PIECE, as_line, pieces
from .histogram import exponent_histograms

_BLOCK = 1 << 16  # a sum of squares is taken per block: fp32 loses 0.1 % over 1e8 elements in one go, 1e-7 in blocks
_LARGE = 1 << 20
# Magnitudes whose squares fp32 can hold and sum. Outside, the numbers are taken again in fp64 (where the host can look).
_SAFE_LOW, _SAFE_HIGH = 1e-15, 1e15


@dataclass(frozen=True)
class PackedRows:
    """Device numbers of several tensors: `values` is [4, n] (min, max, sum of squares, sum)."""

    counts: tuple[int, ...]
    values: Tensor
    histograms: Tensor | None


def pack_rows(tensors: Sequence[Tensor], *, histogram: bool = False) -> PackedRows:
    """Numbers of floating-point tensors that live on one device; nothing is read back."""
    lines = [as_line(t) for t in tensors]
    counts = tuple(line.numel() for line in lines)
    device = lines[0].device if lines else torch.device("cpu")
    wide = torch.float32 if device.type == "mps" else torch.float64
    rows = [_reduce(line, torch.float32) for line in lines]
    columns = [torch.stack([row[i] for row in rows]) for i in range(4)] if rows else []
    values = torch.stack([c.to(wide) for c in columns]) if columns else torch.zeros(4, 0, dtype=wide)
    if device.type == "cpu":
        _repair_extremes(lines, values)
    return PackedRows(counts, values, exponent_histograms(lines) if histogram and lines else None)


def _reduce(line: Tensor, accumulator: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimum, maximum, sum of squares and sum of one line, the last two in `accumulator` (fp64 lines in their own type)."""
    if line.numel() == 0:
        zero = torch.zeros((), dtype=torch.float32, device=line.device)
        return zero, zero, zero, zero
    low: Tensor | None = None
    for piece in pieces(line):
        part = _reduce_piece(piece, torch.float64 if piece.dtype == torch.float64 else accumulator)
        if low is None:
            low, high, squares, total = part
        else:
            low, high = torch.minimum(low, part[0]), torch.maximum(high, part[1])
            squares, total = squares + part[2], total + part[3]
    assert low is not None
    # stacking needs one type; a minimum or maximum of 16-bit values is exact in 32 bits
    kind = torch.float64 if line.dtype == torch.float64 else torch.float32
    return low.to(kind), high.to(kind), squares, total


def _reduce_piece(piece: Tensor, accumulator: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    low, high = torch.aminmax(piece)
    return low, high, _sum_of_squares(piece, accumulator), torch.sum(piece, dtype=accumulator)


def _sum_of_squares(piece: Tensor, accumulator: torch.dtype) -> Tensor:
    n = piece.numel()
    if n < _LARGE:
        return torch.linalg.vector_norm(piece, dtype=accumulator).square()
    whole = n - n % _BLOCK
    blocks = torch.linalg.vector_norm(piece[:whole].view(-1, _BLOCK), dim=1, dtype=accumulator).square().sum()
    return blocks if whole == n else blocks + torch.linalg.vector_norm(piece[whole:], dtype=accumulator).square()


def _repair_extremes(lines: list[Tensor], values: Tensor) -> None:
    """On the host, where looking is free: redo in fp64 what fp32 could not square. Rare, so its cost does not matter."""
    low, high, _, _ = values.tolist()
    for i, (a, b) in enumerate(zip(low, high)):
        largest = max(abs(a), abs(b))
        if largest and math.isfinite(largest) and not _SAFE_LOW < largest < _SAFE_HIGH:
            squares = total = torch.zeros((), dtype=torch.float64)
            for start in range(0, lines[i].numel(), PIECE):
                piece = lines[i][start : start + PIECE].double()
                squares, total = squares + piece.square().sum(), total + piece.sum()
            values[2, i], values[3, i] = squares, total


def count_nonfinite(tensor: Tensor) -> tuple[int, int, int]:
    """Exact counts of NaN, +Inf and -Inf. Waits for the device: call it only when a row shows something non-finite."""
    nan = posinf = neginf = 0
    for piece in pieces(as_line(tensor)):
        nan += int(piece.isnan().sum())
        posinf += int(piece.isposinf().sum())
        neginf += int(piece.isneginf().sum())
    return nan, posinf, neginf


def read_rows(rows: PackedRows, tensors: Sequence[Tensor] = ()) -> list[TensorStats]:
    """The packed numbers on the host; with `tensors`, exact counts for those that hold something non-finite."""
    low, high, squares, total = rows.values.tolist()
    histograms = rows.histograms.tolist() if rows.histograms is not None else None
    out = []
    for i, count in enumerate(rows.counts):
        stats = TensorStats(
            count=count,
            minimum=low[i],
            maximum=high[i],
            sum_squares=squares[i],
            mean=total[i] / count if count else 0.0,
            histogram=tuple(histograms[i]) if histograms else (),
        )
        if tensors and stats.nonfinite:
            nan, posinf, neginf = count_nonfinite(tensors[i])
            stats = TensorStats(**{**vars(stats), "nan": nan, "posinf": posinf, "neginf": neginf})
        out.append(stats)
    return out


def measure_tensors(tensors: Sequence[Tensor], *, histogram: bool = False) -> list[TensorStats]:
    """Pack and read in one go, for callers that may wait."""
    return read_rows(pack_rows(tensors, histogram=histogram), tensors)
