"""The rules of the monitor: each is one generator in `rules/` that takes a step and the run so far, and yields what it saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.finding import Finding, Severity
from ..core.registry import Entry, Registry
from ..core.step import StepRecord
from ..diagnose.first_nonfinite import modules_between
from ..diagnose.history import RunHistory
from ..diagnose.knowledge import remedy_of


@dataclass(frozen=True)
class Observation:
    """What a rule saw. Severity and hint are the rule's own unless given."""

    message: str
    site: str = ""
    severity: Severity | None = None
    value: float | None = None
    limit: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""


_rules = Registry("nanny.monitor.rules")


def rule(code: str, severity: Severity, cause: str = "") -> Any:
    """`cause`: the one that the finding proves by itself; what to change stands on its page."""
    return _rules.enter(code, severity=severity, fix=remedy_of(cause))


def all_rules() -> dict[str, Entry]:
    """Every rule by code."""
    return _rules.entries()


def judge_step(step: StepRecord, run: RunHistory, rules: Mapping[str, Entry]) -> list[Finding]:
    """All findings of one step, the worst first. The history is updated afterwards, so rules compare with what was before."""
    if step.autopsy is not None:
        step = replace(step, between=modules_between(run.last_trace, step.autopsy.after))
    found = [
        Finding(
            code=one.code,
            severity=seen.severity or one.severity,
            message=seen.message,
            hint=seen.hint or one.hint,
            site=seen.site,
            step=step.step,
            value=seen.value,
            limit=seen.limit,
            evidence=seen.evidence,
        )
        for one in rules.values()
        for seen in one.function(step, run)
    ]
    run.add(step)
    return sorted(found, key=lambda f: -f.severity)
