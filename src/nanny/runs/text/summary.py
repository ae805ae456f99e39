"""How a run looks at a glance: the verdict, the curves, the table of codes, and what to type next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.command_line import examine_command
from ...core.cost import cost_text
from ...core.finding import Finding, Severity, severity_counts
from ...core.formats import FP32, format_of
from ...core.numbers import amount, duration, median, power_of_two, share, short, size
from ...core.plain_json import finding_object
from ...core.step import Setup
from ...diagnose.trials import trial_in_words
from ...diagnose.verdict import Verdict, finding_of
from ...show.findings import STYLES
from ...show.spark import sparkline
from ...show.tables import Answer, Column, Line, Table
from ...show.translation import with_label
from ...store import reader
from ..source import own_format, seconds_of, title_of
from ..summary import CodeCount, Curves, RankState, Summary, curve_stats
from .alerts import finding_lines

CODES_SHOWN = 12
CURVE_WIDTH = 66  # with its name in front, less than 80


def summary_answer(summary: Summary, language: str = "en") -> Answer:
    lead = summary.lead
    lines = [*verdict_lines(summary.verdict, language), *ahead_lines(summary, language), *_warned_before(summary.warned_before)]
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
    """The verdict; the cause with its proof and remedy; and the first error, or warning, that was seen."""
    style = {True: "good", False: "error", None: "warning"}[verdict.healthy]
    lines = [Line(f"{verdict.text}.", style, 4)]
    cause, first = None if verdict.diagnosis is None else verdict.diagnosis.in_language(language), verdict.first
    if cause is not None:
        lines += [Line(""), *(Line(f"    {fact}", indent=4) for fact in cause.evidence[:2])]
        lines += [Line(f"    how: {' -> '.join(cause.chain)}", indent=9)] if cause.chain else []
        lines += [Line(f"    fix: {cause.remedy}", indent=9)] if cause.remedy else []
        lines += [Line(f"    {trial_in_words(trial, language)}", indent=9) for trial in cause.tried]
    if first is not None:
        lines += [Line(""), Line(f"  first {first.severity.name.lower()}:"), *finding_lines(first, hint=cause is None)]
    return lines


def ahead_lines(summary: Summary, language: str, *, only_if_near: bool = False) -> list[Line]:
    """Of a healthy run, what its picture says under it: the clearance, and the steps that are left if it shrinks steadily;
    `only_if_near`: nothing if it does not."""
    if summary.verdict.healthy is not True or summary.lead.steps is None:
        return []
    from ..card import outlook_texts  # who is ill does not wait for the samples
    from ..wall import clearance_of

    wall = clearance_of(summary)
    if only_if_near and (wall.forecast is None or wall.forecast <= summary.lead.steps[1]):
        return []
    return [Line(f"    {with_label(heading, text, language)}", indent=4) for heading, text in outlook_texts(wall)[language]]


def next_commands(summary: Summary, *, on_page: bool = False) -> list[str]:
    """What to type next; on the page itself, not how to get it."""
    lead, culprit = summary.lead, finding_of(summary.verdict) or summary.culprit  # the cause's own place, if there is one
    source = lead.source
    if summary.verdict.healthy is not False:
        if lead.steps is None:
            return [source.command("tail") if source.run.status == "running" else "nanny run --help"]
        if own_format(source) == FP32:
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
    if any(site.name == culprit.site for kind in kinds for site in there.sites(kind)):
        out.append(there.command("layer", culprit.site))
    if culprit.step is not None:
        out.append(there.command("stats", "--step", culprit.step))
    return out


def setup_text(setup: Setup) -> str:
    """`trains 6.9M of 7M parameters in 74 of 77 tensors, train mode, bf16 in 31 of 38 modules`."""
    part = f"{size(setup.trained_elements)} of {size(setup.elements)} parameters in {setup.trained} of {setup.tensors} tensors"
    whole = f"all {size(setup.elements)} parameters in {amount(setup.tensors, 'tensor')}"
    seen = f"trains {whole if setup.trained == setup.tensors else part}"
    told = [seen if setup.trained else f"{size(setup.elements)} parameters, of which none was seen to train"]
    if setup.training is not None:
        told.append("train mode" if setup.training else "evaluation mode")
    if setup.modules and setup.low_modules:
        told.append(f"{format_of(setup.low).name} in {setup.low_modules} of {amount(setup.modules, 'module')}")
    elif setup.modules:
        meant = f", though {format_of(setup.meant).name} was meant" if setup.meant else ""
        told.append(f"full precision in all of {amount(setup.modules, 'module')}{meant}")
    return ", ".join(told)


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
        took = f", {duration(seconds)}" if (seconds := seconds_of(run)) is not None else ""
        lines.append(_fact("steps", f"{state.steps[0]} to {state.steps[1]}, {_traced_steps(state)}{took}"))
    if state.setup is not None:
        lines.append(_fact("setup", setup_text(state.setup)))
    for name, title, log in (("loss", "loss", False), ("grad_norm", "gradient", True)):
        if name in curves:
            lines += [_fact(title, _curve_text(*curves[name])), _curve_line(curves[name][1], log)]
    if "clip" in curves:
        steps, norms = curves["clip"]
        text = f"to {short(float(norms[-1]))} at {amount(len(steps), 'step')}; the norms above are from before"
        lines.append(_fact("clipped", text))
    lines += _scale_lines(curves)
    if cost := cost_text(run.meta):
        lines.append(_fact("cost", cost))
    if "step_ms" in curves:
        lines.append(_fact("step time", f"{short(median(curves['step_ms'][1]))} ms (median)"))
    if state.dumps:
        more = f" and {len(state.dumps) - 1} more" if len(state.dumps) > 1 else ""
        lines.append(_fact("dumps", f"nanny replay {state.dumps[0].path}{more}"))
    if run.dropped:
        text = f"{amount(run.dropped, 'sample')} did not fit and were dropped: curves have gaps, findings have none"
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
        text += f", not finite at {amount(int((~finite).sum()), 'step')} from {steps[int(np.argmin(finite))]} on"
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
        out += [_fact("skipped", f"{amount(len(skipped), 'step')}{last_one}")]
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
        alike = f"{amount(summary.apart.parameters, 'parameter')} alike on all ranks, bit by bit"
        lines.append(_fact("", f"{alike}, last compared at step {summary.apart.last_step}"))
    return lines


def _code_table(codes: Sequence[CodeCount]) -> Table:
    columns = (Column("severity", says=True), Column("code"), Column("times"), Column("first_step", "first step"),
               Column("layers"), Column("first_layer", "first layer", elastic=True))  # fmt: skip
    styles = [STYLES[Severity[row.severity]] for row in codes]
    return Table(columns, [list(vars(row).values()) for row in codes], most=CODES_SHOWN, rest="codes", styles=styles)


def _summary_data(summary: Summary) -> dict[str, Any]:
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
