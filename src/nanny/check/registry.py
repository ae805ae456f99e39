"""The list of checker rules: `@rule(CODE, severity)` enters a function, `all_rules()` gives the list by code.

A rule is a generator over one of three things: an `Event` (`on="event"`, with the operations it wants to see), a `Trace`
(`on="trace"`, the events of one entry point in program order) or a `Report` of a whole file (`on="file"`).
It yields `Hit`s. Its docstring is its page: what it finds, then the sections Why, Example, Use instead, When not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

from ..core.finding import Link, Severity
from ..core.registry import import_all

if TYPE_CHECKING:
    from ..core.limits import Limits


@dataclass(frozen=True)
class Hit:
    """One offence at one place; becomes a `Finding` with the rule's code and, unless given here, its severity."""

    node: ast.AST
    message: str
    hint: str
    severity: Severity | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    chain: tuple[Link, ...] = ()  # an ERROR needs one: where it begins, each step, the use
    unknown: str = ""  # the link that is not known: then this is at most a WARNING, of most rules a remark, and says "possible"
    is_proven: bool = False  # what comes of it follows from the chain alone: a WARNING whatever its rule has earned
    mistake: Hashable = None  # hits that share one are one mistake, told once


@dataclass(frozen=True)
class CheckRule:
    code: str
    severity: Severity
    function: Callable[..., Iterable[Hit]]
    doc: str
    on: str = "event"
    ops: tuple[str, ...] = ()


_RULES: dict[str, list[CheckRule]] = {}


def rule(code: str, severity: Severity, *ops: str, on: str = "event") -> Callable[[Any], Any]:
    """Enters the decorated generator as (a part of) rule `code`; `ops` are the operations an event rule is called for."""

    def enter(function: Callable[..., Iterable[Hit]]) -> Callable[..., Iterable[Hit]]:
        _RULES.setdefault(code, []).append(CheckRule(code, severity, function, cleandoc(function.__doc__ or ""), on, ops))
        return function

    return enter


@cache
def limits() -> Limits:
    """Those in force. Read by the first rule that compares a number: a tenth of the start-up, and most files have none."""
    from ..core.limits import Limits

    return Limits()


@cache
def _load() -> None:
    import_all("nanny.check.rules")


def all_rules() -> dict[str, CheckRule]:
    """Every rule by code; where a code has several functions, the one that carries its page."""
    _load()
    return {code: next((r for r in parts if r.doc), parts[0]) for code, parts in sorted(_RULES.items())}


@cache
def rules_on(kind: str) -> tuple[CheckRule, ...]:
    _load()
    return tuple(r for parts in _RULES.values() for r in parts if r.on == kind)


@cache
def event_rules() -> dict[str, tuple[CheckRule, ...]]:
    """Operation -> the rules that want to see it."""
    table: dict[str, list[CheckRule]] = {}
    for entry in rules_on("event"):
        for op in entry.ops:
            table.setdefault(op, []).append(entry)
    return {op: tuple(entries) for op, entries in table.items()}
