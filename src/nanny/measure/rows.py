"""One packed row of numbers per tensor: minimum, maximum, sum of squares, sum (and an exponent histogram if asked).

Measuring only enqueues work on the device; the packed numbers are copied to the host together, once for all tensors. NaN and
infinities need no pass of their own: aminmax carries both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.formats import HISTOGRAM_BINS
from . import transfer
from .flatten import NATIVE, PIECE, as_line, pieces
from .histogram import SAMPLE, ExponentCounts
from .transfer import PendingRead

_BLOCK = 1 << 16  # a sum of squares is taken per block: fp32 loses 0.1 % over 1e8 elements in one go, 1e-7 in blocks
_LARGE = 1 << 20
_SMALL = 1 << 12
_COPIES = 1 << 16  # elements of small tensors that wait to be measured together
_COPIED = frozenset({torch.float16, torch.bfloat16, torch.float32})  # exact in fp32
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_NOT_YET = (math.nan,) * 4
# Magnitudes whose squares fp32 can hold and sum. Outside, the numbers are taken again in fp64 (where the host can look).
_SAFE_LOW, _SAFE_HIGH = 1e-15, 1e14


def _reduce(line: Tensor, accumulator: torch.dtype, with_sum: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimum, maximum, sum of squares and (if asked) sum of one line, the last two in `accumulator`, of fp64 in fp64."""
    if line.numel() == 0:
        zero = torch.zeros((), dtype=torch.float32, device=line.device)
        return zero, zero, zero, zero
    low: Tensor | None = None
    for piece in pieces(line):
        part = _reduce_piece(piece, torch.float64 if piece.dtype == torch.float64 else accumulator, with_sum)
        if low is None:
            low, high, squares, total = part
        else:
            low, high = torch.minimum(low, part[0]), torch.maximum(high, part[1])
            squares, total = squares + part[2], total + part[3]
    assert low is not None
    if line.dtype in (torch.float16, torch.bfloat16):  # stacking needs one type; 16-bit values are exact in 32 bits
        low, high = low.float(), high.float()
    return low, high, squares, total


def _reduce_piece(piece: Tensor, accumulator: torch.dtype, with_sum: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    low, high = torch.aminmax(piece)
    squares = _sum_of_squares(piece, accumulator)
    return low, high, squares, torch.sum(piece, dtype=accumulator) if with_sum else squares


def _sum_of_squares(piece: Tensor, accumulator: torch.dtype) -> Tensor:
    n = piece.numel()
    if n < _LARGE and piece.dtype == accumulator == torch.float32:
        return torch.dot(piece, piece)  # twice as fast as a norm
    if n < _LARGE:
        return _squared_norm(piece, accumulator)
    whole = n - n % _BLOCK
    blocks = _squared_norm(piece[:whole].view(-1, _BLOCK), accumulator).sum()
    return blocks if whole == n else blocks + _squared_norm(piece[whole:], accumulator)


def _squared_norm(lines: Tensor, accumulator: torch.dtype) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(lines, dim=-1, dtype=accumulator)
    return norm.square()


def _repaired(line: Tensor, low: float, high: float, squares: float, total: float) -> tuple[float, float, float, float]:
    largest = max(abs(low), abs(high))
    if not largest or not math.isfinite(largest) or _SAFE_LOW < largest < _SAFE_HIGH:
        return low, high, squares, total
    squares = total = 0.0
    for start in range(0, line.numel(), PIECE):
        part = line[start : start + PIECE].double()
        squares, total = squares + float(part.square().sum()), total + float(part.sum())
    return low, high, squares, total


def count_nonfinite(tensor: Tensor) -> tuple[int, int, int]:
    """Exact counts of NaN, +Inf and -Inf. Waits for the device: call it only when a row shows something non-finite."""
    nan = posinf = neginf = 0
    for piece in pieces(as_line(tensor)):
        nan += int(piece.isnan().sum())
        posinf += int(piece.isposinf().sum())
        neginf += int(piece.isneginf().sum())
    return nan, posinf, neginf


def pack_gradients(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], PendingRead]:
    """Sum of squares, minimum and maximum ([3, n]) of tensors on one device, for every step.

    Tensor by tensor, so that the second pass finds it in the cache: 3 ms instead of 6 for a model of 7M parameters. Small ones
    on the host together: a call of torch costs more than all their numbers.
    """
    if tensors and transfer.reads_freely(tensors[0].device):
        counts, packed = _packed_on_host(tensors)
        return counts, PendingRead([torch.from_numpy(packed)])
    lines = [as_line(t) for t in tensors]
    rows = [_reduce(line, torch.float32, with_sum=False) for line in lines]
    values = torch.stack([torch.stack([_widen(row[k]) for row in rows]) for k in (2, 0, 1)])
    return tuple(line.numel() for line in lines), PendingRead([values])


