"""What the pages on a tensor and on a diff are made of, besides `page.Section`."""

from __future__ import annotations

from typing import Any

from ..core.finding import Finding, NannyError
from ..show.findings import STYLES, place
from ..show.tables import Line
from .figures import EXTRA

QUIET = "#9aa4af"
CLAIM = "#cc79a7"


def graph_objects() -> Any:
    try:
        import plotly.graph_objects as found
    except ImportError:
        raise NannyError(f"the page needs plotly; type {EXTRA}") from None
    return found


def frame(height: int, top: int = 10, left: int = 64) -> dict[str, Any]:
    """The layout that all figures share; colours come from the page."""
    return {
        "height": height, "template": "none", "margin": {"l": left, "r": 24, "t": top, "b": 44}, "showlegend": False,
        "font": {"size": 12, "family": "system-ui, sans-serif"},
    }  # fmt: skip


def finding_lines(finding: Finding) -> list[Line]:
    """What, where, and what to do."""
    where = place(finding)
    return [
        Line(f"{finding.severity.name} {finding.code}{f' in {where}' if where else ''}", STYLES[finding.severity]),
        Line(finding.message),
        *([Line(f"fix: {finding.hint}", "strong")] if finding.hint else []),
    ]
