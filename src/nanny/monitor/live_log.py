"""Lines on stderr while a run goes on: what was found, not more often than a person can read."""

from __future__ import annotations

import time
from collections import deque
from typing import TextIO

from ..core.finding import Finding, Severity, say

LINES_PER_MINUTE = 20


def line(finding: Finding) -> str:
    place = f"{finding.site}: " if finding.site else ""
    step = f"step {finding.step} " if finding.step is not None else ""
    rank = f"rank {finding.rank} " if finding.rank else ""
    return f"nanny: {rank}{step}{finding.severity.name} {finding.code} {place}{finding.message}"


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
            say(text)
        else:
            print(text, file=self._stream, flush=True)


def closing_lines(
    counts: dict[str, int], first: Finding | None, cost: str, dropped: str, next_command: str, status: str = "finished"
) -> list[str]:
    """The four lines at the end of a run."""
    said = ", ".join(f"{n} {name.lower()}" for name, n in counts.items() if n)
    if first is None:
        verdict = "the run looks healthy" if status == "finished" else f"but the run {status}"
        said = f"none, {verdict}" + (f" ({said})" if said else "")
    begins = f"; first: step {first.step} {first.code} {first.site}" if first is not None else ""
    return [
        f"nanny: findings: {said}{begins}",
        f"nanny: cost: {cost}",
        f"nanny: dropped: {dropped}",
        f"nanny: next: {next_command}",
    ]
