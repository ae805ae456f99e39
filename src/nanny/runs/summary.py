"""The verdict on a run: healthy or not, the first culprit, then the numbers and what to type next."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.finding import Finding, Severity
from ..core.numbers import counted, duration, power_of_two, share, short
from ..core.plain_json import finding_object
from ..monitor.culprit import first_culprit
from ..show.findings import STYLES
from ..show.spark import sparkline
from ..show.tables import Answer, Column, Line, Table
from ..store import reader
from .alerts import finding_lines, findings_of, in_order, repeats, severity_counts
from .source import Source, open_job, title_of

CODES_SHOWN = 12
CURVE_WIDTH = 72
Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]
_SCALARS = ("loss", "grad_norm", "scale", "skipped", "traced", "step_ms", "clip")


@dataclass(frozen=True)
class RankState:
    """What one process of the job recorded."""

    source: Source
    findings: list[Finding]
    curves: Curves
    steps: tuple[int, int] | None
    dumps: list[reader.DumpRow]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # --db, --run and --format are enough


def answer(args: argparse.Namespace) -> Answer:
    with open_job(args.db, args.run) as (sources, notes):
        states = [_read(source) for source in sources]
        culprit = first_culprit(in_order([f for state in states for f in state.findings]))
        following = _next(states, culprit)
    lead = states[0]
    healthy, verdict = judge(states, culprit)
    lines = [Line(verdict, {True: "good", False: "error", None: "warning"}[healthy])]
    if culprit is not None:
        lines += [Line(""), *finding_lines(culprit), *_before(lead.findings, culprit)]
    lines += [Line(""), Line(title_of(lead.source), indent=4), *overview(lead), *_rank_lines(states, culprit)]
    lines += [Line(note, "warning") for note in notes]
    codes = by_code([f for state in states for f in state.findings])
    return Answer(
        lines=lines,
        tables=[codes],
        flat=_flat(lead, healthy, culprit),
        data=_data(states, healthy, verdict, culprit, codes, notes),
        next=following,
    )


def judge(states: Sequence[RankState], culprit: Finding | None) -> tuple[bool | None, str]:
    """Healthy, not healthy, or (None) too little to tell, with the sentence that says so."""
    counts = severity_counts([f for state in states for f in state.findings])
    steps = states[0].steps
    if culprit is not None:
        found = " and ".join(counted(counts[name], name) for name in ("error", "warning") if counts[name])
        if culprit.severity == Severity.ERROR:
            return False, f"NOT HEALTHY: {found}. The first culprit:"
        return False, f"SUSPECT: {found}, no error. The first:"
    if steps is None:
        if states[0].source.run.status == "running":
            return None, "NO VERDICT: nothing is recorded yet."
        return None, "NO VERDICT: the run ended without a training step that could be seen."
    if states[0].source.run.meta.get("failure"):
        return None, "NO VERDICT: the nanny itself failed and left the run; nothing was wrong until then."
    broken = _first_nonfinite(states[0].curves.get("loss"))
    if broken is not None:
        return False, f"NOT HEALTHY: the loss is not finite from step {broken} on, though no rule has named a culprit."
    notes = f" ({counted(counts['info'], 'note')})" if counts["info"] else ""
    seen = f"{counted(steps[1] - steps[0] + 1, 'step')}{notes}"
    if states[0].source.run.status == "crashed":
        return None, f"CRASHED: the script ended with an exception; no number was wrong in {seen}."
    return True, f"HEALTHY: nothing wrong in {seen}."


def overview(state: RankState) -> list[Line]:
    """Length, loss, gradients, scale, cost and gaps of a run, one line each."""
    run, curves = state.source.run, state.curves
    lines = []
    if run.status not in ("running", "finished"):
        exception = run.meta.get("exception")
        how = {"interrupted": "killed, or the machine went down"}.get(run.status, run.status)
        lines.append(Line(_fact("ended", f"{how}: {exception}" if exception else how).text, "warning", 12))
    if run.meta.get("failure"):
        lines.append(Line(_fact("failure", f"of the nanny, not of the run: {run.meta['failure']}").text, "warning", 12))
    if state.steps is not None:
        took = f", {duration(run.finished - run.started)}" if run.finished is not None else ""
        lines.append(_fact("steps", f"{state.steps[0]} to {state.steps[1]}, {_traced(state)}{took}"))
    for name, title, log in (("loss", "loss", False), ("grad_norm", "gradient", True)):
        if name in curves:
            lines += [_fact(title, _curve_text(*curves[name])), _curve_line(curves[name][1], log)]
    if "clip" in curves:
        steps, norms = curves["clip"]
        lines.append(
            _fact("clipped", f"to {short(float(norms[-1]))} at {counted(len(steps), 'step')}; the norms above are from before")
        )
    lines += _scale_lines(curves)
    cost = run.meta.get("cost_percent")
    if isinstance(cost, (int, float)):
        percent = short(round(cost, 2 if cost < 100 else 0))
        lines.append(_fact("cost", f"{percent} % of the training time went into watching"))
    if "step_ms" in curves:
        lines.append(_fact("step time", f"{short(float(np.median(curves['step_ms'][1])))} ms (median)"))
    if state.dumps:
        more = f" and {len(state.dumps) - 1} more" if len(state.dumps) > 1 else ""
        lines.append(_fact("dumps", f"{state.dumps[0].path}{more}"))
    if run.dropped:
        text = f"{counted(run.dropped, 'sample')} did not fit and were dropped: curves have gaps, findings have none"
        lines.append(Line(_fact("gaps", text).text, "warning", 12))
    return lines


def by_code(findings: Sequence[Finding]) -> Table:
    """One row per code, worst and earliest first."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.code, []).append(finding)
    rows = []
    for code, members in groups.items():
        worst = max(f.severity for f in members)
        steps = [f.step for f in members if f.step is not None]
        places = list(dict.fromkeys(f.site for f in members if f.site))
        first = min(members, key=lambda f: -1 if f.step is None else f.step)
        row = [worst.name, code, sum(map(repeats, members)), min(steps, default=None), len(places), first.site]
        rows.append((-worst, -1 if row[3] is None else row[3], row, STYLES[worst]))
    rows.sort(key=lambda item: item[:2])
    columns = (Column("severity"), Column("code"), Column("times"), Column("first_step", "first step"), Column("layers"),
               Column("first_layer", "first layer", elastic=True))  # fmt: skip
    styles = [style for *_, style in rows]
    return Table(columns, [row for *_, row, _ in rows], most=CODES_SHOWN, rest="codes", styles=styles)


