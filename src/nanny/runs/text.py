"""How the answers about a run look: each record as lines and tables for people, and as plain data for JSON and csv.

`summary_answer`, `alerts_answer` ... give what `show.tables.render_answer` turns into any format. The sentences that a page or an
agent needs as well (`what_if_verdict`, `comparison_verdict` ...) stand beside them, so that each is written once.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.command_line import examine_command
from ..core.finding import Finding, Severity
from ..core.formats import BF16, FP16, FP32, Format, format_of
from ..core.numbers import counted, duration, factor, listed, power_of_two, share, short, shortened
from ..core.plain_json import finding_object
from ..core.step import Setup, Site
from ..diagnose.describe import trial_in_words
from ..diagnose.verdict import Verdict, severity_counts
from ..show.findings import STYLES
from ..show.spark import sparkline
from ..show.tables import Answer, Column, Line, Table
from ..store import reader
from ..store.damage import words_of
from ..store.files import DEFAULT_FOLDER, store_name
from ..store.packing import BITS
from .alerts import Alerts, repeats
from .source import title_of

if TYPE_CHECKING:
    from .compare import ComparedSeries, RunComparison
    from .layer import KindHistory, LayerHistory
    from .runs import ListedRun, RunList, VerifiedRun
    from .stats import SiteStats, StepStats
    from .summary import CodeCount, Curves, RankState, Summary
    from .what_if import Outcome, WhatIf

CODES_SHOWN = 12
ALERTS_SHOWN = 50
STATS_SHOWN = 12
STEPS_SHOWN = 12
FINDINGS_SHOWN = 5
RUNS_SHOWN = 40
COMPARED_SHOWN = 15
OUTCOMES_SHOWN = 15
OUTCOMES_SHOWN_IF_ALL_FIT = 5
CURVE_WIDTH = 66  # with its name in front, less than 80
MOST_NAME = 80  # characters of a layer's name in a sentence
MARGIN_BITS = 3  # below the largest scale that fits, so that the first larger batch does not overflow
TITLES = {
    "output": "outputs of modules",
    "output_grad": "gradients of outputs",
    "grad": "gradients of parameters (unscaled)",
    "weight": "parameters",
    "update": "updates",
    "buffer": "buffers",
}
NOT_SHOWN = ("count", "nan", "posinf", "neginf", *BITS)  # statistics that a table leaves to its notes


def finding_lines(finding: Finding, hint: bool = True) -> list[Line]:
    """A finding as a block of text: what, where and when; the message; what to do; who only passed it on."""
    rank = f" on rank {finding.rank}" if finding.rank is not None else ""
    step = "" if finding.step is None else f" at step {finding.step}{_times(finding)}"
    place = f" in {finding.site}" if finding.site else ""
    lines = [Line(f"{finding.severity.name} {finding.code}{step}{rank}{place}", STYLES[finding.severity], 4)]
    lines.append(Line(f"    {finding.message}", indent=4))
    if hint and finding.hint:
        lines.append(Line(f"    fix: {finding.hint}", indent=9))
    passed_on = [str(site) for site in finding.evidence.get("passed_on", ())]
    if passed_on:
        lines.append(Line(f"    passed on by {counted(len(passed_on), 'layer')}: {listed(passed_on)}", "quiet", 4))
    return lines


def _times(finding: Finding) -> str:
    last = finding.evidence.get("last_step")
    times = repeats(finding)
    if times <= 1:
        return ""
    return f" ({times} times" + (f", last at step {last})" if last is not None else ")")


def _record_columns(record: type) -> tuple[Column, ...]:
    return tuple(Column(field.name) for field in fields(record))


def _row(record: object) -> list[Any]:
    return list(vars(record).values())


# summary


def summary_answer(summary: Summary, language: str = "en") -> Answer:
    lead = summary.lead
    lines = [*verdict_lines(summary.verdict, language), *_warned_before(summary.warned_before)]
    lines += [Line(""), Line(title_of(lead.source), indent=4), *_overview(lead), *_rank_lines(summary)]
    lines += [Line(note, "warning") for note in summary.notes]
    return Answer(
        lines=lines,
        tables=[_code_table(summary.codes)],
        flat=_summary_row(summary),
        data=_summary_data(summary),
        next=next_commands(summary),
    )


def verdict_lines(verdict: Verdict, language: str = "en") -> list[Line]:
    """The verdict; the cause with its proof and remedy; and what was noticed first."""
    style = {True: "good", False: "error", None: "warning"}[verdict.healthy]
    lines = [Line(f"{verdict.text}.", style, 4)]
    cause, first = verdict.diagnosis, verdict.first
    if cause is not None:
        lines += [Line(""), *(Line(f"    {fact}", indent=4) for fact in cause.evidence[:2])]
        lines += [Line(f"    how: {' -> '.join(cause.chain)}", indent=9)] if cause.chain else []
        lines += [Line(f"    fix: {cause.remedy}", indent=9)] if cause.remedy else []
        lines += [Line(f"    {trial_in_words(trial, language)}", indent=9) for trial in cause.tried]
    if first is not None:
        lines += [Line(""), Line("  noticed first:"), *finding_lines(first, hint=cause is None)]
    return lines


def next_commands(summary: Summary, *, on_page: bool = False) -> list[str]:
    """What to type next; on the page itself, not how to get it."""
    lead, culprit = summary.lead, summary.culprit
    source = lead.source
    if summary.verdict.healthy is not False:
        if lead.steps is None:
            return [source.command("tail") if source.run.status == "running" else "nanny run --help"]
        if source.run.amp_dtype in ("", "float32"):
            return [source.command("whatif", "--dtype", "bf16")]
        return [] if on_page else [source.command("report")]
    there = summary.culprit_rank.source
    cause = summary.diagnosis
    out = [there.command("diagnose"), source.command("alerts")]
    if cause is not None:
        out.append(f"nanny rule {cause.cause}")
    else:
        out.append(examine_command(source.run.argv, None if culprit is None else culprit.step))
    if culprit is None:
        return out
    kinds = reader.kinds(there.db, there.run.id)
    if any(site.name == culprit.site for kind in kinds for site in reader.sites(there.db, there.run.id, kind)):
        out.append(there.command("layer", culprit.site))
    if culprit.step is not None:
        out.append(there.command("stats", "--step", culprit.step))
    return out


def setup_text(setup: Setup) -> str:
    """`trains 6.9M of 7M parameters in 74 of 77 tensors, train mode, bf16 in 31 of 38 modules`."""
    part = f"{size(setup.trained_elements)} of {size(setup.elements)} parameters in {setup.trained} of {setup.tensors} tensors"
    whole = f"all {size(setup.elements)} parameters in {counted(setup.tensors, 'tensor')}"
    seen = f"trains {whole if setup.trained == setup.tensors else part}"
    told = [seen if setup.trained else f"{size(setup.elements)} parameters, of which none was seen to train"]
    if setup.training is not None:
        told.append("train mode" if setup.training else "evaluation mode")
    if setup.modules and setup.low_modules:
        told.append(f"{format_of(setup.low).name} in {setup.low_modules} of {counted(setup.modules, 'module')}")
    elif setup.modules:
        meant = f", though {format_of(setup.meant).name} was meant" if setup.meant else ""
        told.append(f"full precision in all of {counted(setup.modules, 'module')}{meant}")
    return ", ".join(told)


def size(elements: int) -> str:
    """`512`, `6.9M`."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if elements >= unit:
            return f"{elements / unit:.3g}{letter}"
    return str(elements)


