"""Lines on stderr while a run goes on: what was found, not more often than a person can read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from ..core.finding import Finding, Severity
from ..core.terminal import say, tell, visible
from ..diagnose.verdict import Verdict, severity_counts

LINES_PER_MINUTE = 20


def line(finding: Finding) -> str:
    place = f"{finding.site}: " if finding.site else ""
    step = f"step {finding.step} " if finding.step is not None else ""
    rank = f"rank {finding.rank} " if finding.rank else ""
    return visible(f"nanny: {rank}{step}{finding.severity.name} {finding.code} {place}{finding.message}")


class LiveLog:
    """Prints findings of `lowest` and above, with their hint; counts what it holds back."""

    def __init__(
        self, stream: TextIO | None = None, per_minute: int = LINES_PER_MINUTE, lowest: Severity = Severity.WARNING
    ) -> None:
        self._lowest = lowest
        self._stream = stream
        self._times: deque[float] = deque(maxlen=per_minute)
        self.held_back = 0

    def show(self, finding: Finding) -> None:
        if finding.severity < self._lowest:
            return
        now = time.monotonic()
        if len(self._times) == self._times.maxlen and now - self._times[0] < 60:
            self.held_back += 1
            return
        self._times.append(now)
        self.say(line(finding) + (f"\n       -> {finding.hint}" if finding.hint else ""))

    def say(self, text: str) -> None:
        if self._stream is None:
            tell(text)
        else:
            say(text, self._stream)


def closing_lines(
    verdict: Verdict, findings: Sequence[Finding], cost: str, dropped: str, next_command: str, whose: str = ""
) -> list[str]:
    """The four lines at the end of a run; `whose`: of which rank, where there are several."""
    first = verdict.first
    said = ", ".join(f"{n} {name}" for name, n in severity_counts(findings).items() if n)
    noticed = f" (noticed first: step {first.step} {first.code} {first.site}; {said})" if first is not None else ""
    return [
        f"nanny: {whose}{verdict.text}{noticed}",
        f"nanny: cost: {cost}",
        f"nanny: dropped: {dropped}",
        f"nanny: next: {next_command}",
    ]
