"""Range and resolution of a tensor in a target format: what a cast would do to it, counted and weighed by energy.

Sums of squares are taken in float64 of values divided by a power of two near the largest one, so that no source overflows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.formats import FORMATS, TARGETS, Format
from ..core.limits import Limits
from .blocks import as_float, blocks, sample_elements
from .records import Integers, RangeFit, Resolution, Scan, Values

SAMPLE = 1 << 17  # elements behind quantiles
DISTINCT_SAMPLE = 1 << 20  # elements behind the count of distinct integers, where their range is too wide for a bitmap
BITMAP = 1 << 24
FEW_ROWS = 8  # fewer give no variation per position worth the name
LIMITS = Limits()  # where a number begins to mean something


def scan(x: Tensor) -> Scan:
    zero = nan = posinf = neginf = 0
    minimum, maximum, absmin = math.inf, -math.inf, math.inf
    for _, block in blocks(x):
        v = as_float(block)
        low, high = (float(t) for t in torch.aminmax(v))
        if not (math.isfinite(low) and math.isfinite(high)):
            nan += int(v.isnan().sum())
            posinf += int((v == math.inf).sum())
            neginf += int((v == -math.inf).sum())
            v = v[v.isfinite()]
            if not v.numel():
                continue
            low, high = (float(t) for t in torch.aminmax(v))
        minimum, maximum = min(minimum, low), max(maximum, high)
        is_zero = v == 0
        zero += int(is_zero.sum())
        absmin = min(absmin, float(v.abs().masked_fill_(is_zero, math.inf).min()))
    absmax = max(abs(minimum), abs(maximum))
    return Scan(x.numel(), zero, nan, posinf, neginf, minimum, maximum, absmax, absmin if math.isfinite(absmin) else None)


def scale_block(block: Tensor, seen: Scan) -> Tensor:
    """The block as float64 below 2 in magnitude, with 0 in place of what is not finite."""
    v = as_float(block).to(torch.float64) * math.ldexp(1.0, -seen.exponent)
    return v if seen.clean else v.masked_fill_(~v.isfinite(), 0.0)


@dataclass(frozen=True)
class Positions:
    """Mean over dim 0 at every position along the other dimensions (scaled), and how many finite values are behind it."""

    means: Tensor
    counts: Tensor | int


def mean_over_first(x: Tensor, seen: Scan) -> Positions | None:
    """None for a single value."""
    if x.numel() < 2:
        return None
    sums = torch.zeros(x.shape[1:], dtype=torch.float64)
    for spans, block in blocks(x):
        sums[spans[1:]] += scale_block(block, seen).sum(0)
    if seen.clean:
        return Positions(sums.div_(x.shape[0]), x.shape[0])
    counts = torch.zeros(x.shape[1:], dtype=torch.float64)
    for spans, block in blocks(x):
        counts[spans[1:]] += as_float(block).isfinite().sum(0)
    return Positions(sums.div_(counts.clamp(min=1)), counts)


@dataclass
class Sums:
    """Totals of the second pass, in scaled units. `kept` are the elements whose cast is finite."""

    total: float = 0.0
    energy: float = 0.0
    kept: int = 0
    kept_energy: float = 0.0
    error: float = 0.0
    error_energy: float = 0.0
    changed: int = 0
    varying_energy: float = 0.0
    kept_varying_energy: float = 0.0


class Buckets:
    """Counts and energy between the thresholds of all target formats, in one pass.

    Thresholds are compared in float32, as torch's casts do: a float64 value is rounded to float32 on its way to 16 or 8 bits.
    """

    def __init__(self) -> None:
        edges = sorted({edge for name in TARGETS for edge in _edges(FORMATS[name])})
        self.edges = torch.tensor(edges, dtype=torch.float32)
        self.counts = torch.zeros(len(edges) + 1, dtype=torch.int64)
        self.energy = torch.zeros(len(edges) + 1, dtype=torch.float64)

    def add(self, magnitudes: Tensor, energy: Tensor) -> None:
        places = torch.bucketize(magnitudes.reshape(-1), self.edges, right=True, out_int32=True)
        size = len(self.counts)
        self.counts += torch.bincount(places, minlength=size)
        self.energy += torch.bincount(places, weights=energy.reshape(-1), minlength=size)

    def below(self, edge: float) -> tuple[int, float]:
        stop = int(torch.searchsorted(self.edges, torch.tensor(edge, dtype=torch.float32))) + 1
        return int(self.counts[:stop].sum()), float(self.energy[:stop].sum())


def _edges(target: Format) -> tuple[float, float, float]:
    """Magnitudes below the first become 0, from there to the second subnormal, from the third on they leave the finite range."""
    top = target.overflow_at if target.has_inf else _next_float32(target.overflow_at)
    return _next_float32(target.flush_at), target.min_normal, top


def _next_float32(value: float) -> float:
    return float(torch.nextafter(torch.tensor(value, dtype=torch.float32), torch.tensor(math.inf)))


def range_fit(target: Format, buckets: Buckets, seen: Scan, total: float, low_quantile: float | None) -> RangeFit:
    flush, normal, top = _edges(target)
    n_flush, e_flush = buckets.below(flush)
    n_normal, e_normal = buckets.below(normal)
    n_top, e_top = buckets.below(top)
    zeros = seen.count - seen.nonzero
    n = max(seen.nonzero, 1)
    energy = total or 1.0
    bounds = scale_window(target, seen.absmax, low_quantile) if low_quantile else (None, None)
    return RangeFit(
        format=target.name,
        count=seen.nonzero,
        flushed=(n_flush - zeros) / n,
        flushed_energy=e_flush / energy,
        subnormal=(n_normal - n_flush) / n,
        subnormal_energy=(e_normal - e_flush) / energy,
        overflowed=(seen.count - n_top) / n,
        overflowed_energy=max(0.0, float(buckets.energy.sum()) - e_top) / energy,
        headroom_bits=math.log2(target.max) - math.log2(seen.absmax) if seen.nonzero else None,
        footroom_bits=math.log2(low_quantile) - math.log2(target.min_subnormal) if low_quantile else None,
        scale_low=bounds[0],
        scale_high=bounds[1],
        underflow_matters=target.min_exponent > FORMATS["fp32"].min_exponent,
    )


def scale_window(target: Format, absmax: float, low: float) -> tuple[int, int]:
    """Exponents k from the smallest that lifts `low` to the smallest subnormal to the largest that keeps `absmax` finite."""
    mantissa, exponent = math.frexp(absmax)
    top_mantissa, top_exponent = math.frexp(target.max)
    highest = top_exponent - exponent - (mantissa > top_mantissa)
    mantissa, exponent = math.frexp(low)
    floor_mantissa, floor_exponent = math.frexp(target.min_subnormal)
    lowest = floor_exponent - exponent + (mantissa < floor_mantissa)
    return lowest, highest


def measure_cast(x: Tensor, target: Format, seen: Scan) -> tuple[Values, tuple[RangeFit, ...], Resolution]:
    """Everything about range and resolution, in two further passes over the tensor."""
    batch = next((dim for dim, size in enumerate(x.shape) if size > 1), None)
    x = x.reshape(x.shape[batch:])  # a view: leading dimensions of size 1
    dtype: torch.dtype = getattr(torch, target.torch_name)
    positions = mean_over_first(x, seen)
    few = positions is None or x.shape[0] < FEW_ROWS or x.dim() < 2
    deviations = None if few or positions is None else torch.zeros_like(positions.means)
    sums, buckets = Sums(), Buckets()
    for spans, block in blocks(x):
        _add_block(sums, buckets, block, dtype, seen, positions, spans, deviations)
    drawn = sample_elements(x, SAMPLE)
    drawn = as_float(drawn[as_float(drawn).isfinite()])
    magnitudes = drawn[drawn != 0].abs().to(torch.float64)
    low = float(torch.quantile(magnitudes, 0.01)) if magnitudes.numel() else seen.absmin
    unit = math.ldexp(1.0, seen.exponent)
    values = Values(
        **vars(seen),
        low_quantile=low,
        mean=sums.total / seen.finite * unit,
        rms=math.sqrt(sums.energy / seen.finite) * unit,
        sampled=min(seen.count, SAMPLE),
    )
    order = [target, *(FORMATS[name] for name in TARGETS if name != target.name)]
    ranges = tuple(range_fit(t, buckets, seen, sums.energy, low) for t in order)
    resolution = _resolution(x, drawn, target, seen, sums, values, positions, deviations)
    return values, ranges, replace(resolution, varying_dim=batch)


def _add_block(
    sums: Sums, buckets: Buckets, block: Tensor, dtype: torch.dtype, seen: Scan, positions: Positions | None,
    spans: tuple[slice, ...], deviations: Tensor | None,
) -> None:  # fmt: skip
    v = scale_block(block, seen)
    energy = v * v
    magnitudes = as_float(block).abs().to(torch.float32)
    if not seen.clean:
        magnitudes.masked_fill_(~as_float(block).isfinite(), 0.0)
    buckets.add(magnitudes, energy)
    cast = as_float(block.to(dtype)).to(torch.float64)
    error = v - cast.mul_(math.ldexp(1.0, -seen.exponent))
    kept = None
    if not (seen.clean and math.isfinite(float(error.sum()))):  # a sum is the cheapest test for a single infinity
        kept = error.isfinite() & as_float(block).isfinite()
        error.masked_fill_(~kept, 0.0)
    total_energy = float(energy.sum())
    sums.total += float(v.sum())
    sums.energy += total_energy
    sums.kept += block.numel() if kept is None else int(kept.sum())
    sums.kept_energy += total_energy if kept is None else float((energy * kept).sum())
    sums.changed += int(torch.count_nonzero(error))
    sums.error += float(error.sum())
    sums.error_energy += float(error.square_().sum())
    if positions is None:
        return
    varying = v.sub_(positions.means[spans[1:]])
    if not seen.clean:
        varying.masked_fill_(~as_float(block).isfinite(), 0.0)
    squares = varying.square_()
    per_position = squares.sum(0)
    sums.varying_energy += float(per_position.sum())
    sums.kept_varying_energy += float(per_position.sum() if kept is None else (squares * kept).sum())
    if deviations is not None:
        deviations[spans[1:]] += per_position


def _resolution(
    x: Tensor, drawn: Tensor, target: Format, seen: Scan, sums: Sums, values: Values, positions: Positions | None,
    deviations: Tensor | None,
) -> Resolution:  # fmt: skip
    dtype: torch.dtype = getattr(torch, target.torch_name)
    rel_l2 = _ratio(sums.error_energy, sums.kept_energy)
    varying = math.sqrt(sums.varying_energy / sums.energy) if positions is not None and sums.energy else None
    noise = LIMITS.source_noise_roundoffs * torch.finfo(x.dtype).eps / 2
    moves = varying or 0.0
    if x.dtype != dtype and moves <= noise:
        moves = 0.0
    spacing = target.spacing(values.rms)
    ratios = _position_ratios(positions, deviations, target, seen, noise)
    ulp_errors, errors = _element_errors(drawn, target, values.rms)
    sqnr = -20 * math.log10(rel_l2) if rel_l2 > 0 and target.min_exponent > FORMATS["fp32"].min_exponent else None
    return Resolution(
        exact=sums.changed == 0 and sums.kept == seen.finite,
        same_dtype=x.dtype == dtype,
        rel_l2=rel_l2,
        varying_dim=None,
        varying=varying,
        centred=_ratio(sums.error_energy, sums.kept_varying_energy) if moves > LIMITS.centred_floor else None,
        spacing_ratio=spacing / (moves * values.rms) if moves else None,
        spacing_ratio_median=None if ratios is None else float(ratios.median()),
        positions_lost=None if ratios is None else float((ratios > 1).double().mean()),
        ulp_p50=ulp_errors[0],
        ulp_p99=ulp_errors[1],
        error_p50=errors[0],
        error_p99=errors[1],
        bias=_bias(sums),
        sqnr_db=sqnr,
        sqnr_expected_db=None if sqnr is None else 20 * math.log10(2.0**target.significand) + 7.4,
        integers=count_integers(x, target, seen, sums.changed),
    )


def _position_ratios(
    positions: Positions | None, deviations: Tensor | None, target: Format, seen: Scan, noise: float
) -> Tensor | None:
    """Spacing at the rms over the deviation, for every position that is not zero throughout.

    0 where nothing varies, and where the position lies below the normal range: that is a matter of range, not of an offset.
    """
    if positions is None or deviations is None:
        return None
    variance = deviations / positions.counts
    rms = (variance + positions.means.square()).sqrt_().reshape(-1)
    deviation = variance.sqrt_().reshape(-1)
    alive = rms > 0
    rms, deviation = rms[alive], deviation[alive]
    if not rms.numel():
        return None
    unit = math.ldexp(1.0, seen.exponent)
    ratios = spacing_of(rms * unit, target) / unit / deviation
    return ratios.masked_fill_((deviation <= noise * rms) | (rms * unit < target.min_normal), 0.0)


def spacing_of(values: Tensor, target: Format) -> Tensor:
    """One ulp of the target at each value (float64)."""
    exponents = (torch.frexp(values).exponent - 1).clamp_(target.min_exponent, target.max_exponent)
    return torch.ldexp(torch.ones_like(values), exponents - target.significand + 1)


def _element_errors(drawn: Tensor, target: Format, rms: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Median and 99 % quantile of the error in ulps, and relative to |x| + rms: sampled non-zero elements with finite cast."""
    dtype: torch.dtype = getattr(torch, target.torch_name)
    cast = as_float(drawn.to(dtype)).to(torch.float64)
    keep = cast.isfinite() & (drawn != 0)
    v = drawn[keep].to(torch.float64)
    error = (v - cast[keep]).abs()
    return _quantiles(error / spacing_of(v, target)), _quantiles(error / (v.abs() + rms))


