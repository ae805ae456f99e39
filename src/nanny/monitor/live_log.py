"""Lines on stderr while a run goes on: what was found, not more often than a person can read."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence

from ..core.finding import Finding, Severity, counts_in_words
from ..core.terminal import tell, visible
from ..diagnose.verdict import Verdict
from ..show.translation import translate, with_label

LINES_PER_MINUTE = 20
_LINE = re.compile(r"((?:nanny: )?\s*(?:-> )?)(.*)")


def line(finding: Finding, lang: str = "en") -> str:
    place = f"{finding.site}: " if finding.site else ""
    step = translate(f"step {finding.step}", lang) + " " if finding.step is not None else ""
    rank = f"rank {finding.rank} " if finding.rank else ""
    message = translate(finding.message, lang)
    return visible(f"nanny: {rank}{step}{finding.severity.name} {finding.code} {place}{message}")


class LiveLog:
    """Prints findings of `lowest` and above; counts what it holds back."""

    def __init__(self, lowest: Severity = Severity.WARNING) -> None:
        self._lowest = lowest
        self.lang = "en"
        self._times: deque[float] = deque(maxlen=LINES_PER_MINUTE)
        self.held_back = 0

    def set_language(self, lang: str) -> None:
        """From here on; what that takes is read now, and not in the middle of a run."""
        self.lang = lang
        translate("the catalogue is read", lang)

    def show(self, finding: Finding, hint: bool = True) -> None:
        """`hint`: what to do about it; not where the cause is told already, whose remedy counts."""
        if finding.severity < self._lowest:
            return
        now = time.monotonic()
        if len(self._times) == self._times.maxlen and now - self._times[0] < 60:
            self.held_back += 1
            return
        self._times.append(now)
        advice = f"\n       -> {translate(finding.hint, self.lang)}" if hint and finding.hint else ""
        tell(line(finding, self.lang) + advice)

    def say(self, text: str) -> None:
        found = map(_LINE.fullmatch, text.splitlines())
        tell("\n".join(one[1] + translate(one[2], self.lang) for one in found if one is not None))


def closing_lines(
    verdict: Verdict, findings: Sequence[Finding], cost: str, dropped: str, next_command: str, whose: str = "", lang: str = "en"
) -> list[str]:
    """The four lines at the end of a run; `whose`: of which rank, where there are several."""
    first = verdict.first
    noticed = ""
    if first is not None:
        found = f"step {first.step} {first.code} {first.site}"
        noticed = f"(first {first.severity.name.lower()}: {found}; {counts_in_words(findings)})"
    who = with_label(translate(whose, lang), "", lang) if whose else ""
    return [
        f"nanny: {who}{translate(verdict.text, lang)} {translate(noticed, lang)}".rstrip(),
        f"nanny: cost: {cost}",
        f"nanny: dropped: {dropped}",
        f"nanny: next: {next_command}",
    ]
