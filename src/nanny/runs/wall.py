"""The picture of a run in numbers: how the culprit's binary orders move towards the end of the format, and what happened there.

`nanny card`, the head of the page and a notebook draw the same record (`show/wall.py`). A healthy run gets its clearance: the
layer that came closest to the end, how many bits were left, and whether it drifts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..core.examination import FirstBad, Hazard
from ..core.formats import FP32, Format, format_of
from ..core.limits import Limits
from ..diagnose.causes.early import crossing
from ..diagnose.records import Diagnosis
from ..store import reader
from .histograms import ExponentHistograms, layer_histogram
from .matrices import KindMatrices, matrices_of
from .source import Source, own_format
from .summary import Summary

BACKWARD = ("output_grad", "grad")
# where a cause of this family shows itself, best first
KINDS = {
    "underflow": ("grad", "output_grad", "output", "weight"),
    "scaler_misuse": ("grad", "output_grad", "output", "weight"),
    "optimizer": ("grad", "weight", "output"),
    "update_stagnation": ("weight", "grad", "output"),
}
DEFAULT_KINDS = ("output", "output_grad", "grad", "weight")
FEWEST = 4  # samples that make a trend
LIMITS = Limits()


@dataclass(frozen=True)
class Limit:
    """From this step on; for gradients the loss scale moves both ends."""

    step: int
    ceiling: float
    floor: float


@dataclass(frozen=True)
class Clearance:
    """How near the layer that comes closest is to the end of the format."""

    value: float
    step: int
    bits: float  # left to the end
    drift: float | None  # bits per 100 steps in the second half of the run, towards the end; None: too few samples
    forecast: int | None = None  # the step at which it would be there, if the trend is clear and that is near


@dataclass(frozen=True)
class Wall:
    format: str
    largest: float
    site: str = ""
    kind: str = ""
    reach: Sequence[tuple[float, float]] = ()  # of each column on the step axis
    lowest: int = 0  # binary order of the first row of counts
    counts: Sequence[Sequence[int]] = ()  # [columns][orders]
    zeros: Sequence[int] = ()  # per column
    nonfinite: Sequence[int] = ()
    limits: Sequence[Limit] = ()
    steps: tuple[int, int] | None = None
    impact: int | None = None  # the step at which it happened
    op: str = ""
    expected: float | None = None  # what FP32 has where the format ends
    ran: Mapping[str, int] = field(default_factory=dict)  # binary orders of that operation's result as it ran ...
    fp32: Mapping[str, int] = field(default_factory=dict)  # ... and in FP32
    forecast: int | None = None
    clearance: Clearance | None = None
    lost: Sequence[int] = ()  # steps whose loss was not finite
    # by step (rms): how far weights that stand still should have moved, or what FP32 has where gradients are 0
    marks: Sequence[tuple[int, float]] = ()


def wall_of(summary: Summary, matrices: Mapping[str, KindMatrices] | None = None) -> Wall:
    """`matrices` of the culprit's process, if they are at hand: reading them is a pass over all samples."""
    source, diagnosis, first = summary.culprit_rank.source, summary.diagnosis, summary.culprit
    form = own_format(source)
    if form == FP32 and diagnosis is not None and diagnosis.format:  # a part of the run is narrower
        form = format_of(diagnosis.format)
    steps = summary.culprit_rank.steps
    bad = _bad_operation(source, diagnosis)
    clearance, impact = None, None
    if diagnosis is not None:
        found = _site_of(source, diagnosis.culprit, diagnosis.family) or _in_its_place(source, diagnosis)
        if found is None and bad is None and first is not None:  # of an operation that nobody measured: where it was noticed
            found = _site_of(source, first.site, kind=first.evidence.get("kind"))
        impact = None if diagnosis.early else diagnosis.step
    elif first is not None:
        found, impact = _site_of(source, first.site, kind=first.evidence.get("kind")), first.step
    else:
        found, clearance = _closest(matrices_of(source) if matrices is None else matrices, form)
    base = Wall(
        format=form.name,
        largest=form.max,
        limits=[] if bad is None else _limits(source, "output", form, steps),
        steps=steps,
        impact=impact,
        op="" if bad is None else bad.op,
        expected=_size_in_fp32(bad),
        ran={} if bad is None else bad.exponents.get("ran", {}),
        fp32={} if bad is None else bad.exponents.get("fp32", {}),
        forecast=diagnosis.expected_step if diagnosis is not None else clearance.forecast if clearance is not None else None,
        clearance=clearance,
    )
    if found is None:
        return base
    kind, site = found
    seen = layer_histogram(source, kind, site)
    drawn = base if seen is None else _with_histogram(base, source, kind, site, seen, form)
    family = "" if diagnosis is None else diagnosis.family
    if family == "update_stagnation" and kind == "weight" and diagnosis is not None and site == diagnosis.culprit:
        return _with_updates(drawn, source, site, form)
    return _with_fp32_gradients(drawn, source) if family == "underflow" and kind == "grad" else drawn