def _packed_on_host(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], Any]:
    counts, packed = [], np.zeros((3, len(tensors)))
    small: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        plain = tensor if type(tensor) is Tensor else as_line(tensor)
        count = plain.numel()
        counts.append(count)
        if 0 < count <= _SMALL and plain is tensor and plain.dtype in NATIVE:
            small.setdefault(plain.dtype, []).append(i)
        else:
            line = as_line(plain)
            low, high, squares, _ = _repaired(line, *(x.item() for x in _reduce(line, torch.float32, with_sum=False)))
            packed[:, i] = squares, low, high
    for members in small.values():
        whole = len(members) == len(tensors)
        lengths = counts if whole else [counts[i] for i in members]
        packed[:, slice(None) if whole else members] = _joined_rows(joined([tensors[i] for i in members]), lengths)
    return tuple(counts), packed


def joined(tensors: Sequence[Tensor]) -> Any:
    """The values of plain tensors of one type, one after the other, in numpy."""
    grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        line = torch._C._nn.flatten_dense_tensors(list(tensors))
        if len(tensors) == 1:
            line = line.detach().resolve_neg()
        return (line.float() if line.dtype is torch.bfloat16 else line).numpy()
    finally:
        torch._C._set_grad_enabled(grad)


def _joined_rows(values: Any, lengths: Sequence[int], with_sum: bool = False) -> tuple[Any, ...]:
    """Sum of squares, minimum and maximum of the parts of a line, and their sum if asked."""
    starts = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.add.reduceat(np.square(values, dtype=np.float64), starts)
        found = squares, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        return (*found, np.add.reduceat(values, starts, dtype=np.float64)) if with_sum else found


def _widen(number: Tensor) -> Tensor:
    return number.float() if number.device.type == "mps" else number.double()


def _is_copied(tensor: Tensor) -> bool:
    """Is it small, plain, and on the host?"""
    if type(tensor) not in _PLAIN or tensor.dtype not in _COPIED or not transfer.reads_freely(tensor.device):
        return False
    return 0 < tensor.numel() <= _SMALL and not tensor.is_neg()


