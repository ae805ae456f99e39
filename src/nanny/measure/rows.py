"""One packed row of numbers per tensor: minimum, maximum, sum of squares, sum (and an exponent histogram if asked).

Measuring only enqueues work on the device; the packed numbers are copied to the host together, once for all tensors. NaN and
infinities need no pass of their own: aminmax carries both.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.formats import HISTOGRAM_BINS
from . import transfer
from .flatten import NATIVE, PIECE, as_line, pieces
from .histogram import SAMPLE, ExponentCounts, count_parts
from .transfer import PendingRead

_BLOCK = 1 << 16  # a sum of squares is taken per block: fp32 loses 0.1 % over 1e8 elements in one go, 1e-7 in blocks
_LARGE = 1 << 20
_SMALL = 1 << 12
_COPIES = 1 << 16  # elements of small tensors that wait to be measured together
_COPIED = frozenset({torch.float16, torch.bfloat16, torch.float32})  # exact in fp32
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_NOT_YET = (math.nan,) * 4
_DTYPE, _DEVICE, _LAYOUT, _IS_CPU, _IS_NESTED = (
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "layout", "is_cpu", "is_nested")
)
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
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


def _row_in_fp64(line: Tensor, low: float, high: float, squares: float, total: float) -> tuple[float, float, float, float]:
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


class HostLayout:
    """Which of these tensors on the host are measured together, and where each begins: found out once for many steps.

    Small ones are joined: a call of torch costs more than all their numbers. Large ones are taken one by one, so that the second
    pass finds them in the cache: 3 ms instead of 6 for a model of 7M parameters.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        plain = [tensor if type(tensor) is Tensor else as_line(tensor) for tensor in tensors]
        self.counts = tuple(map(Tensor.numel, plain))
        self.column = np.array(self.counts, dtype=np.float64)
        self.are_plain = all(map(operator.is_, plain, tensors))
        self._dtypes = list(map(_DTYPE, plain))
        self._bytes_each = list(map(Tensor.element_size, plain))
        small = [0 < n <= _SMALL and p is t and p.dtype in NATIVE for n, p, t in zip(self.counts, plain, tensors)]
        self._alone = [i for i, is_small in enumerate(small) if not is_small]
        self._together: list[tuple[list[int], np.ndarray]] = []
        for dtype in dict.fromkeys(self._dtypes):
            members = [i for i, is_small in enumerate(small) if is_small and self._dtypes[i] is dtype]
            if members:
                self._together.append((members, _starts([self.counts[i] for i in members])))
        is_wide = set(self._dtypes) == {torch.float32}
        self._is_one_line = is_wide and not self._alone and sum(self.counts) <= _COPIES

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Are these like those that it was made for? Nothing is done per tensor that is not done in C."""
        return (
            self.are_plain
            and set(map(type, tensors)) == {Tensor}
            and set(map(_LAYOUT, tensors)) == {torch.strided}
            and all(map(_IS_CPU, tensors))
            and not any(map(_IS_NESTED, tensors))
            and not any(map(_is_functorch_wrapped, tensors))
            and tuple(map(Tensor.numel, tensors)) == self.counts
            and list(map(_DTYPE, tensors)) == self._dtypes
            and self._have_memory(tensors)
        )

    def _have_memory(self, tensors: Sequence[Tensor]) -> bool:
        """It may have been given back. Asked by address: a storage in Python is an object that the garbage collector counts, and
        those of 2,000 gradients would call it three times a step."""
        offsets = map(operator.mul, map(Tensor.storage_offset, tensors), self._bytes_each)
        return all(map(operator.ne, map(Tensor.data_ptr, tensors), offsets))

    def read(self, tensors: Sequence[Tensor]) -> PendingRead | JoinedRead:
        if self._is_one_line:
            return JoinedRead(self._together[0][1], _in_line(tensors))
        return PendingRead([self._pack(tensors)])

    def _pack(self, tensors: Sequence[Tensor]) -> np.ndarray:
        packed = np.empty((3, len(tensors)))
        for i in self._alone:
            line = as_line(tensors[i])
            low, high, squares, _ = _row_in_fp64(line, *(x.item() for x in _reduce(line, torch.float32, with_sum=False)))
            packed[:, i] = squares, low, high
        for members, starts in self._together:
            if len(members) == len(tensors):
                packed[0], packed[1], packed[2] = _joined_rows(line_of(tensors), starts)
            else:
                packed[:, members] = _joined_rows(line_of([tensors[i] for i in members]), starts)
        return packed


class JoinedRead:
    """Small gradients copied into one line. One number tells whether they are finite; the rest is found out when it is asked for,
    most often for the lines of many steps in one go, which takes a fifth of the time."""

    is_on_host = True

    def __init__(self, starts: np.ndarray, line: Tensor) -> None:
        self.starts, self.line = starts, line
        self.squares = torch.dot(line, line).item()  # of all of them
        self.packed: np.ndarray | None = None

    def ready(self) -> bool:
        return True

    def arrays(self) -> list[Any]:
        return [self.packed if self.packed is not None else measured_lines([self])[0]]


def measured_lines(reads: Sequence[JoinedRead]) -> np.ndarray:
    """[k, 3, n] of lines of one layout."""
    packed = np.empty((len(reads), 3, len(reads[0].starts)))
    for rows, one in zip(packed, reads):  # one by one: memory for all of them at once would have to be fetched anew
        if one.packed is None:
            rows[0], rows[1], rows[2] = _joined_rows(one.line.numpy(), one.starts)
            one.packed = rows
        else:
            rows[:] = one.packed
    return packed


def pack_gradients(
    tensors: Sequence[Tensor], layout: HostLayout | None = None
) -> tuple[tuple[int, ...], PendingRead | JoinedRead]:
    """Sum of squares, minimum and maximum ([3, n]) of tensors on one device, for every step. `layout`: one that fits them."""
    if layout is not None or (tensors and transfer.reads_freely(tensors[0].device)):
        layout = layout or HostLayout(tensors)
        return layout.counts, layout.read(tensors)
    lines = [as_line(t) for t in tensors]
    rows = [_reduce(line, torch.float32, with_sum=False) for line in lines]
    values = torch.stack([torch.stack([_widen(row[k]) for row in rows]) for k in (2, 0, 1)])
    return tuple(line.numel() for line in lines), PendingRead([values])


def line_of(tensors: Sequence[Tensor]) -> Any:
    """The values of plain tensors of one type, one after the other, in numpy."""
    line = _in_line(tensors)
    return (line.float() if line.dtype is torch.bfloat16 else line).numpy()


def _in_line(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of them, outside the program's autocast: to bfloat16, it refuses to join what is float16."""
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():
            return _joined(tensors)
    return _joined(tensors)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        line = torch._C._nn.flatten_dense_tensors(list(tensors))
        return line.detach().resolve_neg().clone() if len(tensors) == 1 else line
    finally:
        torch._C._set_grad_enabled(grad)


