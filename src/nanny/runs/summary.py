"""A run in one screen: the verdict, then the numbers and what to type next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..core.finding import Finding, Severity, severity_counts
from ..core.numbers import median
from ..core.step import Setup
from ..diagnose.records import Diagnosis
from ..diagnose.verdict import Verdict, first_broken_step, first_culprit
from ..store import reader
from .alerts import findings_of, job_verdict, repeats, sort_by_step, under_verdict
from .ranks import RankDifferences, compare_ranks, whole_norms
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
    setup: Setup | None = None  # what trained, in which mode and precision

    @property
    def first_nonfinite_loss(self) -> int | None:
        """The step from which on the loss is not finite."""
        return first_broken_step(self.curves.get("loss"))


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
    verdict: Verdict
    codes: list[CodeCount]  # worst and earliest first
    notes: list[str]
    apart: RankDifferences = field(default_factory=RankDifferences)
    elsewhere: tuple[Finding, ...] = ()  # of ranks that are on record and not among these
    on_record: int = 1  # ranks

    @property
    def sick(self) -> int:
        """Ranks with warnings or errors."""
        by_rank: dict[int | None, list[Finding]] = {}
        for finding in (*(f for state in self.ranks for f in state.findings), *self.elsewhere):
            by_rank.setdefault(finding.rank, []).append(finding)
        return sum(first_culprit(found) is not None for found in by_rank.values())

    @property
    def findings(self) -> list[Finding]:
        """Of all processes."""
        found = [*(f for rank in self.ranks for f in rank.findings), *self.elsewhere, *self.apart.findings]
        return under_verdict(self.verdict, sort_by_step(found))

    @property
    def lead(self) -> RankState:
        return self.ranks[0]

    @property
    def culprit(self) -> Finding | None:
        """The first error, or warning where there is none."""
        first = self.verdict.first
        return None if first is None else under_verdict(self.verdict, [first])[0]

    @property
    def diagnosis(self) -> Diagnosis | None:
        return self.verdict.diagnosis

    @property
    def counts(self) -> Mapping[str, int]:
        return severity_counts(self.findings)

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
        step = culprit.step
        return [f for f in self.findings if f.severity == Severity.WARNING and f.step is not None and f.step < step]


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


def summarize(sources: Sequence[Source], notes: Sequence[str] = (), tried: bool = True) -> Summary:
    """The summary of a job, of which `open_job` gives the processes and the notes; `tried`: with remedies that were tried."""
    ranks = [_rank_state(source) for source in sources]
    apart, norms = compare_ranks(sources), whole_norms(sources)
    if norms is not None:
        ranks[0] = replace(ranks[0], curves={**ranks[0].curves, "grad_norm": norms})
    elsewhere = sources[0].elsewhere
    found = sort_by_step([*(finding for rank in ranks for finding in rank.findings), *elsewhere, *apart.findings])
    on_record = max(len(ranks), sources[0].ranks_in_dataset)
    return Summary(ranks, job_verdict(sources, found, tried), _by_code(found), list(notes), apart, elsewhere, on_record)


def _rank_state(source: Source) -> RankState:
    db, run = source.db, source.run.id
    known = source.evidence.scalars
    curves = {name: known[name] for name in CURVES if name in known}
    setup = source.evidence.facts.latest.setup
    return RankState(source, findings_of(source), curves, reader.steps(db, run), reader.dumps(db, run), setup)


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


def curve_stats(steps: np.ndarray, values: np.ndarray) -> CurveStats:
    finite = values[np.isfinite(values)]
    return CurveStats(
        first=float(values[0]),
        last=float(values[-1]),
        min=float(finite.min()) if len(finite) else math.nan,
        max=float(finite.max()) if len(finite) else math.nan,
        median=median(finite) if len(finite) else math.nan,
        sum=float(finite.sum()),
        nonfinite=len(values) - len(finite),
        count=len(values),
        last_step=int(steps[-1]),
    )
