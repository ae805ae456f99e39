"""The findings of a run, in the order of their steps.

--severity shows that severity and above; --fail-on warning (or error) ends with exit code 1 if such
a finding is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ..core.finding import Finding, Severity
from ..core.numbers import counted, listed
from ..core.plain_json import finding_object
from ..show.findings import STYLES
from ..show.tables import Answer, Column, Line, Table
from ..store import reader
from .source import Source, open_job, positive, step_range, title_of

SHOWN = 50
_COLUMNS = (
    Column("step"),
    Column("severity"),
    Column("code"),
    Column("site", elastic=True),
    Column("message", elastic=True),
    Column("hint", elastic=True),
    Column("rank"),
    Column("value"),
    Column("limit"),
    Column("times"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--severity", type=Severity.parse, help="info, warning or error: this severity and above")
    parser.add_argument("--code", action="append", help="only this code (may be repeated)")
    parser.add_argument("--step", type=step_range, metavar="A:B", help="only these steps: 100, 100:200, 100: or :200")
    parser.add_argument("--layer", metavar="GLOB", help="only layers whose name matches, such as 'encoder.*'")
    parser.add_argument("--limit", type=positive, metavar="N", help=f"at most N findings (text shows {SHOWN} unless told)")
    parser.add_argument("--fail-on", type=Severity.parse, metavar="SEVERITY", help="exit code 1 if a finding is that bad")


def answer(args: argparse.Namespace) -> Answer:
    with open_job(args.db, args.run) as (sources, notes):
        _refuse_unknown(args.code or (), sources)
        found = in_order([finding for source in sources for finding in read(source, args)])
        hidden = not found and any(reader.findings(source.db, source.run.id, limit=1) for source in sources)
        head, command = title_of(sources[0]), sources[0].command
    in_text = args.format == "text"
    shown = found[: args.limit or (SHOWN if in_text else None)]
    counts = "no finding matches; without filters there are some" if hidden else _counts(found)
    lines = [Line(head, indent=4), *(Line(note, "warning", 4) for note in notes), Line(counts)]
    lines += _blocks(shown) if in_text else []
    if len(shown) < len(found):
        lines += [Line(""), Line(f"… and {len(found) - len(shown)} more findings; --limit {len(found)} shows all")]
    table = Table(_COLUMNS, [_row(finding) for finding in shown], rest="findings")
    failed = args.fail_on is not None and any(finding.severity >= args.fail_on for finding in found)
    return Answer(
        lines=lines,
        tables=[] if in_text else [table],
        data={"findings": [finding_object(finding) for finding in shown], "total": len(found)},
        flat=table,
        next=_next(found, command),
        exit_code=int(failed),
    )


def _refuse_unknown(codes: Sequence[str], sources: Sequence[Source]) -> None:
    """A mistyped code must not pass for a run without findings."""
    on_record = {f.code.upper() for source in sources for f in reader.findings(source.db, source.run.id)} if codes else set()
    for code in codes:
        if code.upper() not in on_record:
            from ..show.pages import page_of

            page_of(code)


def _blocks(findings: Sequence[Finding]) -> list[Line]:
    """Each finding as a block; what to do about a code is said once."""
    lines: list[Line] = []
    seen: set[str] = set()
    for finding in findings:
        lines += [Line(""), *finding_lines(finding, hint=finding.code not in seen)]
        seen.add(finding.code)
    return lines


def read(source: Source, args: argparse.Namespace) -> list[Finding]:
    """The findings that the filters let through; a layer's name alone also stands for what is below it."""
    first, last = args.step or (None, None)
    found = findings_of(source, args.severity, first, last)
    codes = {code.upper() for code in args.code or ()}
    return [
        finding
        for finding in found
        if (not codes or finding.code.upper() in codes) and (args.layer is None or matches(finding.site, args.layer))
    ]


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


def finding_lines(finding: Finding, hint: bool = True) -> list[Line]:
    """A finding as a block of text: what, where and when; the message; what to do; who only passed it on."""
    rank = f" on rank {finding.rank}" if finding.rank is not None else ""
    step = "" if finding.step is None else f" at step {finding.step}{_until(finding)}"
    place = f" in {finding.site}" if finding.site else ""
    lines = [Line(f"{finding.severity.name} {finding.code}{step}{rank}{place}", STYLES[finding.severity], 4)]
    lines.append(Line(f"    {finding.message}", indent=4))
    if hint and finding.hint:
        lines.append(Line(f"    fix: {finding.hint}", indent=9))
    passed_on = [str(site) for site in finding.evidence.get("passed_on", ())]
    if passed_on:
        lines.append(Line(f"    passed on by {counted(len(passed_on), 'layer')}: {listed(passed_on)}", "quiet", 4))
    return lines


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """By step. Within one, a place stands before the whole run (a NaN loss is a symptom), and what only passed it on last."""
    passed_on = {str(site) for finding in findings for site in finding.evidence.get("passed_on", ())}
    return sorted(findings, key=lambda f: (-1 if f.step is None else f.step, f.site in passed_on, f.site in ("", "loss")))


def severity_counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {severity.name.lower(): sum(f.severity == severity for f in findings) for severity in reversed(Severity)}


def repeats(finding: Finding) -> int:
    """How often it was seen: a finding that came again is kept once, and counted."""
    return int(finding.evidence.get("times", 1))


def _until(finding: Finding) -> str:
    last = finding.evidence.get("last_step")
    times = repeats(finding)
    if times <= 1:
        return ""
    return f" ({times} times" + (f", last at step {last})" if last is not None else ")")


def _counts(found: Sequence[Finding]) -> str:
    counts = severity_counts(found)
    return ", ".join(counted(counts[name], noun) for name, noun in (("error", "error"), ("warning", "warning"), ("info", "note")))


def _row(finding: Finding) -> list[object]:
    return [
        finding.step, finding.severity.name, finding.code, finding.site, finding.message, finding.hint,
        finding.rank, finding.value, finding.limit, repeats(finding),
    ]  # fmt: skip


def _next(found: Sequence[Finding], command: Callable[..., str]) -> list[str]:
    if not found:
        return [command("summary")]
    worst = max(found, key=lambda finding: finding.severity)  # the first of the worst
    out = [f"nanny rule {worst.code}"]
    if worst.step is not None:
        out.append(command("stats", "--step", worst.step))
    return out
