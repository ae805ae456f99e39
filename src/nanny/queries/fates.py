"""What would have become of each recorded tensor in a narrower format: numbers per site, and a judgement by consequence.

Counts alone kill no run. What does: an output or weight that leaves the range (no loss scale reaches the forward pass), and
energy that flushes to zero. Gradients are judged at the loss scale that they would have had.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..formats import Format
from ..limits import Limits
from ..records import Severity, Site
from .lossscale import ScalePath, limit_bits
from .ranges import NOTHING, exponent_below, flush_exponent, highest_exponent, shares

FORWARD = ("output", "weight")
BACKWARD = ("output_grad", "grad")
LASTING = 0.75  # quantile over the steps: a loss that holds for a quarter of them is more than an accident


@dataclass(frozen=True)
class Fate:
    """One site over all steps on record. Shares are of its non-zero values, means over the steps; energy is the lasting level."""

    kind: str
    site: str
    elements: int
    steps: int
    peak: float  # largest finite magnitude, as it was recorded
    peak_step: int | None
    overflow_steps: int
    first_overflow: int | None
    flushed: float
    subnormal: float
    saturated: float
    flushed_energy: float
    subnormal_energy: float
    headroom_bits: float  # between the peak, scaled, and the format's end
    needs_bits: int | None  # loss scale from which less than 1 % of the energy is lost; gradients only
    history: tuple[float, ...]  # per step: peak of what is judged by its peak, else the share of energy lost
    severity: Severity | None = None
    why: str = ""


@dataclass(frozen=True)
class Recorded:
    """What a run holds on one kind: `peaks` is the largest magnitude, NaN where a site was not measured or not finite."""

    kind: str
    sites: list[Site]
    steps: np.ndarray
    peaks: np.ndarray
    spared: np.ndarray  # per site: autocast leaves it in FP32


def examine(
    recorded: Recorded, histograms: Iterable[tuple[int, np.ndarray]], target: Format, path: ScalePath, limits: Limits,
    own_scale: bool,
) -> list[Fate]:  # fmt: skip
    """The fates of all sites of a kind. `own_scale`: each tensor has its own best scale at each step, as FP8 recipes have."""
    n = len(recorded.sites)
    scaled = recorded.kind in BACKWARD
    steps: list[int] = []
    rows: dict[str, list[np.ndarray]] = {name: [] for name in ("measured", "flushed", "subnormal", "saturated", "lost", "low", "need")}
    peaks, bits_used = [], []
    where = {int(step): row for row, step in enumerate(recorded.steps.tolist())}
    for step, counts in histograms:
        peak = _peaks_at(recorded, where.get(step), counts, n)
        bits = np.where(peak > 0, limit_bits(peak, target), 0) if own_scale else np.full(n, path.at(step) if scaled else 0)
        here = shares(counts, target, bits[: len(counts)])
        needed = flush_exponent(target) - exponent_below(counts, limits.flush_energy_warn)
        needed = np.where(needed <= flush_exponent(target) - NOTHING, -NOTHING, needed)
        for name, row in (("measured", here.count > 0), ("flushed", here.flushed), ("subnormal", here.subnormal),
                          ("saturated", here.saturated), ("lost", here.flushed_energy), ("low", here.subnormal_energy),
                          ("need", needed)):  # fmt: skip
            rows[name].append(_padded(row, n))
        steps.append(step)
        peaks.append(peak)
        bits_used.append(bits)
    if not steps:
        return []
    table = {name: np.array(values) for name, values in rows.items()}
    table |= {"peaks": np.array(peaks), "bits": np.array(bits_used)}
    fates = [_fate(recorded, i, np.array(steps), table, target) for i in range(n)]
    return [_judged(fate, target, limits, own_scale) for fate in fates if fate is not None]


def _peaks_at(recorded: Recorded, row: int | None, counts: np.ndarray, n: int) -> np.ndarray:
    """Exact magnitudes where they are on record; else (tensors with NaN or infinity) the lower edge of the highest bin."""
    highest = highest_exponent(counts)
    edge = np.where(highest > -NOTHING, np.exp2(np.maximum(highest, -1000).astype(float)), np.nan)
    exact = recorded.peaks[row] if row is not None else np.full(n, np.nan)
    return np.where(np.isfinite(exact), exact, _padded(edge, n, np.nan))


def _padded(row: np.ndarray, n: int, value: float = 0.0) -> np.ndarray:
    return row if len(row) == n else np.concatenate([row, np.full(n - len(row), value, dtype=row.dtype)])


def _fate(recorded: Recorded, i: int, steps: np.ndarray, table: dict[str, np.ndarray], target: Format) -> Fate | None:
    seen = table["measured"][:, i].astype(bool)
    if not seen.any():
        return None
    site = recorded.sites[i]
    when, peaks = steps[seen], table["peaks"][seen, i]
    bits = table["bits"][seen, i]
    over = np.ldexp(peaks, np.clip(bits, -1000, 1000).astype(np.int32)) >= target.overflow_at
    top = int(np.nanargmax(peaks))
    lost = table["lost"][seen, i]
    needs = table["need"][seen, i]
    scaled = recorded.kind in BACKWARD
    room = np.log2(target.max) - np.log2(peaks) - bits
    return Fate(
        kind=recorded.kind,
        site=site.name,
        elements=int(np.prod(site.shape)) if site.shape else 1,
        steps=int(seen.sum()),
        peak=float(peaks[top]),
        peak_step=int(when[top]),
        overflow_steps=int(over.sum()),
        first_overflow=int(when[np.argmax(over)]) if over.any() else None,
        flushed=float(table["flushed"][seen, i].mean()),
        subnormal=float(table["subnormal"][seen, i].mean()),
        saturated=float(table["saturated"][seen, i].mean()),
        flushed_energy=float(np.quantile(lost, LASTING)),
        subnormal_energy=float(np.quantile(table["low"][seen, i], LASTING)),
        headroom_bits=float(np.min(room)),
        needs_bits=int(np.quantile(needs, LASTING, method="lower")) if scaled else None,
        history=tuple((lost if scaled else peaks).tolist()),
    )


def _judged(fate: Fate, target: Format, limits: Limits, own_scale: bool) -> Fate:
    from dataclasses import replace

    severity, why = _judgement(fate, target, limits, own_scale)
    return replace(fate, severity=severity, why=why)


def _judgement(fate: Fate, target: Format, limits: Limits, own_scale: bool) -> tuple[Severity | None, str]:
    forward = fate.kind in FORWARD
    if forward and fate.overflow_steps and not own_scale:
        return Severity.ERROR, "overflows"
    if fate.flushed_energy >= limits.flush_energy_error:
        return Severity.ERROR, "becomes zero" if fate.flushed_energy > 0.99 else "loses energy"
    if fate.flushed_energy >= limits.flush_energy_warn:
        return Severity.WARNING, "loses energy"
    if forward and not own_scale and fate.headroom_bits < limits.headroom_warn_bits:
        return Severity.WARNING, "close to overflow"
    if fate.subnormal_energy >= limits.subnormal_energy_warn:
        return Severity.WARNING, "loses digits"
    return None, ""
