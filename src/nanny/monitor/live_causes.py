"""Causes while a run goes on: of an error as soon as it is known, of a silent fault once two examined steps point to it, of a
trend while there is time to act; and at the end of the run, what became of what was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.finding import Finding, Severity
from ..core.step import StepRecord
from ..diagnose.records import Diagnosis
from ..diagnose.registry import LIKELY
from ..diagnose.text import diagnosis_lines
from ..diagnose.verdict import Verdict, finding_of
from .live_log import LiveLog
from .registry import is_of_loop

MOST_TRIES = 20  # to explain an error, and as many to explain what goes wrong without one, which may come much later
FORETELL_EVERY = 20  # steps, at traced ones: asking takes a few milliseconds


class LiveCauses:
    """`verdict` is that on the run as it is now; `call_back` takes what is told without being one of the findings."""

    def __init__(
        self, log: LiveLog | None, rank: int | None, verdict: Callable[[], Verdict], call_back: Callable[[Finding], None]
    ) -> None:
        self._log, self._verdict, self._call_back = log, verdict, call_back
        self._whose = "" if rank is None else f"rank {rank}: "
        self._told: Diagnosis | None = None
        self._suspected: tuple[str, str] | None = None  # cause and culprit of the last examined step, if it had any
        self._foretold: set[str] = set()  # causes
        self._tries = self._silent_tries = 0
        self._asked = 0  # steps that had been when a trend was looked for

    def show_findings(self, found: Sequence[Finding], has_error: bool) -> bool:
        """What was found, then why, if that was asked: then what to change is said by the cause alone. Was it asked?"""
        if self._log is None:
            return False
        asks = has_error and self._told is None and self._tries < MOST_TRIES
        cause = self._cause_of_error() if asks else None
        alone = self._told is None and cause is None
        for finding in found:
            self._log.show(finding, hint=alone or is_of_loop(finding.code))
        if cause is not None:
            self._told = cause
            self._show(cause)
        return asks

    def look_again(self, step: StepRecord, steps: int, has_hazards: bool, findings: Sequence[Finding]) -> None:
        """Behind a step without an error to explain. `steps`: that have been; `findings`: of the run."""
        is_silent = has_hazards and not any(f.severity is Severity.ERROR for f in findings)
        if is_silent and self._told is None and self._silent_tries < MOST_TRIES:
            self._explain_if_seen_again()
        if self._told is None and (step.examined or (step.traced and steps - self._asked >= FORETELL_EVERY)):
            self._asked = steps
            self._foretell()

    def show_what_became(self, verdict: Verdict) -> None:
        """At the end: the cause, unless it has been told already, and what is another one than was told."""
        best, told = verdict.diagnosis, self._told
        if self._log is None or (best is None and (told is None or told.early)):
            return
        if best is not None and (told is None or (best.cause, best.culprit) != (told.cause, told.culprit)):
            if told is not None and best.cause == told.cause:
                self._log.say(f"nanny: {told.cause} was told of {told.culprit}; what came later shows it in {best.culprit}:")
            elif told is not None:
                self._log.say(f"nanny: {told.cause} was told at step {told.step}; what came later points elsewhere:")
            self._show(best)
        elif best is not None and told is not None and best.step != told.step:
            self._log.say(f"nanny: {told.cause} was told at step {told.step}; step {best.step} shows it best")
        elif best is None and told is not None:
            self._log.say(f"nanny: {told.cause} was told at step {told.step}; what came later does not prove it")

    def _cause_of_error(self) -> Diagnosis | None:
        """By an examined step, or by how the loop is written."""
        self._tries += 1
        best = self._verdict().diagnosis
        return best if best is not None and not best.early and (best.where or not best.is_bare_operation) else None

    def _explain_if_seen_again(self) -> None:
        self._silent_tries += 1
        verdict = self._verdict()
        best, warning = verdict.diagnosis, finding_of(verdict)
        before, self._suspected = self._suspected, None
        if best is None or warning is None or best.early or best.confidence < LIKELY:
            return
        self._suspected = (best.cause, best.culprit)
        if self._suspected == before:
            self._told = best
            self._show(best)
            self._call_back(warning)

    def _foretell(self) -> None:
        """A trend that leads to the end of the format, once."""
        verdict = self._verdict()
        one, warning = verdict.diagnosis, finding_of(verdict)
        if one is None or warning is None or not one.early or one.cause in self._foretold:
            return
        self._foretold.add(one.cause)
        self._show(one)
        self._call_back(warning)

    def _show(self, one: Diagnosis) -> None:
        if self._log is not None:
            self._log.say(f"nanny: {self._whose}" + "\nnanny: ".join(diagnosis_lines(one, self._log.lang)))
