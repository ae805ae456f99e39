"""Follows a live run: one line for each step with news, and each finding when it comes. Ends with
the run, or with Ctrl-C.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from ..core.finding import Finding
from ..store import reader
from .source import Source

NAMES = ("loss", "grad_norm", "scale", "lr", "step_ms", "skipped")
STEPS_BEFORE = 10
STEPS_AT_ONCE = 20
News = Finding | dict[str, Any]  # a finding, or the scalars of a step by name


@dataclass
class Position:
    """What has been told so far."""

    step: int
    findings: int = 0
    asked: int = 0  # steps of the past that were asked for


def follow(source: Source, steps_before: int = STEPS_BEFORE, interval: float = 1.0) -> Generator[News, None, str]:
    """What a run (opened `live`) writes, as it comes, and what it wrote in the last steps; returns how the run ended."""
    ends = reader.steps(source.db, source.run.id)
    position = Position(ends[1] - steps_before if ends else -1, asked=steps_before)
    while True:
        # The state is read before the news: what a run wrote last is on record when it says that it has ended.
        status = reader.pick_run(source.db, source.run.id).status
        yield from news(source, position)
        if status != "running":
            return status
        time.sleep(max(interval, 0.05))


def news(source: Source, position: Position) -> Iterator[News]:
    """Findings and steps that were not there at the last look; of many steps at once, the last ones."""
    found = reader.findings(source.db, source.run.id)
    curves = reader.scalars(source.db, source.run.id, NAMES, first=position.step + 1)
    steps: dict[int, dict[str, Any]] = {}
    for name, (numbers, values) in curves.items():
        for step, value in zip(numbers.tolist(), values.tolist()):
            steps.setdefault(step, {"step": step})[name] = value
    latest = sorted(steps)[-max(STEPS_AT_ONCE, position.asked) :]
    position.asked = 0
    items: list[tuple[int, int, News]] = [(step, 0, steps[step]) for step in latest]
    items += [(f.step if f.step is not None else position.step, 1, f) for f in found[position.findings :]]
    yield from (item for *_, item in sorted(items, key=lambda item: item[:2]))
    position.findings = len(found)
    position.step = max([position.step, *steps])
