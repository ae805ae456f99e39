"""Statistics of every layer at one step, the most unusual first."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.finding import NannyError
from ..core.formats import FP16, FP32, Format, format_of
from ..core.limits import Limits
from ..core.numbers import counted, listed, short
from ..core.step import Site
from ..show.tables import Answer, Column, Line, Table
from ..store import reader
from .alerts import matches
from .source import Source, open_run, positive, title_of

SHOWN = 12
KINDS = ("output", "output_grad", "grad", "weight", "update", "buffer")
TITLES = {
    "output": "outputs of modules",
    "output_grad": "gradients of outputs",
    "grad": "gradients of parameters (unscaled)",
    "weight": "parameters",
    "update": "updates",
    "buffer": "buffers",
}


@dataclass(frozen=True)
class SiteStats:
    """One site at one step, and what is unusual about it."""

    site: Site
    values: dict[str, float]
    note: str
    rank: tuple[float, float]  # worst first: group, then distance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the last one that was traced in full)")
    parser.add_argument("--layer", metavar="GLOB", help="only layers whose name matches, such as 'encoder.*'")
    parser.add_argument("--kind", choices=KINDS, help="only this kind")
    parser.add_argument("--limit", type=positive, metavar="N", help=f"rows of each table in text and markdown (default: {SHOWN})")


def answer(args: argparse.Namespace) -> Answer:
    with open_run(args.db, args.run) as source:
        kinds = kinds_of(source, args.kind)
        step = _default_step(source, kinds) if args.step is None else args.step
        read = {kind: _read(source, kind, step, args.layer) for kind in kinds}
        found = {kind: rows for kind, rows in read.items() if rows is not None}
        if not found:
            raise NannyError(_nothing_at(source, kinds, step))
        lines = [Line(f"step {step} of {title_of(source)}", indent=4)]
        missing = [kind for kind in kinds if kind not in found]
        if missing:
            lines.append(Line(f"not sampled at this step: {', '.join(missing)}{_nearest(source, missing, step)}", "warning", 4))
        if not any(found.values()):
            raise NannyError(f"no layer matches {args.layer!r}; `{source.command('stats', '--step', step)}` lists them")
        command = source.command
    tables = [_table(kind, rows, args.limit or SHOWN) for kind, rows in found.items() if rows]
    worst = min((row for rows in found.values() for row in rows), key=lambda row: row.rank)
    return Answer(
        lines=lines,
        tables=tables,
        flat=_flat(found),
        data={"step": step, "kinds": {kind: [_object(row) for row in rows] for kind, rows in found.items()}, "missing": missing},
        next=[command("layer", worst.site.name)],
    )


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
        note, rank = _note(sites[i], values, float(order[i]) - middle, limits)
        out.append(SiteStats(sites[i], values, note, rank))
    return sorted(out, key=lambda row: row.rank)


def absmax(values: dict[str, float]) -> float:
    """The largest magnitude; 0 where minimum and maximum were not taken."""
    return max(abs(values.get("min", 0.0)), abs(values.get("max", 0.0)))


def stats_of(source: Source, kind: str) -> list[str]:
    """Names of the statistics that were taken of a kind; later samples may have others than the first."""
    steps = reader.sample_steps(source.db, source.run.id, kind)
    names: dict[str, None] = {}
    for step in {int(steps[0]), int(steps[-1])} if len(steps) else ():
        names |= dict.fromkeys(reader.sample_at(source.db, source.run.id, kind, step) or {})
    return list(names)


def _note(site: Site, values: dict[str, float], distance: float, limits: Limits) -> tuple[str, tuple[float, float]]:
    bad = {"NaN": values.get("nan", 0.0), "+Inf": values.get("posinf", 0.0), "-Inf": values.get("neginf", 0.0)}
    seen = [f"{int(n)} {name}" for name, n in bad.items() if n > 0]
    if seen:
        return ", ".join(seen), (0.0, -sum(bad.values()) / values["count"])
    if not all(math.isfinite(values.get(name, 0.0)) for name in ("min", "max", "norm")):
        return "not finite", (0.0, 0.0)
    peak = absmax(values)
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


def _read(source: Source, kind: str, step: int, glob: str | None) -> list[SiteStats] | None:
    columns = reader.sample_at(source.db, source.run.id, kind, step)
    if columns is None:
        return None
    rows = unusual(reader.sites(source.db, source.run.id, kind), columns, Limits())
    return [row for row in rows if glob is None or matches(row.site.name, glob)]


def _nearest(source: Source, kinds: Sequence[str], step: int) -> str:
    """` (traced steps around it: 96, 112)`."""
    around: set[int] = set()
    for kind in kinds:
        steps = reader.sample_steps(source.db, source.run.id, kind)
        at = int(np.searchsorted(steps, step))
        around |= {int(s) for s in steps[max(at - 1, 0) : at + 1]}
    return f" (sampled around it: {', '.join(map(str, sorted(around)))})" if around else ""


def _nothing_at(source: Source, kinds: Sequence[str], step: int) -> str:
    ends = reader.steps(source.db, source.run.id)
    span = f"it runs from {ends[0]} to {ends[1]}" if ends else "it has recorded nothing yet"
    return f"run {source.run.id} has no statistics of step {step}{_nearest(source, kinds, step)}; {span}"


def _table(kind: str, rows: Sequence[SiteStats], most: int) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    shown = [name for name in ("min", "max", "norm", "mean") if name in names]
    others = [name for name in names if name not in (*shown, "count", "nan", "posinf", "neginf")]
    same = {row.site.dtype for row in rows}
    columns = [Column("layer", elastic=True), *([Column("dtype")] if len(same) > 1 else [])]
    columns += [*(Column(name) for name in (*shown, *others)), Column("note")]
    cells = []
    for row in rows:
        lead = [row.site.name, *([row.site.dtype] if len(same) > 1 else [])]
        cells.append([*lead, *(row.values.get(name) for name in (*shown, *others)), row.note])
    styles = [{0.0: "error", 1.0: "warning", 2.0: "warning"}.get(row.rank[0], "") for row in rows]
    dtype = f", {same.pop()}" if len(same) == 1 and "" not in same else ""
    noun = "layer" if kind.startswith("output") else "tensor"
    title = f"{TITLES.get(kind, kind)}: {counted(len(rows), noun)}{dtype}, the most unusual first"
    return Table(tuple(columns), cells, title=title, most=most, rest=_rest(rows[most:]), styles=styles)


def _rest(rows: Sequence[SiteStats]) -> str:
    noted = [row.site.name for row in rows if row.note]
    if noted:
        return f"layers, {len(noted)} of them with a note ({listed(noted, 2)})"
    peaks = [absmax(row.values) for row in rows]
    return f"layers, none of them unusual (largest magnitude {short(max(peaks, default=0.0))})"


def _flat(found: dict[str, list[SiteStats]]) -> Table:
    names = list(dict.fromkeys(name for rows in found.values() for row in rows for name in row.values))
    columns = tuple(Column(name) for name in ("kind", "layer", "dtype", *names, "note"))
    rows = [
        [kind, row.site.name, row.site.dtype, *(row.values.get(name) for name in names), row.note]
        for kind, members in found.items()
        for row in members
    ]
    return Table(columns, rows)


def _object(row: SiteStats) -> dict[str, Any]:
    form = stored_format(row.site) or FP32
    peak = absmax(row.values)
    room = math.log2(form.max / peak) if 0 < peak < math.inf else None
    place = {"layer": row.site.name, "dtype": row.site.dtype, "shape": list(row.site.shape)}
    return {**place, **row.values, "headroom_bits": room, "note": row.note}
