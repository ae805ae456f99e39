"""Exponent histograms: how many values lie in each binary order of magnitude (layout in `formats`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.formats import (
    ABOVE_BIN,
    BELOW_BIN,
    FIRST_BIN,
    HIGHEST_EXPONENT,
    HISTOGRAM_BINS,
    LOWEST_EXPONENT,
    NONFINITE_BIN,
    ZERO_BIN,
    exponent_of,
)
from .flatten import as_line, thin

SAMPLE = 16384
_BATCH = 1 << 16  # elements per pass: stays in cache, and shares the launches among small tensors
_LINES = 1 << 10


class ExponentCounts:
    """Histograms of tensors as they come, each of at most `sample` values.

    A sample is taken at once, and counted before the next few are: little memory is held, and the same is used again.
    """

    def __init__(self, sample: int = SAMPLE) -> None:
        self._sample = sample
        self._batch: list[Tensor] = []
        self._size = 0
        self._counted: list[Tensor] = []

    def add(self, line: Tensor, *, is_copy: bool = False) -> None:
        """`line` is one-dimensional (`as_line`), and may be overwritten afterwards, unless it is a copy."""
        part = thin(line, self._sample)
        full = self._size + part.numel() > _BATCH or len(self._batch) >= _LINES
        if self._batch and (full or part.dtype != self._batch[0].dtype):
            self._count()
        self._batch.append(part.clone() if part is line and not is_copy else part)
        self._size += part.numel()

    def _count(self) -> None:
        self._counted.append(_count(self._batch))
        self._batch, self._size = [], 0

    def histograms(self) -> Tensor:
        """`[tensors added, HISTOGRAM_BINS]` int64 on their device."""
        if self._batch:
            self._count()
        return torch.cat(self._counted) if self._counted else torch.zeros(0, HISTOGRAM_BINS, dtype=torch.int64, device="cpu")


def exponents_of(tensor: Tensor) -> dict[str, int]:
    """Of one tensor, as plain data: binary order, `zero` or `nonfinite` -> how many values of a sample."""
    counts = ExponentCounts()
    counts.add(as_line(tensor), is_copy=True)
    names = {ZERO_BIN: "zero", NONFINITE_BIN: "nonfinite"}
    found = enumerate(counts.histograms()[0].tolist())
    return {names.get(index) or str(exponent_of(index)): count for index, count in found if count}


def _count(lines: list[Tensor]) -> Tensor:
    if lines[0].dtype == torch.float64:
        return torch.stack([_tally(_bins64(line), HISTOGRAM_BINS) for line in lines])
    values = torch.cat([line.float() for line in lines]) if len(lines) > 1 else lines[0].to(torch.float32, copy=True)
    return count_parts(values, [line.numel() for line in lines])


def count_parts(values: Tensor, lengths: list[int]) -> Tensor:
    """A histogram of each part of a line of fp32, which is used up."""
    # zero is bin 0, and any other value one above its biased exponent; in place, because fresh memory costs more than arithmetic
    present = values != 0
    bins = values.view(torch.int32).bitwise_and_(0x7FFFFFFF).bitwise_right_shift_(23).add_(present)
    if bins.device.type == "cpu" and len(lengths) > 1:  # all in one count, each line in bins of its own
        first = torch.arange(0, len(lengths) * HISTOGRAM_BINS, HISTOGRAM_BINS, dtype=torch.int32, device="cpu")
        bins += torch.repeat_interleave(first, torch.tensor(lengths, device="cpu"))
        return _tally(bins, len(lengths) * HISTOGRAM_BINS).view(len(lengths), HISTOGRAM_BINS)
    return torch.stack([_tally(part, HISTOGRAM_BINS) for part in torch.split(bins, lengths)])


def _bins64(values: Tensor) -> Tensor:
    exponent = torch.frexp(values).exponent - 1
    bins = (exponent - LOWEST_EXPONENT + FIRST_BIN).clamp_(BELOW_BIN, NONFINITE_BIN)
    bins = torch.where(exponent > HIGHEST_EXPONENT, ABOVE_BIN, bins)
    bins = torch.where(values == 0, ZERO_BIN, bins)
    return torch.where(values.isfinite(), bins, NONFINITE_BIN)


def _tally(bins: Tensor, length: int) -> Tensor:
    if bins.device.type == "cpu":
        return torch.bincount(bins, minlength=length)
    counts = torch.zeros(length, dtype=torch.int64, device=bins.device)  # bincount would wait for the device
    return counts.scatter_add_(0, bins.long(), torch.ones_like(bins, dtype=torch.int64))