def clearance_of(summary: Summary) -> Wall:
    """Only what lies ahead of a healthy run, from the traced steps: `nanny summary` does not wait for a pass over all samples."""
    source = summary.culprit_rank.source
    form = own_format(source)
    found, near = _closest(matrices_of(source, kinds=("output",)), form)
    site, due = ("" if found is None else found[1]), None if near is None else near.forecast
    return Wall(form.name, form.max, site=site, steps=summary.culprit_rank.steps, forecast=due, clearance=near)


def _with_updates(base: Wall, source: Source, site: str, form: Format) -> Wall:
    """What ends below is then no value but a movement: half the distance to the next number, at weights of this size."""
    names = [one.name for one in source.sites("update")]
    if site not in names:
        return base
    steps, updates = reader.samples(source.db, source.run.id, "update", "update_rms")
    _, weights = reader.samples(source.db, source.run.id, "update", "weight_rms")
    row = names.index(site)
    seen = [(int(s), float(u[row]), float(w[row])) for s, u, w in zip(steps, updates, weights) if u[row] > 0 and w[row] > 0]
    limits = [Limit(step, form.max, form.spacing(size) / 2) for step, _, size in seen]
    return replace(base, marks=[(step, update) for step, update, _ in seen], limits=limits[-1:] or base.limits)


def _with_fp32_gradients(base: Wall, source: Source) -> Wall:
    """What is drawn may be nothing but zeros: the examined steps know what should be there."""
    size = math.prod(next(one.shape for one in source.sites("grad") if one.name == base.site))
    seen = {
        exam.step: one.reference_norm / math.sqrt(size)
        for exam in reader.examinations(source.db, source.run.id)
        for one in exam.gradients
        if one.name == base.site and 0 < one.reference_norm < math.inf
    }
    return replace(base, marks=sorted(seen.items()))


def _with_histogram(base: Wall, source: Source, kind: str, site: str, seen: ExponentHistograms, form: Format) -> Wall:
    counts = seen.counts[0]
    return replace(
        base,
        site=site,
        kind=kind,
        reach=[(float(a), float(b)) for a, b in seen.columns.reach],
        lowest=seen.lowest,
        counts=counts[:, 1:-1].tolist(),
        zeros=counts[:, 0].tolist(),
        nonfinite=counts[:, -1].tolist(),
        limits=_limits(source, kind, form, base.steps),
        lost=seen.columns.bad.astype(int).tolist(),
    )


def _bad_operation(source: Source, diagnosis: Diagnosis | None) -> FirstBad | Hazard | None:
    """The examined operation that the diagnosis speaks of: who made the first bad number, else what was lost without a NaN."""
    if diagnosis is None:
        return None
    seen = [e for e in reader.examinations(source.db, source.run.id) if e.step == diagnosis.step]
    for bad in (e.first_bad for e in seen):
        if bad is not None and diagnosis.culprit in (bad.culprit, bad.place.site):
            return bad
    silent = (hazard for e in seen for hazard in e.hazards if hazard.kind in ("overflow", "flush"))
    return next((one for one in silent if (one.cause, one.culprit) == (diagnosis.cause, diagnosis.culprit)), None)


