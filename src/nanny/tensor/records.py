"""What `analyze_tensor` tells about one tensor: frozen records of plain numbers, without torch.

Shares are fractions of 1. "Energy" is the sum of squares. `None` means that the number has no meaning for this tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..core.finding import Finding
from ..show.notebook import ShownReport


@dataclass(frozen=True)
class Scan:
    """One cheap look at every element: what the later passes must know before they start. Numbers are over finite elements."""

    count: int
    zero: int
    nan: int
    posinf: int
    neginf: int
    minimum: float
    maximum: float
    absmax: float
    absmin: float | None  # smallest non-zero magnitude

    @property
    def finite(self) -> int:
        return self.count - self.nan - self.posinf - self.neginf

    @property
    def nonzero(self) -> int:
        return self.finite - self.zero

    @property
    def clean(self) -> bool:
        return self.finite == self.count

    @property
    def exponent(self) -> int:
        """Values times 2**-exponent are below 2."""
        return max(math.frexp(self.absmax)[1] - 1, -1000)


@dataclass(frozen=True)
class Values(Scan):
    """The source tensor itself."""

    low_quantile: float | None  # 1 % quantile of the non-zero magnitudes
    mean: float
    rms: float
    sampled: int  # elements behind every quantile in the report


@dataclass(frozen=True)
class RangeFit:
    """How the non-zero finite values fit into one format's range, as they are and under a power-of-two scale."""

    format: str
    count: int  # non-zero finite values
    flushed: float  # become 0
    flushed_energy: float
    subnormal: float  # kept, with fewer significant bits
    subnormal_energy: float
    overflowed: float  # leave the finite range
    overflowed_energy: float
    headroom_bits: float | None  # from the largest magnitude to the format's largest; negative: overflow
    footroom_bits: float | None  # from the 1 % quantile of the magnitudes down to the smallest subnormal
    scale_low: int | None  # every power 2**k, scale_low <= k <= scale_high, keeps maximum and 1 % quantile in range;
    scale_high: int | None  # scale_low > scale_high: no single scale does
    underflow_matters: bool  # False where the format reaches as far down as FP32


@dataclass(frozen=True)
class Integers:
    """An integer-valued tensor in a format that does not hold all of its integers."""

    distinct: int
    distinct_after: int
    changed: float  # share of the elements that become another integer
    sampled: int

    @property
    def collisions(self) -> float:
        return 1 - self.distinct_after / self.distinct


@dataclass(frozen=True)
class Resolution:
    """Rounding error of the cast, over the elements whose cast stays finite."""

    exact: bool  # the cast changes no finite element
    same_dtype: bool
    rel_l2: float
    varying_dim: int | None  # the first dimension with more than one index: the batch
    varying: float | None  # rms of x - mean over that dimension, as a share of the rms
    centred: float | None  # error over the varying part
    spacing_ratio: float | None  # spacing of the format at the rms, over the varying part
    spacing_ratio_median: float | None  # the same per position along the other dimensions (at least 8 values each): median
    positions_lost: float | None  # share of the positions whose spacing is above the variation
    ulp_p50: float
    ulp_p99: float
    error_p50: float  # quantiles of |x-y| / (|x| + rms)
    error_p99: float
    bias: float | None  # mean / std of the error
    sqnr_db: float | None
    sqnr_expected_db: float | None  # of a cast that stays in the normal range
    integers: Integers | None


@dataclass(frozen=True)
class IndexStats:
    index: int
    absmax: float
    absmin: float | None  # smallest non-zero magnitude
    rms: float
    energy: float  # share of the tensor's


@dataclass(frozen=True)
class Dimension:
    """Magnitudes along one dimension, everything else pooled."""

    dim: int
    size: int
    group: int  # indices pooled into one entry (1: every index alone)
    silent: int  # entries that are zero throughout
    rms_ratio: float | None  # largest rms over the median of the non-zero ones
    max_ratio: float | None  # largest absmax over the smallest non-zero one
    top: tuple[IndexStats, ...]
    bottom: tuple[IndexStats, ...]  # smallest non-zero ones; empty if `top` lists all
    heat: tuple[float, ...]  # rms of up to 64 equal stretches


@dataclass(frozen=True)
class Tiles:
    """Magnitudes per tile of the tensor seen as a matrix (leading dimensions merged), and what scaling per tile would bring."""

    rows: int  # of one tile
    columns: int
    count: int
    silent: int
    absmax_ratio: float | None  # largest tile absmax over the median
    loudest: tuple[int, int]  # (tile row, tile column)
    loudest_absmax: float
    quietest_absmax: float | None
    error_per_tensor: float  # relative L2 of the cast with one power-of-two scale for the tensor
    error_per_tile: float  # with one per tile
    flushed_per_tensor: float  # share of the non-zero values lost with one scale
    flushed_per_tile: float
    heat: tuple[tuple[float, ...], ...]  # rms, up to 16 x 64


@dataclass(frozen=True)
class Reduction:
    """One reduction over one dimension, done in the target format and compared with float64 on the same source values."""

    op: str  # sum, mean, norm
    dim: int
    terms: int  # in each result
    results: int
    measured: int  # results behind the errors; overflow is counted over all
    result_rms: float  # in float64
    library_error: float | None  # relative L2; None: torch has no such kernel for this format
    library_overflow: int  # results that are not finite although all their terms are
    condition: float | None  # median of sum|x| / |sum x|
    cancels: float | None  # |sum x| against what random signs would leave; far below 1: the terms cancel
    accumulator_terms: int  # terms that the sequential accumulator was given
    accumulator_results: int
    accumulator_error: float  # relative L2 of `acc += x` in the target format
    accumulator_overflow: int
    swallowed: float  # share of sum|x| whose addition left the accumulator unchanged
    equal_terms: bool  # the sum is a count: all non-zero terms are the same number
    small_half_error: float | None  # median result error over the median joint contribution of the smaller half of the indices
    small_half_ratio: float | None  # largest rms of an index over the rms of a typical one in that half
    advice: str


@dataclass(frozen=True)
class TensorReport(ShownReport):
    """The answer of `analyze_tensor`. Print it for the text report."""

    looks: ClassVar[str] = "nanny.tensor.text:render_tensor"

    name: str
    shape: tuple[int, ...]
    source: str  # torch name of the dtype
    device: str
    target: str  # short name of the format
    values: Values
    ranges: tuple[RangeFit, ...]  # the target first, then the other formats
    resolution: Resolution
    dimensions: tuple[Dimension, ...]
    tiles: Tiles | None
    reductions: tuple[Reduction, ...]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    exponents: Mapping[str, int] = field(default_factory=dict)  # of a sample: values by binary order, `zero`, `nonfinite`
