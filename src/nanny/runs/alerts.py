"""The findings of a run, in the order of their steps.

--severity shows that severity and above; --fail-on warning (or error) ends with exit code 1 if such
a finding is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ..core.finding import Finding, Severity
from ..store import reader
from .source import Source

Steps = tuple[int | None, int | None]  # first and last of a range; None: no end


@dataclass(frozen=True)
class Alerts:
    """The findings that the filters let through."""

    source: Source  # of the first process
    found: list[Finding]
    all_filtered: bool  # there are findings, but no filter lets one through
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
    on_record = {f.code.upper() for source in sources for f in reader.findings(source.db, source.run.id)}
    wanted = {code.upper() for code in codes}
    found = [
        finding
        for source in sources
        for finding in findings_of(source, severity, *(steps or (None, None)))
        if (not wanted or finding.code.upper() in wanted) and (layer is None or matches(finding.site, layer))
    ]
    unknown = [code for code in codes if code.upper() not in on_record]
    return Alerts(sources[0], sort_by_step(found), bool(on_record) and not found, unknown, list(notes))


def findings_of(
    source: Source, severity: Severity | None = None, first: int | None = None, last: int | None = None
) -> list[Finding]:
    """Findings with what the run knows about them beside the row: how often they came again, and of which rank they are."""
    found = reader.findings(source.db, source.run.id, severity=severity, first=first, last=last)
    again = {(code, site): (times, step) for code, site, times, step in source.run.meta.get("repeats", ())}
    latest = {(f.code, f.site): i for i, f in enumerate(found)}
    for key, i in latest.items():
        if key in again:
            times, step = again[key]
            found[i] = replace(found[i], evidence={**found[i].evidence, "times": times, "last_step": step})
    if source.run.world_size == 1:
        return found
    return [f if f.rank is not None else replace(f, rank=source.run.rank) for f in found]


def matches(site: str, pattern: str) -> bool:
    """A glob, or a module path that means itself and everything inside it."""
    return site == pattern or site.startswith(f"{pattern}.") or fnmatchcase(site, pattern)


def sort_by_step(findings: Sequence[Finding]) -> list[Finding]:
    """By step. Within one, a place stands before the whole run (a NaN loss is a symptom), and what only passed it on last."""
    passed_on = {str(site) for finding in findings for site in finding.evidence.get("passed_on", ())}
    return sorted(findings, key=lambda f: (-1 if f.step is None else f.step, f.site in passed_on, f.site in ("", "loss")))


def severity_counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {severity.name.lower(): sum(f.severity == severity for f in findings) for severity in reversed(Severity)}


def repeats(finding: Finding) -> int:
    """How often it was seen: a finding that came again is kept once, and counted."""
    return int(finding.evidence.get("times", 1))