def _overview(state: RankState) -> list[Line]:
    """Length, loss, gradients, scale, cost and gaps of a run, one line each."""
    run, curves = state.source.run, state.curves
    lines = []
    if run.status not in ("running", "finished"):
        exception = run.meta.get("exception")
        killed = run.status == "interrupted" and run.finished is None
        how = "killed, or the machine went down" if killed else run.status
        lines.append(_fact("ended", f"{how}: {exception}" if exception else how, "warning"))
    if run.meta.get("failure"):
        lines.append(_fact("failure", f"of the nanny, not of the run: {run.meta['failure']}", "warning"))
    if state.steps is not None:
        took = f", {duration(run.finished - run.started)}" if run.finished is not None else ""
        lines.append(_fact("steps", f"{state.steps[0]} to {state.steps[1]}, {_traced_steps(state)}{took}"))
    if state.setup is not None:
        lines.append(_fact("setup", setup_text(state.setup)))
    for name, title, log in (("loss", "loss", False), ("grad_norm", "gradient", True)):
        if name in curves:
            lines += [_fact(title, _curve_text(*curves[name])), _curve_line(curves[name][1], log)]
    if "clip" in curves:
        steps, norms = curves["clip"]
        text = f"to {short(float(norms[-1]))} at {counted(len(steps), 'step')}; the norms above are from before"
        lines.append(_fact("clipped", text))
    lines += _scale_lines(curves)
    cost = run.meta.get("cost_percent")
    if isinstance(cost, (int, float)):
        percent = short(round(cost, 2 if cost < 100 else 0))
        lines.append(_fact("cost", f"{percent} % of the training time went into watching"))
    if "step_ms" in curves:
        lines.append(_fact("step time", f"{short(float(np.median(curves['step_ms'][1])))} ms (median)"))
    if state.dumps:
        more = f" and {len(state.dumps) - 1} more" if len(state.dumps) > 1 else ""
        lines.append(_fact("dumps", f"nanny replay {state.dumps[0].path}{more}"))
    if run.dropped:
        text = f"{counted(run.dropped, 'sample')} did not fit and were dropped: curves have gaps, findings have none"
        lines.append(_fact("gaps", text, "warning"))
    return lines


