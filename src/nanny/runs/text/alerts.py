"""How findings look: each as a block of text, or all as a table."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.finding import Finding, Severity, counts_in_words
from ...core.numbers import amount, join_names
from ...core.plain_json import finding_object
from ...show.findings import STYLES
from ...show.tables import Answer, Column, Line, Table
from ..alerts import Alerts, repeats
from ..source import title_of

ALERTS_SHOWN = 50

_ALERT_COLUMNS = (
    Column("step"),
    Column("severity", says=True),
    Column("code"),
    Column("site", elastic=True),
    Column("message", elastic=True),
    Column("hint", elastic=True),
    Column("rank"),
    Column("value"),
    Column("limit"),
    Column("times"),
)


def alerts_answer(alerts: Alerts, limit: int | None, *, in_blocks: bool, fail_on: Severity | None = None) -> Answer:
    """In blocks for a terminal, which also shows only so many unless told; else as a table."""
    found = alerts.found
    shown = found[: limit or (ALERTS_SHOWN if in_blocks else None)]
    counts = "no finding matches; without filters there are some" if alerts.all_filtered else counts_in_words(found)
    counts += " but the diagnosis" if alerts.cause is not None and not found else ""
    lines = [Line(title_of(alerts.source), indent=4), *(Line(note, "warning", 4) for note in alerts.notes)]
    lines.append(Line(f"{alerts.verdict.text}.", "good" if alerts.verdict.healthy else STYLES[Severity.ERROR], 4))
    if alerts.cause is not None and in_blocks:
        lines.append(Line(f"    fix: {alerts.cause.hint}", indent=9))
    lines.append(Line(counts))
    lines += finding_blocks(shown) if in_blocks else []
    if len(shown) < len(found):
        lines += [Line(""), Line(f"… and {len(found) - len(shown)} more findings; --limit {len(found)} shows all")]
    table = Table(_ALERT_COLUMNS, [_alert_row(finding) for finding in shown], rest="findings")
    return Answer(
        lines=lines,
        tables=[] if in_blocks else [table],
        data={
            "verdict": alerts.verdict.text,
            "cause": None if alerts.cause is None else finding_object(alerts.cause),
            "findings": [finding_object(finding) for finding in shown],
            "total": len(found),
        },
        flat=table,
        next=_after_alerts(alerts),
        exit_code=int(fail_on is not None and alerts.worst is not None and alerts.worst >= fail_on),
    )


def finding_blocks(findings: Sequence[Finding]) -> list[Line]:
    """Each finding as a block; what to do about a code is said once."""
    lines: list[Line] = []
    seen: set[str] = set()
    for finding in findings:
        lines += [Line(""), *finding_lines(finding, hint=finding.code not in seen)]
        seen.add(finding.code)
    return lines


def _alert_row(finding: Finding) -> list[object]:
    return [
        finding.step, finding.severity.name, finding.code, finding.site, finding.message, finding.hint,
        finding.rank, finding.value, finding.limit, repeats(finding),
    ]  # fmt: skip


def _after_alerts(alerts: Alerts) -> list[str]:
    worst = alerts.cause or max(alerts.found, key=lambda finding: finding.severity, default=None)  # the first of the worst
    if worst is None:
        return [alerts.source.command("summary")]
    out = [f"nanny rule {worst.code}"]
    if worst.step is not None:
        out.append(alerts.there.command("stats", "--step", worst.step))
    return out


def finding_lines(finding: Finding, hint: bool = True) -> list[Line]:
    """A finding as a block of text: what, where and when; the message; what to do; who only passed it on."""
    rank = f" on rank {finding.rank}" if finding.rank is not None else ""
    step = "" if finding.step is None else f" at step {finding.step}{_times(finding)}"
    place = f" in {finding.site}" if finding.site else ""
    lines = [Line(f"{finding.severity.name} {finding.code}{step}{rank}{place}", STYLES[finding.severity], 4)]
    lines.append(Line(f"    {finding.message}", indent=4))
    if hint and finding.hint:
        lines.append(Line(f"    fix: {finding.hint}", indent=9))
    passed_on = [str(site) for site in finding.evidence.get("passed_on", ())]
    if passed_on:
        lines.append(Line(f"    passed on by {amount(len(passed_on), 'layer')}: {join_names(passed_on)}", "quiet", 4))
    return lines


def _times(finding: Finding) -> str:
    last = finding.evidence.get("last_step")
    times = repeats(finding)
    if times <= 1:
        return ""
    return f" ({times} times" + (f", last at step {last})" if last is not None else ")")
