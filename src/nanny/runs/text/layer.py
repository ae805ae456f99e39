"""How the history of one layer looks: its findings, its curves as text, its last steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.numbers import amount, join_names, short
from ...core.plain_json import finding_object
from ...core.step import Site
from ...show.spark import sparkline
from ...show.tables import Answer, Column, Line, Table
from ..layer import KindHistory, LayerHistory
from ..source import title_of
from ..stats import stored_format
from .alerts import finding_blocks
from .stats import NOT_SHOWN, TITLES
from .summary import CURVE_WIDTH

STEPS_SHOWN = 12
FINDINGS_SHOWN = 5


def layer_answer(layer: LayerHistory, limit: int | None) -> Answer:
    source = layer.source
    lines = [Line(f"{layer.name} in {title_of(source)}", "strong", 4)]
    if not layer.kinds:
        lines.append(Line("an operation or another place that is not measured", indent=4))
    if layer.parameters:
        lines.append(Line(f"its parameters: {join_names(layer.parameters, 4)}", indent=4))
    lines += finding_blocks(layer.findings[:FINDINGS_SHOWN])
    if len(layer.findings) > FINDINGS_SHOWN:
        lines.append(Line(f"… and {len(layer.findings) - FINDINGS_SHOWN} more findings"))
    for history in layer.kinds:
        lines += _layer_curves(history)
    if layer.kinds:
        following = [source.command("stats", "--step", layer.worst_step)]
        following += [source.command("layer", layer.parameters[0])] if layer.parameters else []
    else:
        steps = [f.step for f in layer.findings if f.step is not None]
        following = [f"nanny rule {layer.findings[0].code}", *([source.command("stats", "--step", steps[0])] if steps else [])]
    return Answer(
        lines=lines,
        tables=[_layer_table(history, limit or STEPS_SHOWN) for history in layer.kinds],
        flat=_layer_rows(layer.kinds),
        data=_layer_data(layer),
        next=following,
    )


def _layer_curves(history: KindHistory) -> list[Line]:
    site = history.site
    facts = [site.dtype, " x ".join(map(str, site.shape)), amount(len(history.steps), "step")]
    lines = [Line(""), Line(f"{TITLES.get(site.kind, site.kind)} ({', '.join(fact for fact in facts if fact)})", "strong")]
    for title, values in history.curves.items():
        finite = values[np.isfinite(values)]
        bad = len(values) - len(finite)
        span = f"{short(float(finite.min()))} to {short(float(finite.max()))}" if len(finite) else "never finite"
        text = f"  {title:<8} {span}" + (f", not finite at {amount(bad, 'step')}" if bad else "")
        if title == "largest" and (room := _headroom(site, history.steps, values)):
            text += f", {room}"
        lines += [Line(text, "error" if bad else "", 11), Line(f"           {sparkline(values.tolist(), CURVE_WIDTH, log=True)}")]
    return lines


def _headroom(site: Site, steps: np.ndarray, peaks: np.ndarray) -> str:
    """How close the largest value came to the end of a 16-bit format."""
    form = stored_format(site)
    known = np.where(np.isfinite(peaks), peaks, 0.0)
    top = int(np.argmax(known))
    if form is None or form.bits > 16 or not known[top]:
        return ""
    return f"{math.log2(form.max / known[top]):.1f} bits below the end of {form.name} (step {steps[top]})"


def _layer_table(history: KindHistory, most: int) -> Table:
    """The last steps, with all that were not finite kept in view."""
    names = [name for name in history.values if name not in NOT_SHOWN]
    names += [name for name in ("nan", "posinf", "neginf") if name in history.values and history.values[name].any()]
    bad = history.is_bad
    order = np.flatnonzero(bad)[: most // 2].tolist()
    order = sorted({*order, *range(max(len(history.steps) - (most - len(order)), 0), len(history.steps))})
    rows = [[int(history.steps[i]), *(float(history.values[name][i]) for name in names)] for i in order]
    styles = ["error" if bad[i] else "" for i in order]
    left = len(history.steps) - len(order)
    title = TITLES.get(history.site.kind, history.site.kind) + (f", the last steps ({left} others left out)" if left else "")
    return Table((Column("step"), *(Column(name) for name in names)), rows, title=title, styles=styles)


def _layer_rows(histories: Sequence[KindHistory]) -> Table:
    names = list(dict.fromkeys(name for history in histories for name in history.values))
    rows = [
        [history.site.kind, int(step), *(float(history.values[name][i]) if name in history.values else None for name in names)]
        for history in histories
        for i, step in enumerate(history.steps)
    ]
    return Table((Column("kind"), Column("step"), *(Column(name) for name in names)), rows)


def _layer_data(layer: LayerHistory) -> dict[str, Any]:
    kinds = {
        history.site.kind: {
            "dtype": history.site.dtype,
            "shape": list(history.site.shape),
            "steps": history.steps.tolist(),
            **{stat: column.tolist() for stat, column in history.values.items()},
        }
        for history in layer.kinds
    }
    return {"layer": layer.name, "kinds": kinds, "findings": [finding_object(finding) for finding in layer.findings]}
