"""A DiffReport as evidence: one examined step, without a run around it. What `auto_diff` found becomes hazards and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..core.examination import Examination, FirstBad, GradientError, Hazard, Place
from ..core.finding import Finding, Severity
from ..core.formats import format_of
from ..core.ops import DIFFERENCES, SPREADS
from ..core.step import StepRecord
from ..diagnose.choose import with_cause
from ..diagnose.evidence import Evidence, RunFacts
from .records import LOSS, DiffReport


def diff_evidence(report: DiffReport) -> Evidence:
    names = {g.name: math.prod(g.shape) for g in report.gradients}
    dtype = format_of(report.target).torch_name
    exam = Examination(
        step=0,
        amp_dtype=dtype,
        loss=report.loss,
        loss_reference=report.reference_loss,
        gradient_error=report.total.rel_l2 if report.total is not None else None,
        gradients=tuple(_gradients(report)),
        first_bad=_first_bad(report),
        hazards=tuple(_hazards(report, dtype)),
    )
    bad = tuple(g.name for g in exam.gradients if g.nonfinite)
    broken = bad or (report.loss is not None and not math.isfinite(report.loss))
    incident = StepRecord(0, loss=report.loss, bad_grads=bad)
    facts = RunFacts(
        steps=1, latest=StepRecord(0, amp_dtype=dtype), parameters=tuple(names), sizes=names,
        bad_steps=int(bool(broken)), incidents=(incident,) if broken else (),
    )  # fmt: skip
    return Evidence(facts, findings=report.findings, examinations=(exam,))


def _first_bad(report: DiffReport) -> FirstBad | None:
    if not report.faults:
        return None
    fault = report.faults[0]
    inputs = {"absmax": max(fault.input_absmax, default=0.0), "absmin": min(fault.input_absmin, default=0.0)}
    return FirstBad(fault.op, _place(fault.site, fault.backward), 0, fault.nan, inputs, fault.reference_absmax)


def _place(site: str, backward: bool = False) -> Place:
    phase = "backward" if backward else "loop" if site == LOSS else "forward"
    return Place("" if site == LOSS else site, phase=phase)


def _gradients(report: DiffReport) -> Iterator[GradientError]:
    for one in report.gradients:
        error = one.error
        lost = 1.0 if error.all_zero else 0.0
        yield GradientError(
            one.name, error.norm, error.reference_norm, error.rel_l2, one.energy, lost, 0.0,
            nonfinite=bool(error.nan or error.inf), reference_nonfinite=bool(error.reference_nan or error.reference_inf),
        )  # fmt: skip


def _hazards(report: DiffReport, dtype: str) -> Iterator[Hazard]:
    mixed = {mix.site for mix in report.mixes}
    for order, finding in enumerate(report.findings):
        if finding.severity < Severity.WARNING:
            continue
        op = str(finding.evidence.get("op") or "")
        seen = with_cause(
            Hazard(
                finding.code.lower(), op, _place(finding.site), order, dtype, value=finding.value, limit=finding.limit,
                message=finding.message, consequence=_consequence(report, finding),
                traits=("difference",) if op in DIFFERENCES | SPREADS and finding.site not in mixed else (),
            )
        )  # fmt: skip
        if seen.cause:
            yield seen


def _consequence(report: DiffReport, finding: Finding) -> float:
    seen = report.total.rel_l2 if report.total is not None and math.isfinite(report.total.rel_l2) else 0.0
    return max(seen, min(finding.value or 0.0, 1.0))
