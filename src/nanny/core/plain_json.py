"""JSON that every reader accepts: a bare NaN or Infinity is not JSON, so non-finite numbers become strings.

`to_text(value)` is used by every command; `render_json` and `render_jsonl` are the checker's list of findings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from .finding import Finding


def finite(value: Any) -> Any:
    """The same value with NaN and infinities as "NaN", "Infinity" and "-Infinity", enum members by their name."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(finite(key)): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(finite(item) for item in value)
    return value


def to_text(value: Any, indent: int | None = 2) -> str:
    """Plain ASCII, so that it survives every terminal and locale; `indent=None` gives one line."""
    return json.JSONEncoder(indent=indent, allow_nan=False).encode(finite(value))  # programs replace json.dumps


def rule_url(code: str) -> str:
    """Where the page of a rule stands in the documentation."""
    return f"docs/rules.md#{code.lower()}"


def _position(row: int | None, column: int | None) -> dict[str, int] | None:
    return None if row is None else {"row": row, "column": column or 1}


_OF_SOURCE = ("file", "line", "column", "end_line", "end_column", "cell", "chain")


def finding_object(finding: Finding) -> dict[str, Any]:
    """A finding in source code has always the same ten keys. One of a run has always code, severity, message, hint, site and
    step, whatever else says something, and those ten where the line is known."""
    source = _source_object(finding) if finding.file else {}
    if source and finding.step is None and not finding.site:
        return source
    told = {key: value for key, value in finding.to_json().items() if key not in _OF_SOURCE}
    return {**told, "hint": finding.hint, "site": finding.site, "step": finding.step, **source}


def _source_object(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity.name,
        "message": finding.message,
        "filename": finding.file,
        "location": _position(finding.line or 1, finding.column),
        "end_location": _position(finding.end_line, finding.end_column),
        "cell": finding.cell,
        "hint": finding.hint,
        "url": rule_url(finding.code),
        "chain": [
            {"filename": link.file, "location": {"row": link.line}, "cell": link.cell, "what": link.what}
            for link in finding.chain
        ],
    }


def render_json(findings: Sequence[Finding]) -> str:
    return to_text([finding_object(finding) for finding in findings])


def render_jsonl(findings: Iterable[Finding]) -> str:
    return "\n".join(to_text(finding_object(finding), indent=None) for finding in findings)
