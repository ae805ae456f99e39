"""Statistics of every layer at one step, the most unusual first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.finding import NannyError
from ..core.formats import FP16, Format, format_of
from ..core.limits import Limits
from ..core.numbers import short
from ..core.step import Site
from ..store import reader
from .alerts import matches
from .source import Source

KINDS = ("output", "output_grad", "grad", "weight", "update", "buffer")


@dataclass(frozen=True)
class SiteStats:
    """One site at one step, and what is unusual about it."""

    site: Site
    values: dict[str, float]
    note: str
    rank: tuple[float, float]  # worst first: group, then distance

    @property
    def absmax(self) -> float:
        return _absmax(self.values)


@dataclass(frozen=True)
class StepStats:
    """Every layer of a run at one step."""

    source: Source
    step: int
    kinds: dict[str, list[SiteStats]]  # worst first
    missing: list[str]  # kinds that were not sampled at this step
    sampled_near: list[int]  # the steps around it at which they were


def stats_at(source: Source, step: int | None = None, *, kind: str | None = None, layer: str | None = None) -> StepStats:
    """Statistics of a step (the last one that was traced in full), of one kind of tensor and the layers that match."""
    kinds = kinds_of(source, kind)
    step = _default_step(source, kinds) if step is None else step
    sampled = {kind: _site_stats(source, kind, step, layer) for kind in kinds}
    found = {kind: rows for kind, rows in sampled.items() if rows is not None}
    if not found:
        raise NannyError(_nothing_at(source, kinds, step))
    if not any(found.values()):
        raise NannyError(f"no layer matches {layer!r}; `{source.command('stats', '--step', step)}` lists them")
    missing = [kind for kind in kinds if kind not in found]
    return StepStats(source, step, found, missing, _sampled_near(source, missing, step))


def stored_format(site: Site) -> Format | None:
    """The format of a site's tensor; None for integers and what nobody knows."""
    try:
        return format_of(site.dtype)
    except NannyError:
        return None


def unusual(sites: Sequence[Site], columns: dict[str, np.ndarray], limits: Limits) -> list[SiteStats]:
    """The sites that were measured, worst first: not finite, close to overflow, all zero, then the furthest from the median."""
    count = columns["count"]
    size = np.abs(columns.get("norm", np.zeros(len(count))).astype(np.float64)) / np.sqrt(np.maximum(count, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.where((count > 0) & np.isfinite(size) & (size > 0), np.log2(size), np.nan)
    middle = float(np.nanmedian(order)) if np.isfinite(order).any() else 0.0
    out = []
    for i in np.flatnonzero(count > 0).tolist():
        values = {name: float(column[i]) for name, column in columns.items()}
        if (spread := _std(values)) is not None:
            values["std"] = spread
        note, rank = _note(sites[i], values, float(order[i]) - middle, limits)
        out.append(SiteStats(sites[i], values, note, rank))
    return sorted(out, key=lambda row: row.rank)


def stats_of(source: Source, kind: str) -> list[str]:
    """Names of the statistics that were taken of a kind; later samples may have others than the first."""
    steps = reader.sample_steps(source.db, source.run.id, kind)
    names: dict[str, None] = {}
    for step in {int(steps[0]), int(steps[-1])} if len(steps) else ():
        names |= dict.fromkeys(reader.sample_at(source.db, source.run.id, kind, step) or {})
    return list(names)


def _std(values: dict[str, float]) -> float | None:
    """From the norm and the mean; None where their difference is all rounding of what was stored."""
    if not {"norm", "mean"} <= set(values):
        return None
    square, middle = values["norm"] ** 2 / values["count"], values["mean"] ** 2
    return math.sqrt(square - middle) if square - middle > _STORED * square else None


_STORED = 1e-5  # the digits of float32, with room for both


def _absmax(values: dict[str, float]) -> float:
    """The largest magnitude; 0 where minimum and maximum were not taken."""
    return max(abs(values.get("min", 0.0)), abs(values.get("max", 0.0)))


def _note(site: Site, values: dict[str, float], distance: float, limits: Limits) -> tuple[str, tuple[float, float]]:
    bad = {"NaN": values.get("nan", 0.0), "+Inf": values.get("posinf", 0.0), "-Inf": values.get("neginf", 0.0)}
    seen = [f"{int(n)} {name}" for name, n in bad.items() if n > 0]
    if seen:
        return ", ".join(seen), (0.0, -sum(bad.values()) / values["count"])
    if not all(math.isfinite(values.get(name, 0.0)) for name in ("min", "max", "norm")):
        return "not finite", (0.0, 0.0)
    peak = _absmax(values)
    target = stored_format(site)
    if target is not None and target.max <= FP16.max and peak > 0:
        room = math.log2(target.max / peak)
        if room < limits.headroom_info_bits:
            return f"{room:.1f} bits to overflow", (1.0, room)
    if peak == 0 and "max" in values:
        return "all zero", (2.0, 0.0)
    if math.isnan(distance):
        return "", (4.0, 0.0)
    if abs(distance) >= math.log2(limits.grad_ratio):
        return f"{short(2.0 ** abs(distance), 2)} x {'above' if distance > 0 else 'below'} median", (3.0, -abs(distance))
    return "", (3.0, -abs(distance))


def kinds_of(source: Source, wanted: str | None) -> list[str]:
    """Kinds that the run holds, forward first; or only the one that is wanted."""
    there = reader.kinds(source.db, source.run.id)
    if wanted is not None and wanted not in there:
        raise NannyError(f"run {source.run.id} holds no {wanted!r}; it holds: {', '.join(there) or 'nothing'}")
    return [wanted] if wanted else sorted(there, key=lambda kind: KINDS.index(kind) if kind in KINDS else len(KINDS))


def _default_step(source: Source, kinds: Sequence[str]) -> int:
    """The last step that was traced in full; without one, the last of which there is anything."""
    lasts = {kind: int(steps[-1]) for kind in kinds if len(steps := reader.sample_steps(source.db, source.run.id, kind))}
    if not lasts:
        raise NannyError(f"run {source.run.id} has recorded no step yet; `{source.command('tail')}` follows it")
    return lasts.get("output", max(lasts.values()))


def _site_stats(source: Source, kind: str, step: int, glob: str | None) -> list[SiteStats] | None:
    columns = reader.sample_at(source.db, source.run.id, kind, step)
    if columns is None:
        return None
    rows = unusual(source.sites(kind), columns, Limits())
    return [row for row in rows if glob is None or matches(row.site.name, glob)]


def _sampled_near(source: Source, kinds: Sequence[str], step: int) -> list[int]:
    around: set[int] = set()
    for kind in kinds:
        steps = reader.sample_steps(source.db, source.run.id, kind)
        at = int(np.searchsorted(steps, step))
        around |= {int(s) for s in steps[max(at - 1, 0) : at + 1]}
    return sorted(around)


def near_text(steps: Sequence[int]) -> str:
    """` (sampled around it: 96, 112)`, or nothing."""
    return f" (sampled around it: {', '.join(map(str, steps))})" if steps else ""


def _nothing_at(source: Source, kinds: Sequence[str], step: int) -> str:
    ends = reader.steps(source.db, source.run.id)
    span = f"it runs from {ends[0]} to {ends[1]}" if ends else "it has recorded nothing yet"
    return f"run {source.run.id} has no statistics of step {step}{near_text(_sampled_near(source, kinds, step))}; {span}"
