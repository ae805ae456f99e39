"""Exponent histograms of a run: how a layer's binary orders of magnitude move over time towards the ends of a format, and what a
narrower format would do to the tensors behind them (`shares`).

Shares are by number and by energy: a value of exponent e weighs 4**e, because a tensor is what its large values are, and small
ones may flush by the million without anybody noticing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..core.formats import (
    ABOVE_BIN,
    BELOW_BIN,
    FINITE_BINS,
    FIRST_BIN,
    FP16,
    LAST_BIN,
    LOWEST_EXPONENT,
    NONFINITE_BIN,
    ZERO_BIN,
    Format,
    exponent_of,
)
from ..core.terminal import progress
from ..store import reader
from .matrices import Columns, Matrix, bad_steps, groups_of, order_keys
from .source import Source

KINDS = ("output", "output_grad", "grad", "weight")
BACKWARD = ("output_grad", "grad")
MOST_COLUMNS = 60
FEWEST_COLUMNS = 8
ROWS = 40_000  # histograms in a page: sites x columns of all kinds together
READ = 150_000  # histograms of one kind that are looked at; of a longer run every second, third ... step
FINITE = np.array(FINITE_BINS)
EXPONENTS = np.array([exponent_of(i) for i in FINITE_BINS])
ENERGY = 4.0**EXPONENTS
NOTHING = np.int64(10**6)  # an exponent no value has: "no values, so no requirement"


@dataclass(frozen=True)
class ExponentHistograms:
    """Of all sites of a kind, or of one."""

    columns: Columns
    lowest: int  # binary order of the second row; the first holds zeros
    highest: int  # of the last but one; the last holds NaN and infinities
    counts: np.ndarray  # uint32 [sites, columns, rows]
    flushed: dict[str, Matrix]  # what FP16 would flush to zero: the share of the values, and of their energy


def histograms_of(source: Source) -> dict[str, ExponentHistograms]:
    """By kind."""
    there = [kind for kind in KINDS if kind in reader.kinds(source.db, source.run.id)]
    sites = {kind: len(source.sites(kind)) for kind in there}
    most = min(MOST_COLUMNS, max(FEWEST_COLUMNS, ROWS // max(sum(sites.values()), 1)))
    return {kind: found for kind in there if (found := _kind_histograms(source, kind, sites[kind], most, None)) is not None}


def layer_histogram(source: Source, kind: str, name: str) -> ExponentHistograms | None:
    """The same for one site alone, with more columns: what the live page asks for."""
    names = [site.name for site in source.sites(kind)]
    if name not in names:
        return None
    return _kind_histograms(source, kind, len(names), 2 * MOST_COLUMNS, names.index(name))


def _kind_histograms(source: Source, kind: str, sites: int, most: int, only: int | None) -> ExponentHistograms | None:
    steps = _steps_read(source, kind, sites)
    if not len(steps) or not sites:
        return None
    bounds = groups_of(len(steps), most)
    rows = 1 if only is not None else sites
    totals = np.zeros((rows, len(bounds) - 1, NONFINITE_BIN + 2), np.uint32)
    flushed = np.full((2, rows, len(bounds) - 1), -1.0, np.float32)
    scales = source.evidence.scalars.get("scale") if kind in BACKWARD else None
    for group, step, counts in _read(source, kind, steps, bounds):
        progress(f"{kind}: {group + 1}/{len(bounds) - 1}")
        counts = counts if only is None else counts[only : only + 1]
        totals[: len(counts), group] += counts
        lost = shares(counts, FP16, _scale_bits(scales, step))
        for row, values in enumerate((lost.flushed, lost.flushed_energy)):
            keys = order_keys(values, lost.count + counts[:, ZERO_BIN] > 0)
            flushed[row, : len(counts), group] = np.maximum(flushed[row, : len(counts), group], keys)
    low, high = _filled_orders(totals)
    columns = Columns(steps, bounds, bad_steps(source))
    lost_shares = {name: Matrix(columns, keys) for name, keys in zip(("flushed", "flushed_energy"), flushed)}
    return ExponentHistograms(columns, low, high, _rows_shown(totals, low, high), lost_shares)


def _steps_read(source: Source, kind: str, sites: int) -> np.ndarray:
    """All steps with histograms; of a very long run a bounded number, and always those with findings."""
    steps = reader.histogram_steps(source.db, source.run.id, kind)
    stride = -(-len(steps) * max(sites, 1) // READ) if len(steps) else 1
    if stride <= 1:
        return steps
    marked = {finding.step for finding in reader.findings(source.db, source.run.id)}
    found: np.ndarray = steps[
        (np.arange(len(steps)) % stride == 0) | np.isin(steps, [step for step in marked if step is not None])
    ]
    return found


def _read(source: Source, kind: str, steps: np.ndarray, bounds: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    for group, (start, end) in enumerate(pairwise(bounds.tolist())):
        for step in steps[start:end].tolist():
            for _, counts in reader.histograms(source.db, source.run.id, kind, step, step):
                yield group, step, counts


def _scale_bits(scales: tuple[np.ndarray, np.ndarray] | None, step: int) -> int:
    """The loss scale in force, in bits: gradients are recorded without it, but it is with it that they are cast."""
    if scales is None:
        return 0
    value = float(scales[1][max(int(np.searchsorted(scales[0], step, side="right")) - 1, 0)])
    return int(np.floor(np.log2(value))) if 0 < value < np.inf else 0


def _filled_orders(totals: np.ndarray) -> tuple[int, int]:
    """Lowest and highest binary order with any value; a span of FP16's if there is none."""
    bins = np.flatnonzero(totals.sum((0, 1))[FIRST_BIN : LAST_BIN + 1])
    if not len(bins):
        return -24, 15
    return int(bins[0]) + LOWEST_EXPONENT, int(bins[-1]) + LOWEST_EXPONENT