class RowBuffer:
    """Rows of one step, measured as the tensors appear (they may be overwritten a moment later) and read together at the end.

    Where reading is free (CPU) a row is on the host at once and `is_bad` answers; elsewhere nothing is read before `pending`.
    Small tensors on the host are copied, and measured together: a call of torch costs more than all their numbers.
    """

    def __init__(self, sample: int = SAMPLE) -> None:
        self.counts: list[int] = []
        self._rows: list[tuple[Any, Any, Any, Any]] = []
        self._copies: dict[int, Tensor] = {}  # by row, which is to come
        self._copied = 0  # elements
        self._owners: list[int] = []
        self._exponents = ExponentCounts(sample)

    def __len__(self) -> int:
        return len(self.counts)

    def add(self, tensor: Tensor, *, histogram: bool = False) -> int:
        """Measures now; the row's index comes back."""
        if _is_copied(tensor):
            return self._add_copy(as_line(tensor).to(torch.float32, copy=True), histogram)
        line = as_line(tensor)
        row: tuple[Any, Any, Any, Any] = _reduce(line, torch.float32)
        if transfer.reads_freely(line.device):
            row = _repaired(line, *(x.item() for x in row))
        self.counts.append(line.numel())
        self._rows.append(row)
        if histogram and line.numel():
            self._owners.append(len(self.counts) - 1)
            self._exponents.add(line)
        return len(self.counts) - 1

    def add_all(self, tensors: Sequence[Tensor]) -> None:
        """With histograms."""
        if len(tensors) > 1 and all(map(_is_copied, tensors)) and len({t.dtype for t in tensors}) == 1:
            for line in torch.split(torch.from_numpy(joined(tensors)).float(), [t.numel() for t in tensors]):
                self._add_copy(line, histogram=True)
        else:
            for tensor in tensors:
                self.add(tensor, histogram=True)

    def _add_copy(self, line: Tensor, histogram: bool) -> int:
        index = len(self.counts)
        if self._copied > _COPIES:
            self._measure_copies()
        self._copies[index] = line
        self._copied += line.numel()
        self.counts.append(line.numel())
        self._rows.append(_NOT_YET)
        if histogram:
            self._owners.append(index)
            self._exponents.add(line, is_copy=True)
        return index

    def _measure_copies(self) -> None:
        if self._copies:
            lines = list(self._copies.values())
            squares, low, high, total = _joined_rows(joined(lines), [line.numel() for line in lines], with_sum=True)
            for i, row in zip(self._copies, zip(low.tolist(), high.tolist(), squares.tolist(), total.tolist())):
                self._rows[i] = row
            self._copies, self._copied = {}, 0

    def _bounds(self, index: int) -> tuple[Any, Any]:
        if index in self._copies:
            self._measure_copies()
        return self._rows[index][:2]

    def add_bounds(self, tensor: Tensor) -> int:
        """Minimum and maximum alone: enough to tell whether it is finite."""
        line = as_line(tensor)
        bounds = torch.aminmax(next(pieces(line))) if line.numel() else (line.new_zeros(()), line.new_zeros(()))
        low, high = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in bounds)
        self.counts.append(line.numel())
        self._rows.append((low, high, low, low))
        return len(self.counts) - 1

    def is_bad(self, index: int) -> bool | None:
        """Does the row hold NaN or an infinity? None where that cannot be known without waiting for the device."""
        copy = self._copies.get(index)
        if copy is not None and math.isfinite(torch.dot(copy, copy).item()):
            return False
        low, high = self._bounds(index)
        return None if isinstance(low, Tensor) else not (math.isfinite(low) and math.isfinite(high))

    def is_clean(self, index: int) -> bool | None:
        """Neither NaN nor +Inf? -Inf alone is what masks are made of."""
        low, high = self._bounds(index)
        return None if isinstance(low, Tensor) else low == low and high < math.inf

    def is_zero(self, index: int) -> bool:
        low, high = self._bounds(index)
        return not isinstance(low, Tensor) and low == 0 == high

    def largest(self, index: int) -> float:
        low, high = self._bounds(index)
        return math.nan if isinstance(low, Tensor) else max(abs(low), abs(high))

    def pending(self) -> PendingRows:
        """Starts the copy to the host of everything measured so far."""
        self._measure_copies()
        held: dict[torch.device, list[int]] = {}
        for i, row in enumerate(self._rows):
            if isinstance(row[0], Tensor):
                held.setdefault(row[0].device, []).append(i)
        stacked = [torch.stack([torch.stack([_widen(x) for x in self._rows[i]]) for i in rows]) for rows in held.values()]
        histograms = self._exponents.histograms() if self._owners else None
        order = [i for rows in held.values() for i in rows]
        return PendingRows(tuple(self.counts), self._rows, order, self._owners, PendingRead([histograms, *stacked]))


class PendingRows:
    """Rows on their way to the host."""

    def __init__(self, counts: tuple[int, ...], rows: list[Any], held: list[int], owners: list[int], read: PendingRead) -> None:
        self._counts, self._rows, self._held, self._owners, self._read = counts, rows, held, owners, read

    def ready(self) -> bool:
        return self._read.ready()

    def table(self) -> tuple[Any, Any]:
        """numpy [5, n] (count, min, max, sum of squares, sum), and histograms [n, HISTOGRAM_BINS] or None; zeros: not taken."""
        histograms, *stacked = self._read.arrays()
        for i, row in zip(self._held, (row for part in stacked for row in part)):
            self._rows[i] = tuple(row)
        values = np.empty((5, len(self._counts)))
        values[0] = self._counts
        if self._counts:
            values[1:] = np.array(self._rows, dtype=np.float64).T
        if histograms is None:
            return values, None
        full = np.zeros((len(self._counts), HISTOGRAM_BINS), dtype=np.int64)
        full[self._owners] = histograms
        return values, full
