"""Chains of proof: the places a mistake goes through, from where it begins to where it does harm."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..core.finding import Link
from .interpreter.regions import Region
from .interpreter.trace import Event
from .interpreter.values import HALF, Value

LONGEST = 6  # links of a value's way; what is between is named by their number


def link(event: Event, what: str) -> Link:
    return Link(event.file, event.line, what)


def node_link(node: ast.AST, file: str, what: str) -> Link:
    return Link(getattr(node, "file", file), getattr(node, "lineno", 1), what)


def region_link(region: Region, file: str) -> Link:
    where = f" on {region.device}" if region.device else ""
    kind = f" in {region.dtype}" if region.dtype in ("fp16", "bf16") else ""
    return Link(region.file or file, region.line, f"autocast opens{where}{kind}")


def half_links(value: Value, file: str) -> tuple[Link, ...]:
    """Where a half value was made half, and each operation that carried it from there."""
    steps: list[Link] = []
    for step in _way(value):
        if step.node is None:
            continue
        origin = not any(v.dtype in HALF for v in step.inputs) or step.op in ("cast", "module_call")
        name = step.op.replace("_", " ").strip() if step.op in ("module_call", "getitem") else step.op
        what = f"{step.why or name} makes it {step.dtype}" if origin else f"{name} keeps {step.dtype}"
        place = node_link(step.node, file, what)
        if not steps or steps[-1] != place:
            steps.append(place)
    steps.reverse()
    if len(steps) > LONGEST:
        steps = [*steps[:2], *steps[-(LONGEST - 2) :]]
    return tuple(steps)


def unknown_link(value: Value, file: str) -> str:
    """The step on a value's way whose dtype is a convention, in words; empty if every one is known."""
    if value.sure:
        return ""
    guess = next((v for v in _way(value) if not v.sure and v.op in ("module_call", "cast", "arange")), value)
    where = node_link(guess.node, file, "") if guess.node is not None else None
    is_call, place = guess.op == "module_call", f"{where.file}:{where.line}" if where is not None else ""
    if not place:
        return "the dtype that the call gives back" if is_call else "the dtype of the cast"
    return f"the dtype that the call at {place} gives back" if is_call else f"the dtype of the cast at {place}"


def _way(value: Value) -> Iterator[Value]:
    """The value and, one after the other, the operand that its half dtype comes from."""
    current: Value | None = value
    seen: set[int] = set()
    while current is not None and id(current) not in seen and len(seen) < 60:
        seen.add(id(current))
        yield current
        if current.op in ("cast", "module_call") or ("autocast" in current.tags and not current.inputs):
            return
        current = next((v for v in current.inputs if v.dtype == current.dtype), None)