def _read(source: Source) -> RankState:
    db, run = source.db, source.run.id
    curves = reader.scalars(db, run, _SCALARS)
    return RankState(source, findings_of(source), curves, reader.steps(db, run), reader.dumps(db, run))


def _fact(name: str, text: str) -> Line:
    return Line(f"  {name:<10}{text}", indent=12)


def _first_nonfinite(curve: tuple[np.ndarray, np.ndarray] | None) -> int | None:
    if curve is None or np.isfinite(curve[1]).all():
        return None
    return int(curve[0][np.argmin(np.isfinite(curve[1]))])


def _curve_line(values: np.ndarray, log: bool) -> Line:
    return _fact("", sparkline(values.tolist(), CURVE_WIDTH, log=log))


def _curve_text(steps: np.ndarray, values: np.ndarray) -> str:
    finite = np.isfinite(values)
    text = f"{short(float(values[0]))} -> {short(float(values[-1]))}"
    if finite.any():
        low = int(np.nanargmin(np.where(finite, values, np.inf)))
        high = int(np.nanargmax(np.where(finite, values, -np.inf)))
        text += f", from {short(float(values[low]))} (step {steps[low]}) to {short(float(values[high]))} (step {steps[high]})"
    if not finite.all():
        text += f", not finite at {counted(int((~finite).sum()), 'step')} from {steps[int(np.argmin(finite))]} on"
    return text


def _scale_lines(curves: Curves) -> list[Line]:
    out = []
    if "scale" in curves:
        values = curves["scale"][1]
        first, last = float(values[0]), float(values[-1])
        out.append(_fact("scale", power_of_two(first) if first == last else f"{power_of_two(first)} -> {power_of_two(last)}"))
        out += [] if (values == first).all() else [_curve_line(values, log=True)]
    if "skipped" in curves:
        steps, values = curves["skipped"]
        skipped = steps[values > 0]
        last_one = f" ({share(len(skipped) / len(steps))}), the last at {skipped[-1]}" if len(skipped) else ""
        out += [_fact("skipped", f"{counted(len(skipped), 'step')}{last_one}")]
    return out


