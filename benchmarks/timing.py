"""Comparing the time of two pieces of work on a machine that is not quiet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """How many times longer `a` takes than `b`; `control` is `b` against itself, measured in the same rounds."""

    median: float
    low: float  # quartiles of the rounds
    high: float
    control: float
    a_seconds: float  # medians
    b_seconds: float

    def verdict(self, bar: float) -> str:
        busy = "" if 0.95 < self.control < 1.05 else "; the control is off, so the machine was busy"
        return f"bar {bar:g}: {'met' if self.meets(bar) else 'MISSED'}{busy}"

    def meets(self, bar: float) -> bool:
        return self.median <= bar

    def __str__(self) -> str:
        return (
            f"{self.median:.2f} times (quartiles {self.low:.2f} to {self.high:.2f}; "
            f"A/A control {self.control:.2f}; {self.a_seconds * 1e3:.1f} ms against {self.b_seconds * 1e3:.1f} ms)"
        )


@dataclass(frozen=True)
class Line:
    """One number of the table that a run of the benchmarks ends with."""

    what: str
    value: float
    unit: str
    bar: float | None  # at most
    control: float | None  # the same work against itself
    peer: bool

    def cells(self) -> tuple[str, ...]:
        bar = "" if self.bar is None else f"{self.bar:g}"
        share = "" if not self.bar else f"{self.value / self.bar:.2f}"
        control = "" if self.control is None else f"{self.control:.2f}"
        return self.what, f"{self.value:.3g} {self.unit}", bar, share, control


noted: list[Line] = []


def note(
    what: str, value: float, unit: str = "times", bar: float | None = None, control: float | None = None, peer: bool = False
) -> None:
    noted.append(Line(what, value, unit, bar, control, peer))


def table(lines: Sequence[Line]) -> list[str]:
    """In Markdown: ours first, then the peers."""
    head = ("", "measured", "limit", "of the limit", "A/A")
    rows = [head, ("---",) * len(head), *(line.cells() for line in sorted(lines, key=lambda line: line.peer))]
    return [f"| {' | '.join(row)} |" for row in rows]


def ratio(a: Callable[[], object], b: Callable[[], object], repeats: int = 15) -> Ratio:
    """Median of per-round ratios: within a round both meet the same disturbance, and the order changes every round."""
    a(), b()  # the first call pays for allocations and kernel selection
    rounds = [_round(a, b, flipped=bool(i % 2)) for i in range(repeats)]
    ratios = sorted(2 * ta / (first + second) for ta, first, second in rounds)
    low, _, high = statistics.quantiles(ratios, n=4)
    return Ratio(
        median=statistics.median(ratios),
        low=low,
        high=high,
        control=statistics.median(first / second for _, first, second in rounds),
        a_seconds=statistics.median(ta for ta, _, _ in rounds),
        b_seconds=statistics.median((first + second) / 2 for _, first, second in rounds),
    )


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _round(a: Callable[[], object], b: Callable[[], object], *, flipped: bool) -> tuple[float, float, float]:
    """`b` runs before and after `a`; which of its two times counts as first alternates, so that drift cancels in the control."""
    before = seconds(b)
    middle = seconds(a)
    after = seconds(b)
    return (middle, after, before) if flipped else (middle, before, after)
