"""What would have become of each recorded tensor in a narrower format: numbers per site, and a judgement by consequence.

Counts alone kill no run. What does: an output or weight that leaves the range (no loss scale reaches the forward pass), and
energy that flushes to zero. Gradients are judged at the loss scale that they would have had.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.finding import Severity
from ..core.formats import Format
from ..core.limits import Limits
from ..core.step import Site
from .lossscale import ScalePath, limit_bits
from .ranges import NOTHING, exponent_below, flush_exponent, highest_exponent, overflows, shares

FORWARD = ("output", "weight")
BACKWARD = ("output_grad", "grad")
MOST_STEPS = 400
LASTING = 0.75  # quantile over the steps: a loss that holds for a quarter of them is more than an accident


@dataclass(frozen=True)
class Recorded:
    """What a run holds on one kind: `peaks` is the largest magnitude, NaN where a site was not measured or not finite."""

    kind: str
    sites: Sequence[Site]
    steps: np.ndarray
    peaks: np.ndarray  # [steps, sites]
    elements: np.ndarray  # [sites]


@dataclass(frozen=True)
class Fate:
    """One site over all steps on record. Shares are means over the steps, of its non-zero values; energy is the lasting level."""

    kind: str
    site: str
    elements: int
    steps: tuple[int, ...]
    peak: float  # largest finite magnitude, as it was recorded
    peak_step: int
    overflow_steps: int
    first_overflow: int | None
    flushed: float
    subnormal: float
    saturated: float
    flushed_energy: float
    flushed_energy_at_end: float  # median over the last quarter of the steps
    subnormal_energy: float
    headroom_bits: float  # between the peak, scaled, and the format's end
    needs_bits: int | None  # the smallest loss scale; None: any will do
    history: tuple[float, ...]  # per step: the scaled magnitude as a share of the format's range, or the share of energy lost
    severity: Severity | None = None
    why: str = ""


def examine(
    recorded: Recorded,
    histograms: Iterable[tuple[int, np.ndarray]],
    target: Format,
    path: ScalePath | None,
    limits: Limits,
    own_scale: bool = False,
    most_steps: int = MOST_STEPS,
) -> tuple[list[Fate], int]:
    """The fates of all sites of a kind under the loss scales of `path`, or (`own_scale`) each tensor at its own best scale.

    Of a long run every second, fourth, eighth ... histogram is used, so that neither time nor memory grows with it; the second
    result says which. Peaks are those of all steps.
    """
    steps: list[int] = []
    rows: list[np.ndarray] = []
    stride = 1
    for number, (step, counts) in enumerate(histograms):
        if number % stride:
            continue
        if len(rows) >= 2 * most_steps:
            steps, rows, stride = steps[::2], rows[::2], 2 * stride
            if number % stride:
                continue
        steps.append(step)
        rows.append(_padded(_moment(recorded, step, counts, target, path, limits, own_scale), len(recorded.sites)))
    if not rows:
        return [], stride
    table = np.array(rows)  # [steps, columns, sites]
    fates = []
    for i in range(len(recorded.sites)):
        seen = table[:, _COUNT, i] > 0
        if seen.any():
            fate = _fate(recorded, i, np.array(steps)[seen], dict(zip(_COLUMNS, table[seen, :, i].T)), target)
            fates.append(_judged(fate, limits, own_scale))
    return fates, stride


def _moment(
    recorded: Recorded, step: int, counts: np.ndarray, target: Format, path: ScalePath | None, limits: Limits, own_scale: bool
) -> np.ndarray:
    """_COLUMNS of all sites at one step."""
    peaks = _peaks_at(recorded, step, counts)
    if own_scale:
        bits = limit_bits(peaks, target)
        bits = np.where(bits == NOTHING, 0, bits)
    else:
        bits = np.full(len(counts), path.at(step) if path is not None else 0)
    lowest = exponent_below(counts, limits.flush_energy_warn)
    needs = np.where(lowest == NOTHING, -NOTHING, flush_exponent(target) - lowest)
    s = shares(counts, target, bits)
    columns = (s.count, peaks, bits, needs, s.flushed, s.subnormal, s.saturated, s.flushed_energy, s.subnormal_energy)
    return np.array(columns, np.float64)


_COLUMNS = ("count", "peak", "bits", "needs", "flushed", "subnormal", "saturated", "flushed_energy", "subnormal_energy")
_COUNT = 0


def _padded(moment: np.ndarray, sites: int) -> np.ndarray:
    """Sites that were met later than this step have a count of 0 in it."""
    if moment.shape[1] == sites:
        return moment
    return np.pad(moment, ((0, 0), (0, sites - moment.shape[1])))


def _peaks_at(recorded: Recorded, step: int, counts: np.ndarray) -> np.ndarray:
    """Exact magnitudes where they are on record; else (tensors with NaN or infinity) the lower edge of the highest bin."""
    highest = highest_exponent(counts)
    edge = np.where(highest > -NOTHING, np.exp2(np.clip(highest, -1000, 1000).astype(float)), np.nan)
    row = int(np.searchsorted(recorded.steps, step))
    if row == len(recorded.steps) or recorded.steps[row] != step:
        return edge
    exact = recorded.peaks[row, : len(counts)]
    return np.where(np.isfinite(exact), exact, edge)


def _fate(recorded: Recorded, i: int, steps: np.ndarray, column: dict[str, np.ndarray], target: Format) -> Fate:
    lost = column["flushed_energy"]
    sizes = np.ldexp(column["peak"], column["bits"].astype(np.int32))
    backward = recorded.kind in BACKWARD
    needs = int(np.sort(column["needs"])[int((len(steps) - 1) * LASTING)])
    when, peaks = _all_peaks(recorded, i, steps, column["peak"])
    top = int(np.argmax(peaks))
    as_is = not backward and not column["bits"].any()
    over = when[overflows(peaks, target)] if as_is else steps[overflows(sizes, target)]
    return Fate(
        kind=recorded.kind,
        site=recorded.sites[i].name,
        elements=int(recorded.elements[i]),
        steps=tuple(steps.tolist()),
        peak=float(peaks[top]),
        peak_step=int(when[top]),
        overflow_steps=len(over),
        first_overflow=int(over[0]) if len(over) else None,
        flushed=float(column["flushed"].mean()),
        subnormal=float(column["subnormal"].mean()),
        saturated=float(column["saturated"].mean()),
        flushed_energy=quantile(lost, LASTING),
        flushed_energy_at_end=quantile(lost[len(lost) * 3 // 4 :], 0.5),
        subnormal_energy=quantile(column["subnormal_energy"], LASTING),
        headroom_bits=math.log2(target.max / float(peaks[top] if as_is else sizes.max())),
        needs_bits=needs if backward and needs > -NOTHING else None,
        history=tuple((lost if backward else sizes / target.max).tolist()),
    )


def quantile(values: np.ndarray, share: float) -> float:
    """As np.quantile, which takes ten times as long on a few hundred values, and is asked thrice for each tensor and format."""
    ordered = np.sort(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def _all_peaks(recorded: Recorded, i: int, steps: np.ndarray, examined: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps and peaks of a site: those on record, and those that only its histograms tell."""
    known = np.isfinite(recorded.peaks[:, i])
    there = recorded.steps[known]
    if len(there) and np.array_equal(there[np.minimum(np.searchsorted(there, steps), len(there) - 1)], steps):
        return there, recorded.peaks[known, i]
    only_here = ~np.isin(steps, there)
    when = np.concatenate([recorded.steps[known], steps[only_here]])
    peaks = np.concatenate([recorded.peaks[known, i], examined[only_here]])
    order = np.argsort(when, kind="stable")
    return when[order], peaks[order]


def _judged(fate: Fate, limits: Limits, own_scale: bool) -> Fate:
    severity, why = _judgement(fate, limits, own_scale)
    return replace(fate, severity=severity, why=why)


def _judgement(fate: Fate, limits: Limits, own_scale: bool) -> tuple[Severity | None, str]:
    fits_as_is = fate.kind in FORWARD and not own_scale
    if fits_as_is and fate.overflow_steps:
        return Severity.ERROR, "overflows"
    if fate.flushed_energy >= limits.flush_energy_error:
        return Severity.ERROR, "becomes zero" if fate.flushed_energy > 0.99 else "loses energy"
    if fate.flushed_energy >= limits.flush_energy_warn:
        return Severity.WARNING, "loses energy"
    if fits_as_is and fate.headroom_bits < limits.headroom_warn_bits:
        return Severity.WARNING, "close to overflow"
    if fate.subnormal_energy >= limits.subnormal_energy_warn:
        return Severity.WARNING, "loses digits"
    return None, ""