def _fact(name: str, text: str, style: str = "") -> Line:
    return Line(f"  {name:<10}{text}", style, 12)


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


def _traced_steps(state: RankState) -> str:
    count = state.source.run.meta.get("traced_steps")
    if not isinstance(count, int) and "traced" in state.curves:
        count = int((state.curves["traced"][1] > 0).sum())
    return "gradients only" if not count else f"{count} of them traced in full"


def _warned_before(earlier: Sequence[Finding]) -> list[Line]:
    if not earlier:
        return []
    first = earlier[0]
    more = f" and {len(earlier) - 1} more" if len(earlier) > 1 else ""
    where = f" in {first.site}" if first.site else ""
    return [Line(f"    warned before: {first.code} at step {first.step}{where}{more}", "warning", 4)]


def _rank_lines(summary: Summary) -> list[Line]:
    world, culprit = summary.lead.source.run.world_size, summary.culprit
    if world == 1:
        return []
    lines = [_fact("ranks", f"{summary.on_record:,} of {world:,} on record, {summary.sick:,} with warnings or errors")]
    if culprit is not None and culprit.rank is not None and summary.on_record > 1:
        lines.append(_fact("", f"rank {culprit.rank} was the first"))
    if summary.apart.last_step is not None and not summary.apart.findings:
        alike = f"{counted(summary.apart.parameters, 'parameter')} alike on all ranks, bit by bit"
        lines.append(_fact("", f"{alike}, last compared at step {summary.apart.last_step}"))
    return lines


def _code_table(codes: Sequence[CodeCount]) -> Table:
    columns = (Column("severity"), Column("code"), Column("times"), Column("first_step", "first step"), Column("layers"),
               Column("first_layer", "first layer", elastic=True))  # fmt: skip
    styles = [STYLES[Severity[row.severity]] for row in codes]
    return Table(columns, [_row(row) for row in codes], most=CODES_SHOWN, rest="codes", styles=styles)


def _summary_data(summary: Summary) -> dict[str, Any]:
    from .summary import curve_stats

    lead = summary.lead
    return {
        "healthy": summary.verdict.healthy,
        "verdict": summary.verdict.text,
        "diagnosis": None if summary.diagnosis is None else summary.diagnosis.to_json(),
        "culprit": None if summary.culprit is None else finding_object(summary.culprit),
        "counts": summary.counts,
        "setup": None if lead.setup is None else vars(lead.setup),
        "codes": [vars(row) for row in summary.codes],
        "run": {"file": lead.source.shown, **vars(lead.source.run)},
        "steps": None if lead.steps is None else {"first": lead.steps[0], "last": lead.steps[1]},
        "curves": {name: vars(curve_stats(*curve)) for name, curve in lead.curves.items()},
        "ranks_on_record": summary.on_record,
        "notes": summary.notes,
    }


