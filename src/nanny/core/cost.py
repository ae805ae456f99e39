"""What watching a run has cost, as the run itself says it at its end, its summary and its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .numbers import short

SHORT_RUN_SECONDS = 60.0  # until then the start, which is looked at closely, is most of any share


def cost_text(totals: Mapping[str, Any]) -> str:
    """In percent of the training; of a short run in seconds, examinations among them, and in percent behind its start. Empty
    where it is not known."""
    percent, took = totals.get("cost_percent"), totals.get("run_seconds")
    if not isinstance(percent, (int, float)):
        return ""
    if not isinstance(took, (int, float)) or took >= SHORT_RUN_SECONDS:
        return f"{_percent(percent)} of the training time"
    seconds = f"{totals['watched_seconds'] + totals.get('examined_seconds', 0.0):.1f} s of the run's {took:.1f} s"
    later = totals.get("later_percent")
    return seconds if later is None else f"{seconds}, from step {totals['later_from']} on {_percent(later)} of the training time"


def _percent(value: float) -> str:
    return f"{short(round(value, 2 if value < 100 else 0))} %"
