"""The verdict on a run, and its findings in the order of their steps.

--severity shows that severity and above; --fail-on warning (or error) ends with exit code 1 if such
a finding is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ..core.finding import Finding, Severity
from ..diagnose.verdict import Verdict, finding_of, first_culprit, is_from_others, verdict_of
from ..monitor.registry import all_rules, is_of_loop
from ..store import reader
from .ranks import BETWEEN_RANKS, compare_ranks
from .source import Source

Steps = tuple[int | None, int | None]  # first and last of a range; None: no end


@dataclass(frozen=True)
class Alerts:
    """The findings that the filters let through; `cause`: the diagnosis as one, which is not counted among them."""

    source: Source  # of the first process
    there: Source  # of the one in which it began
    verdict: Verdict
    cause: Finding | None
    found: list[Finding]
    all_filtered: bool  # there are findings, but no filter lets one through
    worst: Severity | None  # of all that was let through; without a filter, of the verdict itself
    unknown_codes: list[str]  # asked for, and not on record: they may be mistyped
    notes: list[str]


def find_alerts(
    sources: Sequence[Source],
    notes: Sequence[str] = (),
    *,
    severity: Severity | None = None,
    codes: Sequence[str] = (),
    steps: Steps | None = None,
    layer: str | None = None,
) -> Alerts:
    """The findings of a job; a layer's name alone also stands for what is below it."""
    on_record = [finding for source in sources for finding in findings_of(source)]
    on_record += [*sources[0].elsewhere, *compare_ranks(sources).findings]
    verdict = job_verdict(sources, on_record)
    cause = finding_of(verdict)
    everything = [*on_record, *([cause] if cause is not None else [])]
    known, wanted = {f.code.upper() for f in everything}, {code.upper() for code in codes}
    through = [
        finding
        for finding in everything
        if (not wanted or finding.code.upper() in wanted)
        and (severity is None or finding.severity >= severity)
        and (layer is None or matches(finding.site, layer))
        and (steps is None or is_within(finding, steps))
    ]
    unknown = [code for code in codes if code.upper() not in known]
    found = under_verdict(verdict, sort_by_step([f for f in through if f is not cause]))
    kept = cause if any(f is cause for f in through) else None
    filtered = bool(codes) or any(chosen is not None for chosen in (severity, layer, steps))
    severities = [f.severity for f in through] + ([] if filtered or verdict.severity is None else [verdict.severity])
    worst = max(severities, default=None)
    there = next((source for source in sources if source.run.rank == verdict.rank), sources[0])
    return Alerts(sources[0], there, verdict, kept, found, bool(everything) and not through, worst, unknown, list(notes))


def under_verdict(verdict: Verdict, found: Sequence[Finding]) -> list[Finding]:
    """Findings as they stand under a diagnosis: from its step on, what to change is said by it alone, and by what a rule of the
    loop has found, which is a mistake of its own."""
    one = verdict.diagnosis
    if one is None or one.early or not any(f.hint for f in found):
        return list(found)
    all_rules()
    since = -1 if one.step is None else one.step
    return [replace(f, hint="") if (f.step is None or f.step >= since) and not is_of_loop(f.code) else f for f in found]


def job_verdict(sources: Sequence[Source], found: Sequence[Finding], tried: bool = True) -> Verdict:
    """Of a job with these findings. The process that was first in trouble has the evidence; `tried`: its trials count."""
    first = first_culprit(sort_by_step(found))
    lead = sources[0]
    sick = next((source for source in sources if first is not None and source.run.rank == first.rank), lead)
    own = {
        f.rank
        for f in found
        if first is not None and (f.step, f.severity) == (first.step, first.severity) and not is_from_others(f)
    }
    failure = str(lead.run.meta.get("failure") or "")
    joint = tuple(f for f in found if f.rank is None and f.code in BETWEEN_RANKS)
    evidence = replace(sick.evidence, findings=(*sick.evidence.findings, *joint))
    return verdict_of(
        evidence if tried else evidence.without_trials(),
        steps=reader.steps(lead.db, lead.run.id),
        status=lead.run.status,
        failure=failure,
        damaged=reader.is_damaged(lead.db),
        findings=found,
        rank=first.rank if first is not None and len(own) < max(len(sources), lead.ranks_in_dataset) else None,
    )


def findings_of(source: Source) -> list[Finding]:
    """Findings with what the run knows about them beside the row: how often they came again, and of which rank they are."""
    found = reader.findings(source.db, source.run.id)
    again = {(code, site): (times, step) for code, site, times, step in source.run.meta.get("repeats", ())}
    latest = {(f.code, f.site): i for i, f in enumerate(found)}
    for key, i in latest.items():
        if key in again:
            times, step = again[key]
            found[i] = replace(found[i], evidence={**found[i].evidence, "times": times, "last_step": step})
    if source.run.world_size == 1:
        return found
    return [f if f.rank is not None else replace(f, rank=source.run.rank) for f in found]


def is_within(finding: Finding, steps: Steps) -> bool:
    """A range with an end leaves out findings without a step."""
    first, last = steps
    if finding.step is None:
        return steps == (None, None)
    return (first is None or finding.step >= first) and (last is None or finding.step <= last)


def matches(site: str, pattern: str) -> bool:
    """A glob, or a module path that means itself and everything inside it."""
    return site == pattern or site.startswith(f"{pattern}.") or fnmatchcase(site, pattern)


def sort_by_step(findings: Sequence[Finding]) -> list[Finding]:
    """By step. Within one, a place stands before the whole run (a NaN loss is a symptom), and what only passed it on last,
    what came from another process after all."""
    passed_on = {str(site) for finding in findings for site in finding.evidence.get("passed_on", ())}
    return sorted(
        findings, key=lambda f: (-1 if f.step is None else f.step, is_from_others(f), f.site in passed_on, f.site in ("", "loss"))
    )


def repeats(finding: Finding) -> int:
    """How often it was seen: a finding that came again is kept once, and counted."""
    return int(finding.evidence.get("times", 1))