def _rows_shown(totals: np.ndarray, low: int, high: int) -> np.ndarray:
    """Zeros, the orders from `low` to `high`, NaN and infinities; what lies outside fp32 goes to the nearest row."""
    span = totals[:, :, FIRST_BIN + low - LOWEST_EXPONENT : FIRST_BIN + high - LOWEST_EXPONENT + 1].copy()
    span[:, :, 0] += totals[:, :, BELOW_BIN]
    span[:, :, -1] += totals[:, :, ABOVE_BIN]
    return np.concatenate([totals[:, :, ZERO_BIN, None], span, totals[:, :, NONFINITE_BIN, None]], axis=2)


def flush_exponent(target: Format) -> int:
    """Values below this binary exponent become zero."""
    return math.frexp(target.flush_at)[1] - 1


def overflows(sizes: np.ndarray, target: Format) -> np.ndarray:
    """Which magnitudes leave the format, exactly; a tie rounds to infinity where there is one, and down where there is none."""
    return sizes >= target.overflow_at if target.has_inf else sizes > target.overflow_at


@dataclass(frozen=True)
class Shares:
    """Per site, of the non-zero finite values: shares by number, and by energy where the name says so."""

    count: np.ndarray
    zero: np.ndarray
    flushed: np.ndarray
    subnormal: np.ndarray
    saturated: np.ndarray
    flushed_energy: np.ndarray
    subnormal_energy: np.ndarray


def shares(histograms: np.ndarray, target: Format, scale_bits: int | np.ndarray = 0) -> Shares:
    """What casting the values times 2**scale_bits (one number, or one per site) to `target` would do."""
    filled = _filled_bins(histograms)
    counts = histograms[:, FINITE[filled]].astype(np.float64)
    exponents = EXPONENTS[filled] + np.atleast_1d(scale_bits)[:, None]  # one row for all sites, or one for each
    flushed = exponents < flush_exponent(target)
    subnormal = (exponents < target.min_exponent) & ~flushed
    saturated = exponents > target.max_exponent
    energy = counts * ENERGY[filled]
    finite, total = (_sum_where(weights, np.ones_like(flushed)) for weights in (counts, energy))
    zeros = histograms[:, ZERO_BIN].astype(np.float64)
    return Shares(
        count=finite,
        zero=_ratio(zeros, zeros + finite),
        flushed=_ratio(_sum_where(counts, flushed), finite),
        subnormal=_ratio(_sum_where(counts, subnormal), finite),
        saturated=_ratio(_sum_where(counts, saturated), finite),
        flushed_energy=_ratio(_sum_where(energy, flushed), total),
        subnormal_energy=_ratio(_sum_where(energy, subnormal), total),
    )


def _sum_where(weights: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    found: np.ndarray = weights @ chosen[0].astype(np.float64) if len(chosen) == 1 else (weights * chosen).sum(1)
    return found


def exponent_below(histograms: np.ndarray, energy_share: float) -> np.ndarray:
    """Per site, the lowest exponent that must survive: all below it together hold less than `energy_share` of the energy."""
    filled = _filled_bins(histograms)
    energy = histograms[:, FINITE[filled]] * ENERGY[filled]
    total = energy.sum(1)
    reached = np.cumsum(energy, axis=1) >= energy_share * total[:, None]
    found: np.ndarray = np.where(total > 0, EXPONENTS[filled][np.argmax(reached, axis=1)], NOTHING)
    return found


def highest_exponent(histograms: np.ndarray) -> np.ndarray:
    """Per site, the exponent of its largest finite value; -NOTHING where there is none."""
    filled = histograms[:, FINITE] > 0
    last = filled.shape[1] - 1 - np.argmax(filled[:, ::-1], axis=1)
    found: np.ndarray = np.where(filled.any(1), EXPONENTS[last], -NOTHING)
    return found


def _filled_bins(histograms: np.ndarray) -> np.ndarray:
    """The finite bins from the lowest to the highest that any site fills: a sixth of all, as a rule."""
    used = np.flatnonzero(histograms[:, FINITE].any(0))
    return np.arange(used[0], used[-1] + 1) if len(used) else np.arange(1)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
    return found