def _traced(state: RankState) -> str:
    count = state.source.run.meta.get("traced_steps")
    if not isinstance(count, int) and "traced" in state.curves:
        count = int((state.curves["traced"][1] > 0).sum())
    return "gradients only" if not count else f"{count} of them traced in full"


def _before(findings: Sequence[Finding], culprit: Finding) -> list[Line]:
    """Warnings that came before the first error may be its cause."""
    if culprit.severity != Severity.ERROR or culprit.step is None:
        return []
    earlier = [f for f in findings if f.severity == Severity.WARNING and f.step is not None and f.step < culprit.step]
    if not earlier:
        return []
    first = earlier[0]
    more = f" and {len(earlier) - 1} more" if len(earlier) > 1 else ""
    where = f" in {first.site}" if first.site else ""
    return [Line(f"    warned before: {first.code} at step {first.step}{where}{more}", "warning", 4)]


def _rank_lines(states: Sequence[RankState], culprit: Finding | None) -> list[Line]:
    world = states[0].source.run.world_size
    if world == 1:
        return []
    sick = [state for state in states if first_culprit(state.findings) is not None]
    lines = [_fact("ranks", f"{len(states)} of {world} on record, {len(sick)} with warnings or errors")]
    if culprit is not None and culprit.rank is not None and len(states) > 1:
        lines.append(_fact("", f"rank {culprit.rank} was the first"))
    return lines


def _data(
    states: Sequence[RankState], healthy: bool | None, verdict: str, culprit: Finding | None, codes: Table, notes: list[str]
) -> dict[str, Any]:
    state = states[0]
    run = state.source.run
    names = [column.name for column in codes.columns]
    return {
        "healthy": healthy,
        "verdict": verdict.rstrip(":"),
        "culprit": None if culprit is None else finding_object(culprit),
        "counts": severity_counts([f for s in states for f in s.findings]),
        "codes": [dict(zip(names, row)) for row in codes.rows],
        "run": {"file": str(state.source.path), **vars(run)},
        "steps": None if state.steps is None else {"first": state.steps[0], "last": state.steps[1]},
        "curves": {name: _curve_data(*curve) for name, curve in state.curves.items()},
        "ranks_on_record": len(states),
        "notes": notes,
    }


def _curve_data(steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    return {
        "first": float(values[0]),
        "last": float(values[-1]),
        "min": float(finite.min()) if len(finite) else math.nan,
        "max": float(finite.max()) if len(finite) else math.nan,
        "median": float(np.median(finite)) if len(finite) else math.nan,
        "sum": float(finite.sum()),
        "nonfinite": len(values) - len(finite),
        "count": len(values),
        "last_step": int(steps[-1]),
    }


def _flat(state: RankState, healthy: bool | None, culprit: Finding | None) -> Table:
    counts = severity_counts(state.findings)
    loss = state.curves.get("loss")
    skipped = state.curves.get("skipped")
    values = {
        "run": state.source.run.id,
        "status": state.source.run.status,
        "healthy": healthy,
        "errors": counts["error"],
        "warnings": counts["warning"],
        "first_step": state.steps[0] if state.steps else None,
        "last_step": state.steps[1] if state.steps else None,
        "culprit_code": culprit.code if culprit else None,
        "culprit_step": culprit.step if culprit else None,
        "culprit_site": culprit.site if culprit else None,
        "last_loss": float(loss[1][-1]) if loss else None,
        "skipped": int((skipped[1] > 0).sum()) if skipped else None,
        "dropped": state.source.run.dropped,
    }
    return Table(tuple(Column(name) for name in values), [list(values.values())])


def _next(states: Sequence[RankState], culprit: Finding | None) -> list[str]:
    source = states[0].source
    if culprit is None:
        wide = source.run.amp_dtype in ("", "float32")
        imagine = source.command("whatif", "--dtype", "bf16") if wide else source.command("report")
        if states[0].steps is None:
            return [source.command("tail") if source.run.status == "running" else "nanny run --help"]
        return [imagine]
    of_rank = [state.source for state in states if state.source.run.rank == culprit.rank]
    there = of_rank[0] if of_rank else source
    out = [there.command("diagnose"), source.command("alerts"), f"nanny rule {culprit.code}"]
    kinds = reader.kinds(there.db, there.run.id)
    if any(site.name == culprit.site for kind in kinds for site in reader.sites(there.db, there.run.id, kind)):
        out.append(there.command("layer", culprit.site))
    if culprit.step is not None:
        out.append(there.command("stats", "--step", culprit.step))
    return out