def _starts(lengths: Sequence[int]) -> np.ndarray:
    """Where each part of a line begins."""
    return np.cumsum([0, *lengths[:-1]], dtype=np.int64)


def _joined_rows(values: Any, starts: np.ndarray, with_sum: bool = False) -> tuple[Any, ...]:
    """Sum of squares, minimum and maximum of the parts of a line, and their sum if asked."""
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


def split_small(tensors: Sequence[Tensor], most: int = _SMALL) -> tuple[dict[torch.dtype, list[int]], list[int]]:
    """Positions of those that may be joined, by type, and of the others."""
    together: dict[torch.dtype, list[int]] = {}
    alone: list[int] = []
    plain = (  # asked of all in C
        _PLAIN.issuperset(map(type, tensors))
        and all(map(transfer.reads_freely, set(map(_DEVICE, tensors))))
        and not any(map(Tensor.is_neg, tensors))
    )
    for i, (n, dtype) in enumerate(zip(map(Tensor.numel, tensors), map(_DTYPE, tensors))):
        if 0 < n <= most and dtype in _COPIED and (plain or _is_copied(tensors[i])):
            together.setdefault(dtype, []).append(i)
        else:
            alone.append(i)
    return together, alone


def which_are_zero(tensors: Sequence[Tensor]) -> list[bool]:
    """Of each tensor on the host: is every element 0?"""
    found = np.zeros(len(tensors), dtype=bool)
    together, alone = split_small(tensors)
    for members in together.values():
        values = line_of([tensors[i] for i in members])
        found[members] = ~np.logical_or.reduceat(values != 0, _starts([tensors[i].numel() for i in members]))
    for i in alone:
        found[i] = not bool(as_line(tensors[i]).any())
    return list(map(bool, found))


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
        self._drawn: list[tuple[list[int], np.ndarray]] = []  # rows of small tensors, and histograms: 0 if not wanted
        self._undrawn: set[int] = set()
        self._small = min(_SMALL, sample)  # of these every element is counted

    def __len__(self) -> int:
        return len(self.counts)

    def add(self, tensor: Tensor, *, histogram: bool = False) -> int:
        """Measures now; the row's index comes back."""
        index = len(self.counts)
        n = tensor.numel()
        self.counts.append(n)
        self._rows.append(_NOT_YET)
        if n > self._small or not _is_copied(tensor):
            self._measure_alone(index, tensor, histogram)
            return index
        if self._copied > _COPIES:
            self._measure_copies()
        self._copies[index] = tensor.detach().clone()
        self._copied += n
        if not histogram:
            self._undrawn.add(index)
        return index

    def add_all(self, tensors: Sequence[Tensor]) -> None:
        """With histograms."""
        together, alone = split_small(tensors, self._small)
        first = len(self.counts)
        self.counts.extend(map(Tensor.numel, tensors))
        self._rows.extend([_NOT_YET] * len(tensors))
        for members in together.values():
            self._measure_together([tensors[i] for i in members], [first + i for i in members])
        for i in alone:
            self._measure_alone(first + i, tensors[i], histogram=True)

    def _measure_alone(self, index: int, tensor: Tensor, histogram: bool) -> None:
        line = as_line(tensor)
        row: tuple[Any, Any, Any, Any] = _reduce(line, torch.float32)
        self.counts[index] = line.numel()
        self._rows[index] = _row_in_fp64(line, *(x.item() for x in row)) if transfer.reads_freely(line.device) else row
        if histogram and line.numel():
            self._owners.append(index)
            self._exponents.add(line)

    def _measure_copies(self) -> None:
        copies, self._copies, self._copied = self._copies, {}, 0
        for dtype in {copy.dtype for copy in copies.values()}:
            rows = [i for i, copy in copies.items() if copy.dtype is dtype]
            self._measure_together([copies[i] for i in rows], rows)

    def _measure_together(self, tensors: Sequence[Tensor], rows: list[int]) -> None:
        """Small ones of one type."""
        values = line_of(tensors).astype(np.float32, copy=len(tensors) == 1)  # of one alone it is the tensor's own memory
        lengths = [self.counts[i] for i in rows]
        squares, low, high, total = _joined_rows(values, _starts(lengths), with_sum=True)
        for i, row in zip(rows, zip(low.tolist(), high.tolist(), squares.tolist(), total.tolist())):
            self._rows[i] = row
        if not self._undrawn.issuperset(rows):
            counted = count_parts(torch.from_numpy(values), lengths).numpy()
            if self._undrawn:
                counted[[i in self._undrawn for i in rows]] = 0
            self._drawn.append((rows, counted))

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
        if copy is not None and math.isfinite(copy.sum(dtype=torch.float32).item()):
            return False
        low, high = self._bounds(index)
        return None if isinstance(low, Tensor) else not (math.isfinite(low) and math.isfinite(high))

    def bad_rows(self) -> list[int]:
        """All rows that are known to be bad."""
        self._measure_copies()
        known = ((i, row[0], row[1]) for i, row in enumerate(self._rows) if not isinstance(row[0], Tensor))
        return [i for i, low, high in known if not (math.isfinite(low) and math.isfinite(high))]

    def is_clean(self, index: int) -> bool | None:
        """Neither NaN nor +Inf? -Inf alone is what masks are made of."""
        low, high = self._bounds(index)
        return None if isinstance(low, Tensor) else low == low and high < math.inf

    def is_zero(self, index: int) -> bool:
        copy = self._copies.get(index)
        if copy is not None:
            return not bool(copy.any())
        low, high = self._bounds(index)
        return not isinstance(low, Tensor) and low == 0 == high

    def largest(self, index: int) -> float:
        low, high = self._bounds(index)
        return math.nan if isinstance(low, Tensor) else max(abs(low), abs(high))

    def start_read(self) -> PendingRows:
        """Starts the copy to the host of everything measured so far."""
        self._measure_copies()
        held: dict[torch.device, list[int]] = {}
        for i, row in enumerate(self._rows):
            if isinstance(row[0], Tensor):
                held.setdefault(row[0].device, []).append(i)
        stacked = [torch.stack([torch.stack([_widen(x) for x in self._rows[i]]) for i in rows]) for rows in held.values()]
        histograms = self._exponents.histograms() if self._owners else None
        order = [i for rows in held.values() for i in rows]
        return PendingRows(tuple(self.counts), self._rows, order, self._owners, self._drawn, PendingRead([histograms, *stacked]))


class PendingRows:
    """Rows on their way to the host."""

    def __init__(
        self,
        counts: tuple[int, ...],
        rows: list[Any],
        held: list[int],
        owners: list[int],
        drawn: list[tuple[list[int], np.ndarray]],
        read: PendingRead,
    ) -> None:
        self._counts, self._rows, self._held, self._owners, self._drawn, self._read = counts, rows, held, owners, drawn, read

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
        if histograms is None and not self._drawn:
            return values, None
        full = np.zeros((len(self._counts), HISTOGRAM_BINS), dtype=np.int64)
        if histograms is not None:
            full[self._owners] = histograms
        for rows, counted in self._drawn:
            full[rows] = counted
        return values, full
