"""How a run looks while it goes: one line a step."""

from __future__ import annotations

from typing import Any

from ...core.numbers import power_of_two, short


def step_text(row: dict[str, Any]) -> str:
    """The scalars of one step in a line."""
    parts = [f"step {row['step']:<8}"]
    for name, title in (("loss", "loss"), ("grad_norm", "grad"), ("lr", "lr"), ("step_ms", "ms")):
        if name in row:
            parts.append(f"{title} {short(row[name]):<10}")
    if "scale" in row:
        parts.append(f"scale {power_of_two(row['scale']):<7}")
    if row.get("skipped"):
        parts.append("SKIPPED")
    return " ".join(parts).rstrip()


def end_text(status: str) -> str:
    words = {"interrupted": "been killed", "finished": "finished", "crashed": "crashed", "failed": "failed"}
    return f"the run has {words.get(status, f'ended: {status}')}"