def _quantiles(values: Tensor) -> tuple[float, float]:
    if not values.numel():
        return 0.0, 0.0
    middle, high = torch.quantile(values, torch.tensor([0.5, 0.99], dtype=values.dtype)).tolist()
    return middle, high


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return math.sqrt(part / whole)


def _bias(sums: Sums) -> float | None:
    """None where there is no error, or all errors are equal."""
    if not sums.kept or not sums.error_energy:
        return None
    mean, square = sums.error / sums.kept, sums.error_energy / sums.kept
    variance = square - mean * mean
    return mean / math.sqrt(variance) if variance > 1e-9 * square else None


def count_integers(x: Tensor, target: Format, seen: Scan, changed: int) -> Integers | None:
    """How many distinct integers survive; None if the values are not integers, or all of them are exact in the target.

    Large floats are integers by necessity (from 2**23 in fp32), so at least half of the values must be below that.
    """
    if not seen.nonzero or seen.absmax <= target.exact_integers or seen.absmax >= 2.0**53:
        return None
    always = 1 / torch.finfo(x.dtype).eps
    telling = 0
    for _, block in blocks(x):
        v = as_float(block)
        v = v if seen.clean else v[v.isfinite()]
        if bool((v != v.round()).any()):
            return None
        telling += int(((v != 0) & (v.abs() < always)).sum())
    if 2 * telling < seen.nonzero:
        return None
    distinct, sampled = _distinct(x, seen)
    dtype: torch.dtype = getattr(torch, target.torch_name)
    after = torch.unique(as_float(distinct.to(dtype)))
    return Integers(distinct.numel(), after.numel(), changed / seen.finite, sampled)


def _distinct(x: Tensor, seen: Scan) -> tuple[Tensor, int]:
    """The distinct values (float64) and how many elements were looked at."""
    span = int(seen.maximum - seen.minimum) + 1
    if x.numel() <= DISTINCT_SAMPLE or span > BITMAP:
        drawn = as_float(sample_elements(x, DISTINCT_SAMPLE))
        return torch.unique(drawn[drawn.isfinite()].to(torch.float64)), min(x.numel(), DISTINCT_SAMPLE)
    present = torch.zeros(span, dtype=torch.bool)
    for _, block in blocks(x):
        v = as_float(block)
        v = v if seen.clean else v[v.isfinite()]
        present[(v.to(torch.float64) - seen.minimum).reshape(-1).long()] = True
    return present.nonzero().squeeze(1).to(torch.float64) + seen.minimum, x.numel()
