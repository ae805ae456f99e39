"""Exponent histograms: how many values lie in each binary order of magnitude (layout in `formats`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats import (
    ABOVE_BIN,
    BELOW_BIN,
    FIRST_BIN,
    HIGHEST_EXPONENT,
    HISTOGRAM_BINS,
    LOWEST_EXPONENT,
    NONFINITE_BIN,
    ZERO_BIN,
)
from .flatten import as_line, thin

SAMPLE = 16384
_BATCH = 1 << 16  # elements per pass: stays in cache, and shares the launches among small tensors


def exponent_histograms(tensors: Sequence[Tensor], sample: int = SAMPLE) -> Tensor:
    """One histogram per tensor, `[len(tensors), HISTOGRAM_BINS]` int64 on their device, each of at most `sample` values."""
    if not tensors:
        return torch.zeros(0, HISTOGRAM_BINS, dtype=torch.int64)
    out: list[Tensor] = []
    batch: list[Tensor] = []
    size = 0
    for line in (thin(as_line(t), sample) for t in tensors):  # few samples alive at a time: their memory is used again
        if batch and (size + line.numel() > _BATCH or line.dtype != batch[0].dtype):
            out.append(_count(batch))
            batch, size = [], 0
        batch.append(line)
        size += line.numel()
    out.append(_count(batch))
    return torch.cat(out) if len(out) > 1 else out[0]


def _count(lines: list[Tensor]) -> Tensor:
    if lines[0].dtype == torch.float64:
        return torch.stack([_tally(_bins64(line), HISTOGRAM_BINS) for line in lines])
    values = torch.cat([line.float() for line in lines]) if len(lines) > 1 else lines[0].to(torch.float32, copy=True)
    lengths = [line.numel() for line in lines]
    zeros = torch.stack([part.numel() - part.count_nonzero() for part in values.split(lengths)])
    # the biased exponent; in place, because fresh memory costs more than the arithmetic
    biased = values.view(torch.int32).bitwise_and_(0x7FFFFFFF).bitwise_right_shift_(23)
    counts = torch.stack([_tally(part, 256) for part in biased.split(lengths)])
    out = counts.new_zeros(len(lines), HISTOGRAM_BINS)
    out[:, BELOW_BIN : NONFINITE_BIN + 1] = counts
    out[:, ZERO_BIN] = zeros
    out[:, BELOW_BIN] -= zeros
    return out


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
