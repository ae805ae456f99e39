"""`Finding`: something wrong, whoever saw it. `NannyError`: something the user can fix.

Every feature speaks in findings, so each output format and each exit code is written once.
"""

from __future__ import annotations

import enum
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .numbers import amount
from .terminal import tell


class NannyError(Exception):
    """Something the user can fix. The message says what was wrong, where, and what to type."""


class NannyWarning(UserWarning):
    """The nanny could not do its own work; training is not affected."""


def warn(message: str, stacklevel: int = 2) -> None:
    """A NannyWarning that never ends the program: where warnings are made errors, it is a line on stderr."""
    try:
        warnings.warn(message, NannyWarning, stacklevel=stacklevel + 1)
    except Exception:  # noqa: BLE001 - a filter that raises, or a showwarning of the user's that does
        tell(f"nanny: {message}")


class Severity(enum.IntEnum):
    INFO = 1
    WARNING = 2
    ERROR = 3

    @classmethod
    def parse(cls, text: str) -> Severity:
        try:
            return cls[text.strip().upper()]
        except KeyError:
            raise NannyError(f"unknown severity {text!r}; use one of: info, warning, error") from None


@dataclass(frozen=True)
class Link:
    """One place on the way to a mistake in source code: what happens there."""

    file: str
    line: int
    what: str
    cell: int | None = None  # notebook cell, 1-based

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, **({} if self.cell is None else {"cell": self.cell}), "line": self.line, "what": self.what}


@dataclass(frozen=True)
class Finding:
    """Something wrong: what, where, with which numbers, and what to do about it."""

    code: str
    severity: Severity
    message: str
    hint: str = ""
    site: str = ""  # module path, parameter, operation: a place that is measured
    step: int | None = None
    rank: int | None = None
    file: str = ""
    line: int | None = None
    column: int | None = None  # 1-based, like line
    end_line: int | None = None
    end_column: int | None = None
    cell: int | None = None  # notebook cell, 1-based
    value: float | None = None
    limit: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    chain: tuple[Link, ...] = ()  # in source code: where it begins, each step, the use

    @property
    def where(self) -> str:
        """The place in a word: `model.py:12` for code, the site's name for a running model."""
        if not self.file:
            return self.site
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def to_json(self) -> dict[str, Any]:
        """All fields that say something, with the severity by name; see `core.plain_json` for non-finite numbers."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "chain":
                out |= {"chain": [link.to_json() for link in value]} if value else {}
            elif value not in (None, "") and not (f.name == "evidence" and not value):
                out[f.name] = value.name if isinstance(value, Severity) else value
        return out


def severity_counts(findings: Sequence[Finding]) -> Mapping[str, int]:
    return {severity.name.lower(): sum(f.severity == severity for f in findings) for severity in reversed(Severity)}


def counts_in_words(findings: Sequence[Finding]) -> str:
    """`6 errors, 1 warning, 2 notes`."""
    counts = severity_counts(findings)
    nouns = {"error": "error", "warning": "warning", "info": "note"}
    return ", ".join(amount(counts[name], noun) for name, noun in nouns.items() if counts[name]) or "no findings"


def serious_ones(findings: Sequence[Finding]) -> str:
    """`2 errors and 1 warning`, or nothing."""
    counts = Counter(finding.severity for finding in findings)
    return " and ".join(amount(counts[s], s.name.lower()) for s in (Severity.ERROR, Severity.WARNING) if counts[s])
