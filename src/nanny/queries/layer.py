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

from ..records import Finding, NannyError, Site
from ..show.jsontext import finding_object
from ..show.numbers import counted, listed, short
from ..show.spark import sparkline
from ..show.tables import Answer, Column, Line, Table
from ..store import reader
from .alerts import finding_lines, in_order
from .source import Source, open_run, positive, step_range, title_of
from .stats import KINDS, TITLES, kinds_of, stored_format

SHOWN = 12
FINDINGS_SHOWN = 5
CURVE_WIDTH = 72
STATS = ("count", "min", "max", "norm", "mean", "nan", "posinf", "neginf")


@dataclass(frozen=True)
class History:
    """One site over the steps at which it was measured."""

    site: Site
    steps: np.ndarray
    values: dict[str, np.ndarray]

    @property
    def peaks(self) -> np.ndarray:
        return np.maximum(np.abs(self.values["min"]), np.abs(self.values["max"]))

    @property
    def rms(self) -> np.ndarray:
        return self.values["norm"] / np.sqrt(np.maximum(self.values["count"], 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the layer, or enough of its name")
    parser.add_argument("--kind", choices=KINDS, help="only this kind")
    parser.add_argument("--step", type=step_range, metavar="A:B", help="only these steps")
    parser.add_argument("--limit", type=positive, metavar="N", help=f"steps shown for each kind in text (default: {SHOWN})")


def answer(args: argparse.Namespace) -> Answer:
    with open_run(args.db, args.run) as source:
        sites = {kind: reader.sites(source.db, source.run.id, kind) for kind in kinds_of(source, args.kind)}
        name = chosen_name(args.name, list(dict.fromkeys(site.name for members in sites.values() for site in members)))
        first, last = args.step or (None, None)
        histories = [_history(source, kind, members, name, first, last) for kind, members in sites.items()]
        found = [history for history in histories if history is not None and len(history.steps)]
        findings = in_order(reader.findings(source.db, source.run.id, first=first, last=last))
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
        next=[command(f"stats --step {_worst_step(found)}"), *([command(f"layer {inner[0]}")] if inner else [])],
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


def _history(
    source: Source, kind: str, sites: Sequence[Site], name: str, first: int | None, last: int | None
) -> History | None:
    position = next((i for i, site in enumerate(sites) if site.name == name), None)
    if position is None:
        return None
    columns = {}
    steps = np.empty(0, np.int64)
    for stat in STATS:
        steps, matrix = reader.samples(source.db, source.run.id, kind, stat, first, last)
        missing = 0.0 if stat == "count" else math.nan
        columns[stat] = matrix[:, position].astype(float) if position < matrix.shape[1] else np.full(len(steps), missing)
    seen = columns["count"] > 0
    return History(sites[position], steps[seen], {stat: column[seen] for stat, column in columns.items()})


def _curves(history: History) -> list[Line]:
    site = history.site
    facts = [site.dtype, " x ".join(map(str, site.shape)), counted(len(history.steps), "step")]
    lines = [Line(""), Line(f"{TITLES.get(site.kind, site.kind)} ({', '.join(fact for fact in facts if fact)})", "strong")]
    for title, values in (("typical", history.rms), ("largest", history.peaks)):
        finite = values[np.isfinite(values)]
        if not len(values):
            continue
        bad = len(values) - len(finite)
        span = f"{short(float(finite.min()))} to {short(float(finite.max()))}" if len(finite) else "never finite"
        text = f"  {title}  {span}" + (f", not finite at {counted(bad, 'step')}" if bad else "")
        if title == "largest" and (room := _room(history)):
            text += f", {room}"
        lines += [Line(text, "error" if bad else "", 11), Line(f"           {sparkline(values.tolist(), CURVE_WIDTH, log=True)}")]
    return lines


def _room(history: History) -> str:
    """How close the largest value came to the end of a 16-bit format."""
    form = stored_format(history.site)
    finite = history.peaks[np.isfinite(history.peaks)]
    if form is None or form.bits > 16 or not len(finite) or not finite.max():
        return ""
    top = int(np.nanargmax(np.where(np.isfinite(history.peaks), history.peaks, -1.0)))
    return f"{math.log2(form.max / finite.max()):.1f} bits below the end of {form.name} (step {history.steps[top]})"


def _table(history: History, most: int) -> Table:
    """The last steps, with all that were not finite kept in view."""
    taken = [name for name in STATS[1:] if np.isfinite(history.values[name]).any() or name in ("min", "max", "norm")]
    names = [name for name in taken if name not in ("nan", "posinf", "neginf") or history.values[name].any()]
    bad = ~np.isfinite(history.rms)
    order = np.flatnonzero(bad)[: most // 2].tolist()
    order = sorted({*order, *range(max(len(history.steps) - (most - len(order)), 0), len(history.steps))})
    rows = [[int(history.steps[i]), *(float(history.values[name][i]) for name in names)] for i in order]
    styles = ["error" if bad[i] else "" for i in order]
    left = len(history.steps) - len(order)
    title = TITLES.get(history.site.kind, history.site.kind) + (f", the last steps ({left} others left out)" if left else "")
    return Table((Column("step"), *(Column(name) for name in names)), rows, title=title, styles=styles)


def _flat(histories: Sequence[History]) -> Table:
    rows = [
        [history.site.kind, int(step), *(float(history.values[name][i]) for name in STATS)]
        for history in histories
        for i, step in enumerate(history.steps)
    ]
    return Table((Column("kind"), Column("step"), *(Column(name) for name in STATS)), rows)


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
    bad = np.flatnonzero(~np.isfinite(history.rms))
    return int(history.steps[bad[0] if len(bad) else np.nanargmax(history.peaks)])