def _summary_row(summary: Summary) -> Table:
    state, culprit = summary.lead, summary.culprit
    counts = severity_counts(state.findings)
    loss = state.curves.get("loss")
    skipped = state.curves.get("skipped")
    values = {
        "run": state.source.run.id,
        "status": state.source.run.status,
        "healthy": summary.verdict.healthy,
        "errors": counts["error"],
        "warnings": counts["warning"],
        "cause": summary.diagnosis.cause if summary.diagnosis else None,
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


# alerts

_ALERT_COLUMNS = (
    Column("step"),
    Column("severity"),
    Column("code"),
    Column("site", elastic=True),
    Column("message", elastic=True),
    Column("hint", elastic=True),
    Column("rank"),
    Column("value"),
    Column("limit"),
    Column("times"),
)


def alerts_answer(alerts: Alerts, limit: int | None, *, in_blocks: bool, fail_on: Severity | None = None) -> Answer:
    """In blocks for a terminal, which also shows only so many unless told; else as a table."""
    found = alerts.found
    shown = found[: limit or (ALERTS_SHOWN if in_blocks else None)]
    counts = "no finding matches; without filters there are some" if alerts.all_filtered else _severities(found)
    lines = [Line(title_of(alerts.source), indent=4), *(Line(note, "warning", 4) for note in alerts.notes), Line(counts)]
    lines += _blocks(shown) if in_blocks else []
    if len(shown) < len(found):
        lines += [Line(""), Line(f"… and {len(found) - len(shown)} more findings; --limit {len(found)} shows all")]
    table = Table(_ALERT_COLUMNS, [_alert_row(finding) for finding in shown], rest="findings")
    return Answer(
        lines=lines,
        tables=[] if in_blocks else [table],
        data={"findings": [finding_object(finding) for finding in shown], "total": len(found)},
        flat=table,
        next=_after_alerts(alerts),
        exit_code=int(fail_on is not None and any(finding.severity >= fail_on for finding in found)),
    )


def _blocks(findings: Sequence[Finding]) -> list[Line]:
    """Each finding as a block; what to do about a code is said once."""
    lines: list[Line] = []
    seen: set[str] = set()
    for finding in findings:
        lines += [Line(""), *finding_lines(finding, hint=finding.code not in seen)]
        seen.add(finding.code)
    return lines


def _severities(found: Sequence[Finding]) -> str:
    counts = severity_counts(found)
    return ", ".join(counted(counts[name], noun) for name, noun in (("error", "error"), ("warning", "warning"), ("info", "note")))


def _alert_row(finding: Finding) -> list[object]:
    return [
        finding.step, finding.severity.name, finding.code, finding.site, finding.message, finding.hint,
        finding.rank, finding.value, finding.limit, repeats(finding),
    ]  # fmt: skip


def _after_alerts(alerts: Alerts) -> list[str]:
    if not alerts.found:
        return [alerts.source.command("summary")]
    worst = max(alerts.found, key=lambda finding: finding.severity)  # the first of the worst
    out = [f"nanny rule {worst.code}"]
    if worst.step is not None:
        out.append(alerts.source.command("stats", "--step", worst.step))
    return out


# stats


def stats_answer(stats: StepStats, limit: int | None) -> Answer:
    from .stats import near_text

    lines = [Line(f"step {stats.step} of {title_of(stats.source)}", indent=4)]
    if stats.missing:
        near = near_text(stats.sampled_near)
        lines.append(Line(f"not sampled at this step: {', '.join(stats.missing)}{near}", "warning", 4))
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
    shown: list[str] = [name for name in ("min", "max", "norm", "mean") if name in names]
    shown += [name for name in names if name not in (*shown, *NOT_SHOWN)]
    same = {row.site.dtype for row in rows}
    columns = [Column("layer", elastic=True), *([Column("dtype")] if len(same) > 1 else [])]
    columns += [*(Column(name) for name in shown), Column("note")]
    cells = []
    for row in rows:
        lead = [row.site.name, *([row.site.dtype] if len(same) > 1 else [])]
        cells.append([*lead, *(row.values.get(name) for name in shown), row.note])
    styles = [{0.0: "error", 1.0: "warning", 2.0: "warning"}.get(row.rank[0], "") for row in rows]
    dtype = f", {same.pop()}" if len(same) == 1 and "" not in same else ""
    noun = "layer" if kind.startswith("output") else "tensor"
    title = f"{TITLES.get(kind, kind)}: {counted(len(rows), noun)}{dtype}, the most unusual first"
    return Table(tuple(columns), cells, title=title, most=most, rest=_stats_left_out(rows[most:]), styles=styles)


def _stats_left_out(rows: Sequence[SiteStats]) -> str:
    noted = [row.site.name for row in rows if row.note]
    if noted:
        return f"layers, {len(noted)} of them with a note ({listed(noted, 2)})"
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
    from .stats import stored_format

    form = stored_format(row.site) or FP32
    room = math.log2(form.max / row.absmax) if 0 < row.absmax < math.inf else None
    place = {"layer": row.site.name, "dtype": row.site.dtype, "shape": list(row.site.shape)}
    return {**place, **row.values, "headroom_bits": room, "note": row.note}


# layer


def layer_answer(layer: LayerHistory, limit: int | None) -> Answer:
    source = layer.source
    lines = [Line(f"{layer.name} in {title_of(source)}", "strong", 4)]
    if not layer.kinds:
        lines.append(Line("an operation or another place that is not measured", indent=4))
    if layer.parameters:
        lines.append(Line(f"its parameters: {listed(layer.parameters, 4)}", indent=4))
    for finding in layer.findings[:FINDINGS_SHOWN]:
        lines += [Line(""), *finding_lines(finding)]
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
    facts = [site.dtype, " x ".join(map(str, site.shape)), counted(len(history.steps), "step")]
    lines = [Line(""), Line(f"{TITLES.get(site.kind, site.kind)} ({', '.join(fact for fact in facts if fact)})", "strong")]
    for title, values in history.curves.items():
        finite = values[np.isfinite(values)]
        bad = len(values) - len(finite)
        span = f"{short(float(finite.min()))} to {short(float(finite.max()))}" if len(finite) else "never finite"
        text = f"  {title:<8} {span}" + (f", not finite at {counted(bad, 'step')}" if bad else "")
        if title == "largest" and (room := _headroom(site, history.steps, values)):
            text += f", {room}"
        lines += [Line(text, "error" if bad else "", 11), Line(f"           {sparkline(values.tolist(), CURVE_WIDTH, log=True)}")]
    return lines


def _headroom(site: Site, steps: np.ndarray, peaks: np.ndarray) -> str:
    """How close the largest value came to the end of a 16-bit format."""
    from .stats import stored_format

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


# runs

_SHORT_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_RUN_COLUMNS = (
    Column("file", elastic=True),
    Column("run"),
    Column("rank"),
    Column("started", show=lambda seconds: time.strftime("%m-%d %H:%M", time.localtime(seconds))),
    Column("seconds", "took", lambda seconds: "-" if seconds is None else duration(seconds)),
    Column("status"),
    Column("amp_dtype", "dtype", lambda name: _SHORT_FORMATS.get(name, name)),
    Column("last_step", "at step"),
    Column("errors"),
    Column("warnings"),
    Column("argv", "command", elastic=True),
)


def runs_answer(found: RunList, db: str | None) -> Answer:
    newest = found.runs[-RUNS_SHOWN:]
    lines = [Line(f"{counted(len(found.runs), 'run')} in {counted(found.files, 'file')}")]
    lines += [Line(note, "warning") for note in found.notes]
    if len(newest) < len(found.runs):
        lines.append(Line(f"the newest {RUNS_SHOWN}; {len(found.runs) - RUNS_SHOWN} older ones are in csv and json"))
    return Answer(
        lines=lines,
        tables=[_run_table(newest, many_files=found.files > 1)],
        flat=Table(_RUN_COLUMNS, [_row(run) for run in found.runs]),
        data={"runs": [vars(run) for run in found.runs], "notes": found.notes},
        next=_after_runs(found.runs, db),
    )


def verified_answer(found: Sequence[VerifiedRun]) -> Answer:
    damaged = [run for run in found if run.problem or run.lost]
    count = sum(run.run > 0 for run in found)
    whole = f"{counted(count, 'run')}: " + ("all whole" if not damaged else "not all whole")
    columns = (Column("file", elastic=True), Column("run"), Column("state"))
    rows = [(run.file, run.run or "-", _state(run)) for run in found]
    return Answer(
        lines=[Line(whole, "error" if damaged else "good")],
        tables=[Table(columns, rows, styles=["error" if run in damaged else "" for run in found])],
        data={"runs": [{**vars(run), "lost": {part: list(rows) for part, rows in run.lost.items()}} for run in found]},
        exit_code=int(bool(damaged)),
    )


def _state(run: VerifiedRun) -> str:
    lost = ", ".join(f"{lost} of {written} {words_of([part])}" for part, (lost, written) in run.lost.items())
    return run.problem or (f"{lost} lost or changed" if lost else "whole")


def _run_table(runs: Sequence[ListedRun], many_files: bool) -> Table:
    """Without the columns that would say the same in every row."""
    dull = {"rank"} if not any(run.rank for run in runs) else set()
    dull |= set() if many_files else {"file"}
    columns = tuple(column for column in _RUN_COLUMNS if column.name not in dull)
    cells = [{**vars(run), "file": _store_folder(Path(run.file))} for run in runs]
    styles = ["error" if run.errors else "warning" if run.warnings else "" for run in runs]
    return Table(columns, [[cell[column.name] for column in columns] for cell in cells], styles=styles)


def _store_folder(path: Path) -> str:
    """What to type after --db: the folder, where the file and its own folder have their usual names."""
    folder = path.parent if path.name == store_name(0) else path
    return str(folder.parent if folder.name == DEFAULT_FOLDER and folder.parent.name else folder)


def _after_runs(runs: Sequence[ListedRun], db: str | None) -> list[str]:
    flags = f" --db {shlex.quote(db)}" if db else ""
    out = [f"nanny summary{flags}"]
    if len(runs) > 1 and runs[-1].file == runs[-2].file:
        out.append(f"nanny compare {runs[-2].run} {runs[-1].run}{flags}")
    return out


# compare


def comparison_answer(result: RunComparison, limit: int | None, db: str | None) -> Answer:
    first = result.first
    layer = first.name if first is not None and first.kind != "curve" else ""
    places = [source.command("layer", layer) for source in (result.reference, result.other)] if layer else []
    return Answer(
        lines=comparison_lines(result),
        tables=[_curve_table(result), _compared_table(result, limit or COMPARED_SHOWN)],
        flat=_compared_rows(result),
        data=_comparison_data(result),
        next=list(dict.fromkeys(places)) or [f"nanny runs{f' --db {shlex.quote(db)}' if db else ''}"],
    )


def comparison_lines(result: RunComparison) -> list[Line]:
    """The verdict, the two runs, and what to know about them."""
    titles = [Line(f"A: {title_of(result.reference)}", indent=4), Line(f"B: {title_of(result.other)}", indent=4)]
    notes = [Line(note, "warning", 4) for note in result.notes]
    return [comparison_verdict(result), *_also_apart(result), Line(""), *titles, *notes]


def comparison_verdict(result: RunComparison) -> Line:
    """The first place where they part."""
    if result.first is None:
        text = f"The runs do NOT PART in {counted(result.steps, 'common step')}: all gaps stay within noise and rounding."
        return Line(text, "good", 4)
    first = result.first
    word, style = ("PART FIRST at", "error") if result.for_good else ("PART FOR A WHILE, AND END TOGETHER, from", "warning")
    return Line(f"The runs {word} step {first.step}: {_series_name(first)} {_gap(first)}", style, 4)


def _also_apart(result: RunComparison) -> list[Line]:
    lines = []
    for curve in result.curves:
        if curve.step is not None and curve is not result.first:
            lines.append(Line(f"  - from step {curve.step} on {_series_name(curve)} {_gap(curve)}", indent=4))
    apart = [series for series in result.layers if series.step is not None]
    if apart:
        text = f"  - {len(apart)} of {len(result.layers)} layer statistics part, first {_series_name(apart[0])}"
        lines.append(Line(text, indent=4))
    return lines


def _series_name(series: ComparedSeries) -> str:
    names = {"loss": "the loss", "grad_norm": "the gradient norm"}
    if series.kind == "curve":
        return names.get(series.name, series.name)
    words = {"output": "the output of", "output_grad": "the gradient at the output of", "grad": "the gradient of"}
    return f"{words.get(series.kind, series.kind)} {series.name}"


def _gap(series: ComparedSeries) -> str:
    if series.broke:
        seen = f" ({short(series.b)})" if series.kind == "curve" else ""
        return f"is not finite in B{seen}, in A it is {short(series.a)}"
    numbers = f"A {short(series.a)}, B {short(series.b)}"
    back = "" if series.still_apart else f", but they come back together by step {series.last_step}"
    return f"is {factor(series.ratio)} in B ({numbers}){back}"


def _curve_table(result: RunComparison) -> Table:
    columns = (Column("curve"), Column("parts", "parts at step"), Column("a", "A there"), Column("b", "B there"),
               Column("last_a", "A at the end"), Column("last_b", "B at the end"), Column("floor", "noise floor"))  # fmt: skip
    rows = [[c.name, c.step, c.a, c.b, c.last_a, c.last_b, c.floor] for c in result.curves]
    return Table(columns, rows, styles=["error" if c.step is not None else "" for c in result.curves])


def _compared_table(result: RunComparison, most: int) -> Table:
    columns = (
        Column("layer", elastic=True), Column("kind"), Column("parts", "parts at"), Column("a", "rms in A"),
        Column("b", "rms in B"), Column("ratio", "B / A"), Column("last_ratio", "at the end"),
    )  # fmt: skip
    rows = [[s.name, s.kind, s.step, s.a, s.b, s.ratio, s.last_ratio] for s in result.layers]
    styles = ["" if s.step is None else "error" if s.broke else "warning" for s in result.layers]
    apart = sum(s.step is not None for s in result.layers[most:])
    rest = f"statistics, {apart} of which part" if apart else "statistics, none of which part"
    return Table(columns, rows, title="layers, the first to part first", most=most, rest=rest, styles=styles)


def _compared_rows(result: RunComparison) -> Table:
    series = (*result.curves, *result.layers)
    return Table(_record_columns(type(series[0])), [_row(one) for one in series])


def _comparison_data(result: RunComparison) -> dict[str, Any]:
    return {
        "parts": result.first is not None,
        "first": None if result.first is None else vars(result.first),
        "for_good": result.for_good,
        "steps": result.steps,
        "same_start": result.same_start,
        "curves": [vars(curve) for curve in result.curves],
        "layers": [vars(layer) for layer in result.layers],
        "notes": list(result.notes),
    }


# whatif

_NOUNS = {"output": "output", "weight": "weight", "output_grad": "gradient of an output", "grad": "gradient of a weight"}
_PLURALS = {"output_grad": "gradients of outputs", "grad": "gradients of weights"}


def what_if_answer(result: WhatIf, limit: int | None) -> Answer:
    headline, reasons = what_if_headline(result), what_if_reasons(result)
    good = False if result.died else result.survives
    opens = "" if headline.endswith(".") else ":"
    lines = [Line(f"{headline}{opens}", {True: "good", None: "warning", False: "error"}[good], 4)]
    lines += [Line(f"  - {reason}", indent=4) for reason in reasons]
    remarks = what_if_remarks(result)
    lines += [Line(""), Line(title_of(result.source), indent=4), *(Line(remark, indent=4) for remark in remarks)]
    return Answer(
        lines=lines,
        tables=[_outcome_table(result, limit)],
        flat=_outcome_rows(result.outcomes),
        data={
            "from": _recorded_format(result),
            "verdict": headline,
            "reasons": reasons,
            "remarks": remarks,
            **_what_if_data(result),
        },
        next=_after_what_if(result),
    )


def what_if_headline(result: WhatIf) -> str:
    """What became of the run as it was, if it died, and what would have become of it."""
    died = how_it_died(result)
    if died and result.own_format:
        return f"{died[:-1]}, and could not, because" if result.reasons else died
    return f"{died} Of what came before: {what_if_verdict(result)}" if died else what_if_verdict(result)


def how_it_died(result: WhatIf) -> str:
    """What to know before any verdict on another format, or nothing."""
    was = _recorded_format(result)
    if result.sick is not None:
        return f"This {was} run went wrong at step {result.sick.step} as it would in any format: {result.sick.cause}."
    if result.broken_from is None:
        return ""
    return f"This {was} run did NOT SURVIVE as it was: its loss is not finite from step {result.broken_from} on."


def what_if_verdict(result: WhatIf) -> str:
    run = f"This {_recorded_format(result)} run"
    name = _upper(result.target)
    if result.died and result.own_format:
        return f"{run} did NOT SURVIVE in {name}."
    if result.unknown:
        return f"{run} stayed within {name} until then; whether it would have gone on is not known."
    if result.survives is False:
        return f"{run} WOULD NOT SURVIVE in {name}, because"
    if result.survives is None:
        return f"{run} WOULD SURVIVE in {name} WITH LOSSES"
    if result.own_scale or result.target == BF16:
        return f"{run} WOULD SURVIVE in {name} as far as range goes: nothing on record leaves it."
    if result.starts_too_low:
        return f"{run} WOULD SURVIVE in {name} if its loss scale starts high enough, see below."
    return f"{run} WOULD SURVIVE in {name}: everything on record fits, gradients with the right loss scale."


def what_if_reasons(result: WhatIf) -> list[str]:
    out = [_reason(group, result) for group in result.reasons]
    if result.too_many_skips and result.path is not None:
        what = "this loss scale" if result.path.fixed else "any loss scale"
        out.insert(0, f"gradients overflow under {what}: {share(result.path.skip_rate)} of the steps would be skipped")
    return out


def what_if_remarks(result: WhatIf, *, curves: bool = True) -> list[str]:
    """What else to know; `curves` draws the loss scale over time as text."""
    return [*_scale_remarks(result, curves), *_format_remarks(result)]


def _reason(group: Sequence[Outcome], result: WhatIf) -> str:
    from .what_if import BACKWARD

    worst, many = group[0], len(group) > 1
    what = counted(len(group), _NOUNS[worst.kind], _PLURALS.get(worst.kind, ""))
    site = shortened(worst.site, MOST_NAME)
    others = f"; also {listed([shortened(outcome.site, MOST_NAME) for outcome in group[1:]], 2)}" if many else ""
    reach = f"{site} reaches {short(worst.peak)} at step {worst.peak_step}"
    end = f"{_upper(result.target)} {'ends' if result.target.has_inf else 'saturates'} at {short(result.target.max)}"
    if worst.why == "overflows":
        first = f" (too large from step {worst.first_overflow} on)" if worst.first_overflow != worst.peak_step else ""
        return f"{what} would overflow: {reach}{first}, {end}; no loss scale can help{others}"
    if worst.why == "close to overflow":
        return f"{what} would come within a factor of two of overflow: {reach}, {end}{others}"
    if worst.why == "loses digits":
        return f"{what} would keep fewer digits: {share(worst.subnormal_energy)} of {site} is subnormal (by energy){others}"
    fixed = result.path is not None and result.path.fixed
    scale = " at this loss scale" if fixed else " even at the best loss scale"
    when = scale if worst.kind in BACKWARD else "; no loss scale can help"
    verb = "become zero" if worst.why == "becomes zero" else "lose energy"
    when += ", but no longer at the end" if worst.flushed_energy_at_end < worst.flushed_energy / 2 else ""
    return f"{what} would {verb}: {site} loses {share(worst.flushed_energy)} of its energy to zero{when}{others}"


def _scale_remarks(result: WhatIf, curves: bool) -> list[str]:
    from .what_if import START_BITS

    path = result.path
    if path is None:
        return []
    skips = f"{share(path.skip_rate)} of the steps would be skipped"
    if path.fixed:
        return [f"loss scale 2**{path.best_bits} as given: {skips}"]
    low = "" if result.needed_bits is None else f", usable from 2**{result.needed_bits} on"
    out = [f"best loss scale: 2**{path.best_bits}{low}; {skips}"]
    if curves and len(set(path.limit_bits.tolist())) > 1:
        curve = sparkline(path.limit_bits.tolist(), 60)
        out += ["largest loss scale that fits, over time:", f"  {curve}"]
    if result.starts_too_low:
        start = max(path.best_bits - MARGIN_BITS, result.needed_bits or 0)
        out.append(
            f"GradScaler starts at 2**{START_BITS}, where gradients flush to zero here, and doubles only every 2000 steps: "
            f"use GradScaler(init_scale=2.0**{start})"
        )
    return out


def _format_remarks(result: WhatIf) -> list[str]:
    from .what_if import is_low

    target, out = result.target, []
    if target == BF16:
        out.append(
            "BF16 has the range of FP32, so checks for underflow are pointless and their zeros prove nothing; what BF16 lacks "
            "is digits (2 to 3), and histograms cannot show that"
        )
    if result.own_scale:
        out.append(
            f"each tensor has its own scale here, as FP8 recipes give it; {_upper(target)} keeps {target.significand} "
            "significant bits, and histograms cannot show whether that is enough"
        )
    if is_low(result.source):
        low = result.source.run.amp_dtype
        stay = f", {counted(result.spared, 'output')} that stayed in FP32 left out" if result.spared else ""
        out.append(f"the run was recorded under {low} autocast{stay}; what {low} had already lost is not on record")
    elif target == FP16:
        out.append("autocast keeps some outputs in FP32 (norms, softmax and losses on CUDA): such a culprit is spared there")
    if result.stride > 1:
        out.append(f"a long run: shares are of one in {result.stride} of its traced steps, magnitudes of all")
    half_step = target.unit_roundoff / 2
    if target.bits == 16 and result.update_ratio is not None and result.update_ratio < half_step:
        out.append(
            f"even the largest updates are only {short(result.update_ratio)} of their weights, less than half a rounding step "
            f"({short(half_step)}): with weights in {_upper(target)} and no FP32 copy of them, most would be rounded away"
        )
    return out


def _after_what_if(result: WhatIf) -> list[str]:
    command = result.source.command
    out = [command("layer", result.outcomes[0].site)]
    if result.fixed_scale is not None:
        out.append(command("whatif", "--dtype", result.target.name))
    elif result.target == FP16 and not result.survives:
        out.append(command("whatif", "--dtype", "bf16"))
    return out


def _recorded_format(result: WhatIf) -> str:
    return _upper(format_of(result.source.run.amp_dtype or "fp32"))


def _upper(target: Format) -> str:
    return target.name.upper().replace("_", " ")


def _outcome_table(result: WhatIf, limit: int | None) -> Table:
    from .what_if import FORWARD

    columns = (
        Column("layer", elastic=True), Column("kind"), Column("verdict"), Column("peak"), Column("flushed", show=share),
        Column("subnormal", show=share), Column("energy", "energy lost", show=share), Column("history", "over time"),
    )  # fmt: skip
    rows = []
    for one in result.outcomes:
        word = f"{one.why} {one.overflow_steps}/{len(one.steps)}" if one.why == "overflows" else one.why or "fits"
        curve = sparkline(one.history, 12, log=one.kind in FORWARD)
        rows.append([one.site, one.kind, word, one.peak, one.flushed, one.subnormal, one.flushed_energy, curve])
    styles = ["" if one.severity is None else STYLES[one.severity] for one in result.outcomes]
    most = limit or (OUTCOMES_SHOWN if result.reasons else OUTCOMES_SHOWN_IF_ALL_FIT)
    sick = sum(one.severity is not None for one in result.outcomes[most:])
    rest = f"tensors, {sick} of which do not fit" if sick else "tensors, all of which fit"
    return Table(columns, rows, most=most, rest=rest, styles=styles)


def _outcome_rows(outcomes: Sequence[Outcome]) -> Table:
    names = [name for name in vars(outcomes[0]) if name not in ("history", "steps")]
    rows = [[v.name if isinstance(v := getattr(one, name), Severity) else v for name in names] for one in outcomes]
    return Table(tuple(Column(name) for name in names), rows)


def _what_if_data(result: WhatIf) -> dict[str, Any]:
    path = result.path
    scales = path and {
        "best": 2.0**path.best_bits,
        "smallest_usable": None if result.needed_bits is None else 2.0**result.needed_bits,
        "skip_rate": path.skip_rate,
        "fixed": path.fixed,
        "steps": path.steps.tolist(),
        "limit_bits": path.limit_bits.tolist(),
        "bits": path.bits.tolist(),
    }
    return {
        "dtype": result.target.name,
        "survives": result.survives is not False,
        "with_losses": result.survives is None,
        "unknown": result.unknown,
        "loss_scale": scales,
        "layers": [vars(outcome) for outcome in result.outcomes],
    }


# tail


def step_text(row: dict[str, Any]) -> str:
    """The scalars of one step in a line."""
    parts = [f"step {row['step']:<8}"]
    for name, title in (("loss", "loss"), ("grad_norm", "grad"), ("lr", "lr"), ("step_ms", "ms")):
        if name in row:
            parts.append(f"{title} {short(row[name]):<10}")
    if "scale" in row:
        parts.append(f"scale {power_of_two(row['scale']):<7}")
    if row.get("skipped"):
        parts.append("SKIPPED")
    return " ".join(parts).rstrip()


def end_text(status: str) -> str:
    words = {"interrupted": "been killed", "finished": "finished", "crashed": "crashed", "failed": "failed"}
    return f"the run has {words.get(status, f'ended: {status}')}"
