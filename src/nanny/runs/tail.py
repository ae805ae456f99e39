"""Follows a live run: one line for each step with news, and each finding when it comes. Ends with
the run, or with Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..core.finding import Finding
from ..core.numbers import power_of_two, short
from ..core.plain_json import finding_object, to_text
from ..show.tables import Answer, Line, rendered
from ..show.term import wants_colour, width_of
from ..store import reader
from .alerts import finding_lines
from .source import Source, open_run, positive, title_of

FORMATS = ("text", "json")
NAMES = ("loss", "grad_norm", "scale", "lr", "step_ms", "skipped")
STEPS_BEFORE = 10
STEPS_AT_ONCE = 20


@dataclass
class Seen:
    """What has been shown so far."""

    step: int
    findings: int = 0
    asked: int = 0  # steps of the past that were asked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (default: 1)")
    parser.add_argument("--lines", type=positive, default=STEPS_BEFORE, metavar="N", help="steps shown of what has been")


def answer(args: argparse.Namespace) -> Answer:
    with open_run(args.db, args.run) as source:
        if args.format == "text":
            _show(Answer(lines=[Line(title_of(source), "strong", 4)]))
        ends = reader.steps(source.db, source.run.id)
        seen = Seen(ends[1] - args.lines if ends else -1, asked=args.lines)
        try:
            status = _follow(source, seen, args.format, max(args.interval, 0.05))
        except KeyboardInterrupt:
            return Answer(next=[source.command("summary")] if args.format == "text" else [])
        if args.format == "json":
            print(to_text({"status": status}, None), flush=True)
            return Answer()
        return Answer(lines=[Line(f"the run has {_ended(status)}")], next=[source.command("summary")])


def _follow(source: Source, seen: Seen, form: str, interval: float) -> str:
    while True:
        # The state is read before the news: what a run wrote last is on record when it says that it has ended.
        status = reader.pick_run(source.db, source.run.id).status
        for item in news(source, seen):
            _print(item, form)
        if status != "running":
            return status
        time.sleep(interval)


def news(source: Source, seen: Seen) -> Iterator[Finding | dict[str, Any]]:
    """Findings and steps that were not there at the last look; of many steps at once, the last ones."""
    found = reader.findings(source.db, source.run.id)
    curves = reader.scalars(source.db, source.run.id, NAMES, first=seen.step + 1)
    steps: dict[int, dict[str, Any]] = {}
    for name, (numbers, values) in curves.items():
        for step, value in zip(numbers.tolist(), values.tolist()):
            steps.setdefault(step, {"step": step})[name] = value
    latest = sorted(steps)[-max(STEPS_AT_ONCE, seen.asked) :]
    seen.asked = 0
    items: list[tuple[int, int, Finding | dict[str, Any]]] = [(step, 0, steps[step]) for step in latest]
    items += [(f.step if f.step is not None else seen.step, 1, f) for f in found[seen.findings :]]
    yield from (item for *_, item in sorted(items, key=lambda item: item[:2]))
    seen.findings = len(found)
    seen.step = max([seen.step, *steps])


def _print(item: Finding | dict[str, Any], form: str) -> None:
    if form == "json":
        print(to_text(finding_object(item) if isinstance(item, Finding) else item, None), flush=True)
    elif isinstance(item, Finding):
        _show(Answer(lines=finding_lines(item)))
    else:
        _show(Answer(lines=[Line(_step_text(item))]))


def _step_text(row: dict[str, Any]) -> str:
    parts = [f"step {row['step']:<8}"]
    for name, title in (("loss", "loss"), ("grad_norm", "grad"), ("lr", "lr"), ("step_ms", "ms")):
        if name in row:
            parts.append(f"{title} {short(row[name]):<10}")
    if "scale" in row:
        parts.append(f"scale {power_of_two(row['scale']):<7}")
    if row.get("skipped"):
        parts.append("SKIPPED")
    return " ".join(parts).rstrip()


def _ended(status: str) -> str:
    words = {"interrupted": "been killed", "finished": "finished", "crashed": "crashed", "failed": "failed"}
    return words.get(status, f"ended: {status}")


def _show(answer: Answer) -> None:
    print(rendered(answer, "text", width_of(sys.stdout), wants_colour(sys.stdout)), flush=True)
