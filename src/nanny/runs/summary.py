"""The verdict on a run: healthy or not, the first culprit, then the numbers and what to type next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.finding import Finding, Severity
from ..core.numbers import counted
from ..monitor.culprit import first_culprit
from ..store import reader
from .alerts import findings_of, repeats, severity_counts, sort_by_step
from .source import Source

Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]
CURVES = ("loss", "grad_norm", "scale", "skipped", "traced", "step_ms", "clip")


@dataclass(frozen=True)
class RankState:
    """What one process of the job recorded."""

    source: Source
    findings: list[Finding]
    curves: Curves
    steps: tuple[int, int] | None
    dumps: list[reader.DumpRow]

    @property
    def first_nonfinite_loss(self) -> int | None:
        """The step from which on the loss is not finite."""
        return first_nonfinite(self.curves.get("loss"))


@dataclass(frozen=True)
class RunVerdict:
    healthy: bool | None  # None: too little to tell
    word: str  # HEALTHY, NOT HEALTHY, SUSPECT, CRASHED or NO VERDICT
    reason: str
    what_follows: str = ""  # the finding that is shown next

    @property
    def text(self) -> str:
        return f"{self.word}: {self.reason}" + (f". {self.what_follows}" if self.what_follows else "")


@dataclass(frozen=True)
class CodeCount:
    """All findings of one code."""

    severity: str
    code: str
    times: int
    first_step: int | None
    layers: int
    first_layer: str


@dataclass(frozen=True)
class Summary:
    """The verdict on all processes of a job together; the first of them stands for it."""

    ranks: Sequence[RankState]
    verdict: RunVerdict
    culprit: Finding | None
    codes: list[CodeCount]  # worst and earliest first
    notes: list[str]

    @property
    def lead(self) -> RankState:
        return self.ranks[0]

    @property
    def counts(self) -> dict[str, int]:
        return severity_counts([finding for rank in self.ranks for finding in rank.findings])

    @property
    def culprit_rank(self) -> RankState:
        """The process that the culprit was seen on; the first if there is none."""
        rank = None if self.culprit is None else self.culprit.rank
        return next((state for state in self.ranks if state.source.run.rank == rank), self.lead)

    @property
    def warned_before(self) -> list[Finding]:
        """Warnings that came before the first error may be its cause."""
        culprit = self.culprit
        if culprit is None or culprit.severity != Severity.ERROR or culprit.step is None:
            return []
        found = self.lead.findings
        return [f for f in found if f.severity == Severity.WARNING and f.step is not None and f.step < culprit.step]


@dataclass(frozen=True)
class CurveStats:
    """A curve of the run in a few numbers; of what is finite, but for its ends."""

    first: float
    last: float
    min: float
    max: float
    median: float
    sum: float
    nonfinite: int
    count: int
    last_step: int


def summarize(sources: Sequence[Source], notes: Sequence[str] = ()) -> Summary:
    """The summary of a job, of which `open_job` gives the processes and the notes."""
    ranks = [_rank_state(source) for source in sources]
    found = [finding for rank in ranks for finding in rank.findings]
    culprit = first_culprit(sort_by_step(found))
    return Summary(ranks, _verdict(ranks[0], severity_counts(found), culprit), culprit, _by_code(found), list(notes))


def _rank_state(source: Source) -> RankState:
    db, run = source.db, source.run.id
    curves = reader.scalars(db, run, CURVES)
    return RankState(source, findings_of(source), curves, reader.steps(db, run), reader.dumps(db, run))


def _verdict(lead: RankState, counts: Mapping[str, int], culprit: Finding | None) -> RunVerdict:
    run = lead.source.run
    if culprit is not None:
        found = " and ".join(counted(counts[name], name) for name in ("error", "warning") if counts[name])
        if culprit.severity == Severity.ERROR:
            return RunVerdict(False, "NOT HEALTHY", found, "The first culprit")
        return RunVerdict(False, "SUSPECT", f"{found}, no error", "The first")
    if lead.steps is None:
        if run.status == "running":
            return RunVerdict(None, "NO VERDICT", "nothing is recorded yet.")
        return RunVerdict(None, "NO VERDICT", "the run ended without a training step that could be seen.")
    if run.meta.get("failure"):
        return RunVerdict(None, "NO VERDICT", "the nanny itself failed and left the run; nothing was wrong until then.")
    broken = lead.first_nonfinite_loss
    if broken is not None:
        reason = f"the loss is not finite from step {broken} on, though no rule has named a culprit."
        return RunVerdict(False, "NOT HEALTHY", reason)
    if reader.is_damaged(lead.source.db):
        return RunVerdict(None, "NO VERDICT", "the record is damaged: what was wrong may be in what is lost.")
    notes = f" ({counted(counts['info'], 'note')})" if counts["info"] else ""
    seen = f"{counted(lead.steps[1] - lead.steps[0] + 1, 'step')}{notes}"
    if run.status == "crashed":
        return RunVerdict(None, "CRASHED", f"the script ended with an exception; no number was wrong in {seen}.")
    return RunVerdict(True, "HEALTHY", f"nothing wrong in {seen}.")


def _by_code(findings: Sequence[Finding]) -> list[CodeCount]:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.code, []).append(finding)
    rows = []
    for code, members in groups.items():
        worst = max(f.severity for f in members)
        first_step = min((f.step for f in members if f.step is not None), default=None)
        places = {f.site for f in members if f.site}
        first = min(members, key=lambda f: -1 if f.step is None else f.step)
        row = CodeCount(worst.name, code, sum(map(repeats, members)), first_step, len(places), first.site)
        rows.append(((-worst, -1 if first_step is None else first_step), row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def first_nonfinite(curve: tuple[np.ndarray, np.ndarray] | None) -> int | None:
    """The first step at which a curve is not finite."""
    if curve is None or np.isfinite(curve[1]).all():
        return None
    return int(curve[0][np.argmin(np.isfinite(curve[1]))])


def curve_stats(steps: np.ndarray, values: np.ndarray) -> CurveStats:
    finite = values[np.isfinite(values)]
    return CurveStats(
        first=float(values[0]),
        last=float(values[-1]),
        min=float(finite.min()) if len(finite) else math.nan,
        max=float(finite.max()) if len(finite) else math.nan,
        median=float(np.median(finite)) if len(finite) else math.nan,
        sum=float(finite.sum()),
        nonfinite=len(values) - len(finite),
        count=len(values),
        last_step=int(steps[-1]),
    )
