"""The verdict on a run: the one answer that summary, diagnosis, live log, page and agent give, and every exit code follows.

A cause that fits is the verdict; the first error or warning stands under it. Findings without a cause are told as such, never as
health. `verdict_of` is asked while a run goes on, at its end, and of its record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.finding import Finding, Severity, serious_ones
from ..core.numbers import amount
from .choose import diagnoses_of
from .evidence import Evidence
from .records import Diagnosis
from .registry import LIKELY

LOCATED_WITHIN = 10  # steps: tracing is dense after an error
_LOCATED = ("NAN", "INF", "OVERFLOW", "INPUT_NONFINITE")
UNPROVED = "no cause is proved by what was seen"


@dataclass(frozen=True)
class Verdict:
    healthy: bool | None  # None: too little to tell
    word: str  # HEALTHY, NOT HEALTHY, SUSPECT, CRASHED, INTERRUPTED or NO VERDICT
    reason: str
    diagnosis: Diagnosis | None = None
    first: Finding | None = None  # error, or warning where there is none
    rank: int | None = None  # the one process in which it began, if it began in one

    @property
    def text(self) -> str:
        return f"{self.word}: {self.reason}"

    @property
    def severity(self) -> Severity | None:
        """As bad as a finding of this severity: what lists and exit codes go by."""
        return None if self.healthy is not False else Severity.WARNING if self.word == "SUSPECT" else Severity.ERROR

    @property
    def unproved(self) -> bool:
        """Something is wrong, and nothing says why."""
        return self.healthy is False and self.diagnosis is None


NO_VERDICT = Verdict(None, "NO VERDICT", "the nanny itself failed and left the run; nothing was wrong until then")


def verdict_of(
    evidence: Evidence,
    *,
    steps: tuple[int, int] | None,
    status: str = "finished",
    failure: str = "",
    damaged: bool = False,
    findings: Sequence[Finding] | None = None,
    rank: int | None = None,
) -> Verdict:
    """`steps`: first and last that are known; `findings`: those of all processes, if there are more than this one's; `rank`: the
    one process in which it began, if it began in one."""
    found = evidence.findings if findings is None else findings
    first = first_culprit(found)
    diagnosis = next(iter(diagnoses_of(evidence)), None)
    wrong = first is not None and first.severity is Severity.ERROR
    if diagnosis is not None:
        certain = not diagnosis.early and (wrong or diagnosis.confidence >= LIKELY)
        return Verdict(False, "NOT HEALTHY" if certain else "SUSPECT", cause_in_words(diagnosis, rank), diagnosis, first, rank)
    if first is not None and is_from_others(first):
        return Verdict(False, "NOT HEALTHY", f"bad gradients came from another rank at step {first.step}", None, first)
    if first is not None:
        return Verdict(False, "NOT HEALTHY" if wrong else "SUSPECT", f"{serious_ones(found)}; {UNPROVED}", None, first)
    broken = first_broken_step(evidence.scalars.get("loss"))
    if broken is not None:
        return Verdict(False, "NOT HEALTHY", f"the loss is not finite from step {broken} on; {UNPROVED}")
    if steps is None:
        if status == "running":
            return Verdict(None, "NO VERDICT", "nothing is recorded yet")
        return Verdict(None, "NO VERDICT", "the run ended without a training step that could be seen")
    if failure:
        return NO_VERDICT
    if damaged:
        return Verdict(None, "NO VERDICT", "the record is damaged: what was wrong may be in what is lost")
    notes = sum(f.severity is Severity.INFO for f in found)
    seen = amount(steps[1] - steps[0] + 1, "step") + (f" ({amount(notes, 'note')})" if notes else "")
    if status == "crashed":
        return Verdict(None, "CRASHED", f"the script ended with an exception; no number was wrong in {seen}")
    if status == "interrupted":
        return Verdict(None, "INTERRUPTED", f"the run was stopped from outside; no numerical trouble in {seen}")
    return Verdict(True, "HEALTHY", f"no numerical trouble in {seen}")


def cause_in_words(one: Diagnosis, rank: int | None = None) -> str:
    """`attention_logit_overflow_fp16 in blocks.1.attn at step 49 on rank 1 (train.py:31), 95 % sure`."""
    place = (f" in {one.culprit}" if one.culprit else "") + ("" if one.step is None else f" at step {one.step}")
    place += "" if rank is None else f" on rank {rank}"
    line = f" ({one.where})" if one.where else ""
    return f"{one.cause}{place}{line}, {certainty(one)}"


def certainty(one: Diagnosis) -> str:
    sure = f"{100 * one.confidence:.0f} % sure"
    if one.early:
        due = f", expected to fail around step {one.expected_step}" if one.expected_step is not None else ""
        return f"an early warning: nothing is lost yet{due}"
    return sure if one.confidence >= LIKELY else f"suspected, {sure}"


def finding_of(verdict: Verdict) -> Finding | None:
    """The diagnosis as a finding among the others, for lists and exit codes; its code is the cause."""
    one, severity = verdict.diagnosis, verdict.severity
    if one is None or severity is None:
        return None
    file, _, line = one.where.rpartition(":")
    known = line.isdecimal()
    message = f"the cause, {certainty(one)}" + (f": {one.evidence[0]}" if one.evidence else "")
    return Finding(
        one.cause,
        severity,
        message,
        one.remedy,
        site=one.culprit,
        step=one.step,
        file=file if known else "",
        line=int(line) if known else None,
    )


def first_culprit(findings: Sequence[Finding]) -> Finding | None:
    """The finding to read first: the earliest error, or the earliest warning if there is none.

    A bad loss whose producer was named a few steps later is told by that later finding. What came from another process is second
    to what that one has on record.
    """
    own = min((f.step or 0 for f in findings if not is_from_others(f) and f.severity is Severity.ERROR), default=math.inf)
    findings = [f for f in findings if not is_from_others(f) or (f.step or 0) < own]
    worst = max((f.severity for f in findings), default=Severity.INFO)
    if worst < Severity.WARNING:
        return None
    serious = sorted((f for f in findings if f.severity == worst), key=lambda f: f.step if f.step is not None else 0)
    first = serious[0]
    if first.code in ("NAN", "INF") and first.site == "loss":
        return next((f for f in serious if f.code in _LOCATED and f.site != "loss" and _soon_after(f, first)), first)
    return first


def is_from_others(finding: Finding) -> bool:
    """Another process of the same job had it first."""
    return bool(finding.evidence.get("from_others"))


def _soon_after(finding: Finding, first: Finding) -> bool:
    return finding.step is not None and first.step is not None and 0 <= finding.step - first.step <= LOCATED_WITHIN


def first_broken_step(curve: tuple[np.ndarray, np.ndarray] | None) -> int | None:
    """The first step at which a curve is not finite."""
    if curve is None or np.isfinite(curve[1]).all():
        return None
    return int(curve[0][np.argmin(np.isfinite(curve[1]))])
