"""The history of one layer, parameter or gradient, with its curves and findings.

NAME is a site's name as `nanny stats` shows it, or enough of it to be the only one.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.finding import Finding, NannyError
from ..core.numbers import counted, listed, short
from ..core.plain_json import finding_object
from ..core.step import SAMPLE_STATS, Site
from ..show.spark import sparkline
from ..show.tables import Answer, Column, Line, Table
from ..store import reader
from .alerts import finding_lines, findings_of, in_order
from .source import Source, open_run, positive, step_range, title_of
from .stats import KINDS, TITLES, kinds_of, stats_of, stored_format

SHOWN = 12
FINDINGS_SHOWN = 5
CURVE_WIDTH = 72


@dataclass(frozen=True)
class History:
    """One site over the steps at which it was measured."""

    site: Site
    steps: np.ndarray
    values: dict[str, np.ndarray]

    @property
    def curves(self) -> dict[str, np.ndarray]:
        """What is worth drawing: typical and largest magnitude, and statistics of the kind's own."""
        out = {}
        if "norm" in self.values:
            out["typical"] = self.values["norm"] / np.sqrt(np.maximum(self.values["count"], 1))
        if "min" in self.values and "max" in self.values:
            out["largest"] = np.maximum(np.abs(self.values["min"]), np.abs(self.values["max"]))
        return out | {name: column for name, column in self.values.items() if name not in SAMPLE_STATS}

    @property
    def is_bad(self) -> np.ndarray:
        """Per step: something is not finite."""
        bad = np.zeros(len(self.steps), bool)
        for column in self.curves.values():
            bad |= ~np.isfinite(column)
        return bad


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the layer, or enough of its name")
    parser.add_argument("--kind", choices=KINDS, help="only this kind")
    parser.add_argument("--step", type=step_range, metavar="A:B", help="only these steps")
    parser.add_argument("--limit", type=positive, metavar="N", help=f"steps shown for each kind in text (default: {SHOWN})")


def answer(args: argparse.Namespace) -> Answer:
    with open_run(args.db, args.run) as source:
        sites = {kind: reader.sites(source.db, source.run.id, kind) for kind in kinds_of(source, args.kind)}
        told = [f for f in in_order(findings_of(source, None, *(args.step or (None, None)))) if f.site == args.name]
        if told and not any(site.name == args.name for members in sites.values() for site in members):
            return _findings_only(args.name, told, source)
        name = chosen_name(args.name, list(dict.fromkeys(site.name for members in sites.values() for site in members)))
        first, last = args.step or (None, None)
        histories = [_history(source, kind, members, name, first, last) for kind, members in sites.items()]
        found = [history for history in histories if history is not None and len(history.steps)]
        findings = in_order(findings_of(source, None, first, last))
        title, command = title_of(source), source.command
    if not found:
        raise NannyError(f"{name} was never measured{' in these steps' if args.step else ''}; it may not have been called")
    own = [finding for finding in findings if finding.site == name]
    lines = [Line(f"{name} in {title}", "strong", 4)]
    inner = [s.name for s in sites.get("grad", ()) if s.name.startswith(f"{name}.")]
    if inner:
        lines.append(Line(f"its parameters: {listed(inner, 4)}", indent=4))
    for finding in own[:FINDINGS_SHOWN]:
        lines += [Line(""), *finding_lines(finding)]
    if len(own) > FINDINGS_SHOWN:
        lines.append(Line(f"… and {len(own) - FINDINGS_SHOWN} more findings"))
    for history in found:
        lines += _curves(history)
    most = args.limit or SHOWN
    return Answer(
        lines=lines,
        tables=[_table(history, most) for history in found],
        flat=_flat(found),
        data=_data(name, found, own),
        next=[command("stats", "--step", _worst_step(found)), *([command("layer", inner[0])] if inner else [])],
    )


def _findings_only(name: str, findings: list[Finding], source: Source) -> Answer:
    """A place that has findings and no measurements: an operation (`op:bmm`), the data, the loss scale."""
    lines = [
        Line(f"{name} in {title_of(source)}", "strong", 4),
        Line("an operation or another place that is not measured", indent=4),
    ]
    for finding in findings[:FINDINGS_SHOWN]:
        lines += [Line(""), *finding_lines(finding)]
    if len(findings) > FINDINGS_SHOWN:
        lines.append(Line(f"… and {len(findings) - FINDINGS_SHOWN} more findings"))
    steps = [f.step for f in findings if f.step is not None]
    following = [source.command("stats", "--step", steps[0])] if steps else []
    return Answer(
        lines=lines, flat=_flat([]), data=_data(name, [], findings), next=[f"nanny rule {findings[0].code}", *following]
    )