def _size_in_fp32(bad: FirstBad | Hazard | None) -> float | None:
    """What FP32 has where the format ends."""
    if isinstance(bad, Hazard):
        return bad.value if bad.kind == "overflow" else None
    return None if bad is None else bad.expected


def _site_of(source: Source, culprit: str, family: str = "", kind: str | None = None) -> tuple[str, str] | None:
    """Kind and name of what is on record of the culprit: itself, else the nearest above or below it. `kind`: looked at first."""
    kinds = (*([kind] if kind else ()), *KINDS.get(family, DEFAULT_KINDS))
    by_kind = {kind: [site.name for site in source.sites(kind)] for kind in kinds}
    if own := next((kind for kind, names in by_kind.items() if culprit in names), None):
        return own, culprit
    for kind, names in by_kind.items():
        inside = [name for name in names if name.startswith(f"{culprit}.")]
        if inside:
            return kind, inside[-1]
        around = [name for name in names if name and culprit.startswith(f"{name}.")]
        if around:
            return kind, max(around, key=len)
    return None


def _in_its_place(source: Source, one: Diagnosis) -> tuple[str, str] | None:
    """Of data, an optimizer, a scaler or the loop there is no histogram: what the data goes into, what the optimizer moves, what
    the loop scales."""
    part = one.culprit.partition(":")[0].partition(".")[0]
    kinds = {
        "data": ("output", "grad"),
        "optimizer": ("weight", "grad", "output"),
        "scaler": ("weight", "grad", "output"),
        "loop": KINDS.get(one.family, DEFAULT_KINDS),
    }.get(part, ())
    first = ((kind, sites[0].name) for kind in kinds if (sites := source.sites(kind)))
    return next((place for place in first if layer_histogram(source, *place) is not None), None)


def _closest(matrices: Mapping[str, KindMatrices], form: Format) -> tuple[tuple[str, str] | None, Clearance | None]:
    for kind, of_kind in matrices.items():
        if kind not in ("output", "grad") or "absmax" not in of_kind.quantities:
            continue
        largest, steps = _sizes(of_kind)
        if np.isnan(largest).all():
            continue
        row, column = np.unravel_index(np.nanargmax(largest), largest.shape)
        value = float(largest[row, column])
        if value <= 0:
            continue
        points = [(int(step), float(size)) for step, size in zip(steps, largest[row]) if math.isfinite(size)]
        due = crossing(points, form.max, int(LIMITS.trend_points), LIMITS.trend_fit)
        clearance = Clearance(value, int(steps[column]), math.log2(form.max / value), _drift(steps, largest[row]), due)
        return (kind, of_kind.sites[int(row)].name), clearance
    return None, None


def _sizes(of_kind: KindMatrices) -> tuple[np.ndarray, np.ndarray]:
    """Largest magnitude [sites, columns], NaN where nothing finite was seen, and the last step of each column."""
    keys = of_kind.quantities["absmax"].keys.astype(np.float64)
    sizes = np.where((keys > 0) & (keys < np.finfo(np.float32).max), keys, np.nan)
    return sizes, of_kind.columns.steps[of_kind.columns.bounds[1:] - 1]


def _drift(steps: np.ndarray, sizes: np.ndarray) -> float | None:
    """The first half is left out: every run moves while it finds its feet."""
    known = np.flatnonzero(np.isfinite(sizes) & (steps >= (steps[0] + steps[-1]) / 2))
    if len(known) < FEWEST:
        return None
    return float(100 * np.polyfit(steps[known], np.log2(sizes[known]), 1)[0])


def _limits(source: Source, kind: str, form: Format, steps: tuple[int, int] | None) -> list[Limit]:
    first = 0 if steps is None else steps[0]
    scales = source.evidence.scalars.get("scale") if kind in BACKWARD else None
    if scales is None:
        return [Limit(first, form.max, form.min_subnormal)]
    changed = np.flatnonzero(np.diff(scales[1], prepend=np.nan) != 0)
    good = [(int(scales[0][i]), float(scales[1][i])) for i in changed]
    return [Limit(step, form.max / scale, form.min_subnormal / scale) for step, scale in good if 0 < scale < math.inf]
