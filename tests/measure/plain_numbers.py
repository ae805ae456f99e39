"""Numbers of whole tensors and of their histograms, taken slowly and plainly: what tests hold the fast code against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nanny.core.finding import NannyError
from nanny.core.formats import FINITE_BINS, LOWEST_EXPONENT, ZERO_BIN, Format, exponent_of
from nanny.measure.flatten import as_line
from nanny.measure.histogram import SAMPLE, ExponentCounts
from nanny.measure.rows import RowBuffer, count_nonfinite


@dataclass(frozen=True)
class TensorStats:
    """What one pass over a tensor tells. `minimum`, `maximum` and what follows from them are NaN if any element is NaN."""

    count: int
    minimum: float
    maximum: float
    sum_squares: float
    mean: float
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    histogram: tuple[int, ...] = ()  # formats.HISTOGRAM_BINS, of a sample; empty if not taken

    @property
    def nonfinite(self) -> bool:
        return self.count > 0 and not (abs(self.minimum) < float("inf") and abs(self.maximum) < float("inf"))

    @property
    def absmax(self) -> float:
        if self.minimum != self.minimum or self.maximum != self.maximum:
            return float("nan")
        return max(abs(self.minimum), abs(self.maximum))

    @property
    def norm(self) -> float:
        return float(self.sum_squares**0.5)

    @property
    def rms(self) -> float:
        return float((self.sum_squares / self.count) ** 0.5) if self.count else 0.0


def measure_tensors(tensors: Sequence[Tensor], *, histogram: bool = False) -> list[TensorStats]:
    """The numbers of some tensors at once, for callers that may wait; counts of NaN and infinities are exact."""
    rows = RowBuffer()
    for tensor in tensors:
        rows.add(tensor, histogram=histogram)
    values, histograms = rows.start_read().table()
    out = []
    for i, (count, low, high, squares, total) in enumerate(values.T.tolist()):
        nan, posinf, neginf = (0, 0, 0) if math.isfinite(low) and math.isfinite(high) else count_nonfinite(tensors[i])
        out.append(
            TensorStats(
                count=rows.counts[i],
                minimum=low,
                maximum=high,
                sum_squares=squares,
                mean=total / count if count else 0.0,
                nan=nan,
                posinf=posinf,
                neginf=neginf,
                histogram=tuple(histograms[i].tolist()) if histogram and histograms is not None else (),
            )
        )
    return out


def exponent_histograms(tensors: Sequence[Tensor], sample: int = SAMPLE) -> Tensor:
    """One histogram per tensor, `[len(tensors), HISTOGRAM_BINS]` int64 on their device."""
    counts = ExponentCounts(sample)
    for tensor in tensors:
        counts.add(as_line(tensor))
    return counts.histograms()


@dataclass(frozen=True)
class RangeShares:
    """What a format does to the finite values behind a histogram. Shares are of the non-zero finite values, `zero` of all."""

    count: int  # non-zero finite values seen
    zero: float
    flushed: float
    subnormal: float
    saturated: float  # leaves the finite range
    headroom_bits: float  # binary orders between the largest magnitude's bin and the format's top; negative: overflow
    footroom_bits: float  # binary orders between the smallest magnitude's bin and the smallest subnormal


def range_shares(histogram: Sequence[int], target: Format, scale: float = 1.0) -> RangeShares:
    """Shares that would flush, go subnormal or overflow if the values times `scale` (a power of two) were cast to `target`.

    True to the width of a bin: a value in the rounding margin below `2**(max_exponent+1)` (65504 < x < 65536 in fp16) counts as
    finite, an exact `flush_at` as rounded up, and in bf16, whose subnormals are fp32's, all of those count as subnormal.
    """
    shift = math.frexp(scale)[1] - 1
    if not 0 < scale < math.inf or 2.0**shift != scale:
        nearest = 2.0**shift if 0 < scale < math.inf else 1.0
        raise NannyError(f"scale {scale!r} is not a power of two, and histograms answer only for those; try {nearest!r}")
    flush_exponent = target.min_exponent - target.significand  # of flush_at, which fp64 itself cannot hold for fp64
    flush_below = max(flush_exponent - shift, LOWEST_EXPONENT - 1)  # bins under this one flush whole
    normal_from = target.min_exponent - shift
    overflow_from = target.max_exponent + 1 - shift
    present = [(exponent_of(i), int(histogram[i])) for i in FINITE_BINS if histogram[i]]
    finite = sum(n for _, n in present)
    flushed = sum(n for e, n in present if e < flush_below)
    subnormal = sum(n for e, n in present if flush_below <= e < normal_from)
    saturated = sum(n for e, n in present if e >= overflow_from)
    zeros = int(histogram[ZERO_BIN])
    return RangeShares(
        count=finite,
        zero=zeros / (zeros + finite) if zeros + finite else 0.0,
        flushed=flushed / finite if finite else 0.0,
        subnormal=subnormal / finite if finite else 0.0,
        saturated=saturated / finite if finite else 0.0,
        headroom_bits=target.max_exponent - (present[-1][0] + shift) if present else math.inf,
        footroom_bits=present[0][0] + shift - (flush_exponent + 1) if present else math.inf,
    )