def chosen_name(wanted: str, names: Sequence[str]) -> str:
    """The name that is meant: exactly, else the only one that contains it."""
    if wanted in names:
        return wanted
    holding = [name for name in names if wanted in name]
    if len(holding) == 1:
        return holding[0]
    if holding:
        raise NannyError(f"{wanted!r} could be {listed(holding, 5)}; write one of them in full")
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
    meant = f"; did you mean {' or '.join(close)}?" if close else "; `nanny stats` lists the layers"
    raise NannyError(f"this run has no layer {wanted!r}{meant}")


def _history(source: Source, kind: str, sites: Sequence[Site], name: str, first: int | None, last: int | None) -> History | None:
    position = next((i for i, site in enumerate(sites) if site.name == name), None)
    if position is None:
        return None
    columns = {}
    steps = np.empty(0, np.int64)
    for stat in stats_of(source, kind):
        steps, matrix = reader.samples(source.db, source.run.id, kind, stat, first, last)
        missing = 0.0 if stat == "count" else math.nan
        columns[stat] = matrix[:, position].astype(float) if position < matrix.shape[1] else np.full(len(steps), missing)
    seen = columns["count"] > 0
    return History(sites[position], steps[seen], {stat: column[seen] for stat, column in columns.items()})


def _curves(history: History) -> list[Line]:
    site = history.site
    facts = [site.dtype, " x ".join(map(str, site.shape)), counted(len(history.steps), "step")]
    lines = [Line(""), Line(f"{TITLES.get(site.kind, site.kind)} ({', '.join(fact for fact in facts if fact)})", "strong")]
    for title, values in history.curves.items():
        finite = values[np.isfinite(values)]
        bad = len(values) - len(finite)
        span = f"{short(float(finite.min()))} to {short(float(finite.max()))}" if len(finite) else "never finite"
        text = f"  {title:<8} {span}" + (f", not finite at {counted(bad, 'step')}" if bad else "")
        if title == "largest" and (room := _room(history.site, history.steps, values)):
            text += f", {room}"
        lines += [Line(text, "error" if bad else "", 11), Line(f"           {sparkline(values.tolist(), CURVE_WIDTH, log=True)}")]
    return lines


def _room(site: Site, steps: np.ndarray, peaks: np.ndarray) -> str:
    """How close the largest value came to the end of a 16-bit format."""
    form = stored_format(site)
    known = np.where(np.isfinite(peaks), peaks, 0.0)
    top = int(np.argmax(known))
    if form is None or form.bits > 16 or not known[top]:
        return ""
    return f"{math.log2(form.max / known[top]):.1f} bits below the end of {form.name} (step {steps[top]})"


def _table(history: History, most: int) -> Table:
    """The last steps, with all that were not finite kept in view."""
    names = [name for name in history.values if name not in ("count", "nan", "posinf", "neginf")]
    names += [name for name in ("nan", "posinf", "neginf") if name in history.values and history.values[name].any()]
    bad = history.is_bad
    order = np.flatnonzero(bad)[: most // 2].tolist()
    order = sorted({*order, *range(max(len(history.steps) - (most - len(order)), 0), len(history.steps))})
    rows = [[int(history.steps[i]), *(float(history.values[name][i]) for name in names)] for i in order]
    styles = ["error" if bad[i] else "" for i in order]
    left = len(history.steps) - len(order)
    title = TITLES.get(history.site.kind, history.site.kind) + (f", the last steps ({left} others left out)" if left else "")
    return Table((Column("step"), *(Column(name) for name in names)), rows, title=title, styles=styles)


def _flat(histories: Sequence[History]) -> Table:
    names = list(dict.fromkeys(name for history in histories for name in history.values))
    rows = [
        [history.site.kind, int(step), *(float(history.values[name][i]) if name in history.values else None for name in names)]
        for history in histories
        for i, step in enumerate(history.steps)
    ]
    return Table((Column("kind"), Column("step"), *(Column(name) for name in names)), rows)


def _data(name: str, histories: Sequence[History], findings: Sequence[Finding]) -> dict[str, Any]:
    kinds = {
        history.site.kind: {
            "dtype": history.site.dtype,
            "shape": list(history.site.shape),
            "steps": history.steps.tolist(),
            **{stat: column.tolist() for stat, column in history.values.items()},
        }
        for history in histories
    }
    return {"layer": name, "kinds": kinds, "findings": [finding_object(finding) for finding in findings]}


def _worst_step(histories: Sequence[History]) -> int:
    """The first step that is not finite, else the one with the largest magnitude."""
    history = histories[0]
    bad = np.flatnonzero(history.is_bad)
    size = next(iter(history.curves.values()), np.zeros(len(history.steps)))
    return int(history.steps[bad[0] if len(bad) else np.argmax(np.nan_to_num(size))])
