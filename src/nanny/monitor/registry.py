"""The rules of the monitor: each is one generator that takes a step and the run so far, and yields what it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.finding import Finding, Severity
from ..core.registry import import_all, paragraph
from ..core.step import StepRecord
from .culprit import modules_between
from .history import RunHistory


@dataclass(frozen=True)
class Seen:
    """What a rule saw. Severity and hint are the rule's own unless given."""

    message: str
    site: str = ""
    severity: Severity | None = None
    value: float | None = None
    limit: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""


@dataclass(frozen=True)
class Rule:
    code: str
    severity: Severity
    function: Callable[[StepRecord, RunHistory], Iterator[Seen]]

    @property
    def doc(self) -> str:
        return self.function.__doc__ or ""

    @property
    def hint(self) -> str:
        """The `Fix:` paragraph of the docstring, on one line."""
        return paragraph(self.doc, "Fix")


_RULES: dict[str, Rule] = {}


def rule(code: str, severity: Severity) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _RULES[code] = Rule(code, severity, function)
        return function

    return register


def all_rules() -> dict[str, Rule]:
    """Every rule in `judge/rules`, by code."""
    from . import rules

    import_all(rules)
    return _RULES


def judge_step(step: StepRecord, run: RunHistory, rules: Mapping[str, Rule]) -> list[Finding]:
    """All findings of one step, the worst first. The history is updated afterwards, so rules compare with what was before."""
    if step.autopsy is not None:
        step = replace(step, between=modules_between(run.last_trace, step.autopsy.after))
    found = []
    for one in rules.values():
        for seen in one.function(step, run):
            found.append(
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
            )
    run.add(step)
    return sorted(found, key=lambda f: -f.severity)
