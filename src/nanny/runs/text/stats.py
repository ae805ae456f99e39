"""How the statistics of one step look: a table per kind, the most unusual first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...core.formats import FP32
from ...core.numbers import join_names, short
from ...show.tables import Answer, Column, Line, Table
from ...store.packing import BITS, REDUCTION
from ..source import title_of
from ..stats import SiteStats, StepStats, stored_format

TITLES = {
    "output": "outputs of modules",
    "output_grad": "gradients of outputs",
    "grad": "gradients of parameters (unscaled)",
    "weight": "parameters",
    "update": "updates",
    "buffer": "buffers",
}
NOT_SHOWN = ("count", "nan", "posinf", "neginf", *BITS, *REDUCTION)  # statistics that a table leaves to its notes
STATS_SHOWN = 12


def stats_answer(stats: StepStats, limit: int | None) -> Answer:
    lines = [Line(f"step {stats.step}: {title_of(stats.source)}", indent=4)]
    if stats.missing:
        lines.append(Line(f"not sampled at this step: {', '.join(stats.missing)}", "warning", 4))
    if stats.missing and stats.sampled_near:
        lines.append(Line(f"sampled around it: {', '.join(map(str, stats.sampled_near))}", "warning", 4))
    worst = min((row for rows in stats.kinds.values() for row in rows), key=lambda row: row.rank)
    data = {kind: [_stats_object(row) for row in rows] for kind, rows in stats.kinds.items()}
    return Answer(
        lines=lines,
        tables=[_stats_table(kind, rows, limit or STATS_SHOWN) for kind, rows in stats.kinds.items() if rows],
        flat=_stats_rows(stats),
        data={"step": stats.step, "kinds": data, "missing": stats.missing},
        next=[stats.source.command("layer", worst.site.name)],
    )


def _stats_table(kind: str, rows: Sequence[SiteStats], most: int) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    shown: list[str] = [name for name in ("min", "max", "norm", "mean", "std") if name in names]
    shown += [name for name in names if name not in (*shown, *NOT_SHOWN)]
    same = {row.site.dtype for row in rows}
    columns = [Column("layer", elastic=True), *([Column("dtype")] if len(same) > 1 else [])]
    columns += [*(Column(name) for name in shown), Column("note", says=True)]
    cells = []
    for row in rows:
        lead = [row.site.name, *([row.site.dtype] if len(same) > 1 else [])]
        cells.append([*lead, *(row.values.get(name) for name in shown), row.note])
    styles = [{0.0: "error", 1.0: "warning", 2.0: "warning"}.get(row.rank[0], "") for row in rows]
    said = [*(same if len(same) == 1 and "" not in same else ()), f"the most unusual of {len(rows)} first"]
    title = f"{TITLES.get(kind, kind)}: {', '.join(said)}"
    return Table(tuple(columns), cells, title=title, most=most, rest=_stats_left_out(rows[most:]), styles=styles)


def _stats_left_out(rows: Sequence[SiteStats]) -> str:
    noted = [row.site.name for row in rows if row.note]
    if noted:
        return f"layers, {len(noted)} of them with a note ({join_names(noted, 2)})"
    return f"layers, none of them unusual (largest magnitude {short(max((row.absmax for row in rows), default=0.0))})"


def _stats_rows(stats: StepStats) -> Table:
    names = list(dict.fromkeys(name for rows in stats.kinds.values() for row in rows for name in row.values))
    columns = tuple(Column(name) for name in ("kind", "layer", "dtype", *names, "note"))
    rows = [
        [kind, row.site.name, row.site.dtype, *(row.values.get(name) for name in names), row.note]
        for kind, members in stats.kinds.items()
        for row in members
    ]
    return Table(columns, rows)


def _stats_object(row: SiteStats) -> dict[str, Any]:
    form = stored_format(row.site) or FP32
    room = math.log2(form.max / row.absmax) if 0 < row.absmax < math.inf else None
    place = {"layer": row.site.name, "dtype": row.site.dtype, "shape": list(row.site.shape)}
    return {**place, **row.values, "headroom_bits": room, "note": row.note}
