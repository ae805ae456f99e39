"""Which finding of a run to read first."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.finding import Finding, Severity

LOCATED_WITHIN = 10  # steps: tracing is dense after an error


def first_culprit(findings: Sequence[Finding]) -> Finding | None:
    """The finding to read first: the earliest error, or the earliest warning if there is none.

    A bad loss whose producer was named a few steps later is told by that later finding.
    """
    worst = max((f.severity for f in findings), default=Severity.INFO)
    if worst < Severity.WARNING:
        return None
    serious = sorted((f for f in findings if f.severity == worst), key=lambda f: f.step if f.step is not None else 0)
    first = serious[0]
    if first.code in ("NAN", "INF") and first.site == "loss":
        return next((f for f in serious if f.code in _LOCATED and f.site != "loss" and _soon_after(f, first)), first)
    return first


_LOCATED = ("NAN", "INF", "OVERFLOW", "INPUT_NONFINITE")


def _soon_after(finding: Finding, first: Finding) -> bool:
    return finding.step is not None and first.step is not None and 0 <= finding.step - first.step <= LOCATED_WITHIN
