"""The rules of the monitor: each is one generator in `rules/` that takes a step and the run so far, and yields what it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.finding import Finding, Severity
from ..core.registry import Entry, Registry
from ..core.step import QuietSteps, StepRecord
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
    where: str = ""  # file:line of the program


_rules = Registry("nanny.monitor.rules")


_once: set[str] = set()
_needs: dict[str, frozenset[str]] = {}
_all_needs: set[str] = set()
_wakes: dict[str, Callable[[QuietSteps, RunHistory], Any]] = {}


def rule(
    code: str,
    severity: Severity,
    cause: str = "",
    once: bool = False,
    needs: str = "",
    wakes: Callable[[QuietSteps, RunHistory], Any] | None = None,
) -> Any:
    """`cause`: the one that the finding proves by itself; what to change stands on its page. `once`: told once in a run.

    `needs`: what a step must have told, one of these, for the rule to have anything to say; it is not asked about others.
    `wakes`: of one that needs nothing: may it have something to say, or to remember, about one of these quiet steps? It is asked
    once for all of them; a rule without it is asked about each.
    """
    if once:
        _once.add(code)
    _needs[code] = frozenset(needs.split())
    _all_needs.update(_needs[code])
    if wakes is not None:
        _wakes[code] = wakes
    return _rules.enter(code, severity=severity, fix=remedy_of(cause))


def is_of_loop(code: str) -> bool:
    """Told once: no look at operations would tell more."""
    return code in _once


def all_rules() -> dict[str, Entry]:
    """Every rule by code."""
    return _rules.entries()


def judge_step(step: StepRecord, run: RunHistory, rules: Mapping[str, Entry]) -> list[Finding]:
    """All findings of one step, the worst first. The history is updated afterwards, so rules compare with what was before."""
    if step.autopsy is not None:
        step = replace(step, between=modules_between(run.last_trace, step.autopsy.after))
    told = {name for name in _all_needs if getattr(step, name)}
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
            file=seen.where.rpartition(":")[0],
            line=int(seen.where.rpartition(":")[2]) if seen.where else None,
        )
        for code, one in rules.items()
        if not (_needs[code] and _needs[code].isdisjoint(told)) and code not in run.told
        for seen in one.function(step, run)
    ]
    run.told |= _once & {f.code for f in found}
    run.add(step)
    return sorted(found, key=lambda f: -f.severity)


def judge_quiet(quiet: QuietSteps, run: RunHistory, rules: Mapping[str, Entry]) -> dict[str, Any] | None:
    """Takes steps about which no rule has anything to say into the history, and gives what they add to the curves. None: a rule
    may have, and nothing was done; `judge_step` is to be asked about each."""
    asked = (code for code in rules if not _needs[code] and code not in run.told)
    if any(getattr(quiet.last, name) for name in _all_needs) or not run.are_steady(quiet):
        return None
    if any(code not in _wakes or _wakes[code](quiet, run) for code in asked):
        return None
    return run.add_quiet(quiet)
