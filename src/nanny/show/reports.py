"""Findings for continuous integration: GitHub annotations, GitLab code quality, JUnit."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..core.finding import Finding, Link, Severity
from ..core.plain_json import to_text
from .findings import one_line, place

GITHUB = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}
GITLAB = {Severity.ERROR: "major", Severity.WARNING: "minor", Severity.INFO: "info"}


def relative(file: str, root: str) -> str:
    """The file as seen from `root` with forward slashes; unchanged if it lies elsewhere or there is no root."""
    if root:
        inside = os.path.relpath(os.path.abspath(file), root)
        if not inside.startswith(os.pardir):
            file = inside
    return file.replace(os.sep, "/")


def fingerprints(findings: Sequence[Finding], root: str = "") -> list[str]:
    """One stable mark for each finding: what and where, without the line, so that code above it may move."""
    seen: Counter[tuple[str, ...]] = Counter()
    marks = []
    for finding in findings:
        where = relative(finding.file, root) if finding.file else finding.site
        key = (finding.code, where, str(finding.cell or ""), _without_numbers(finding.message))
        seen[key] += 1
        text = "\0".join((*key, str(seen[key])))
        marks.append(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32])
    return marks


def render_github(findings: Sequence[Finding], root: str = "") -> str:
    return "\n".join(_annotation(finding, root) for finding in findings)


def render_gitlab(findings: Sequence[Finding], root: str = "") -> str:
    return to_text([_issue(f, mark, root) for f, mark in zip(findings, fingerprints(findings, root))])


def render_junit(findings: Sequence[Finding]) -> str:
    """One test case for each finding, grouped by file (or site); a run without findings is one case that passes."""
    from xml.etree import ElementTree as Xml

    name = "nanny check"
    suites = Xml.Element("testsuites", name=name, tests=str(max(len(findings), 1)), failures=str(len(findings)))
    if not findings:
        suite = Xml.SubElement(suites, "testsuite", name=name, tests="1", failures="0", errors="0")
        Xml.SubElement(suite, "testcase", name="no findings", classname=name)
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.file or finding.site, []).append(finding)
    for where, group in groups.items():
        number = str(len(group))
        suite = Xml.SubElement(suites, "testsuite", name=one_line(where), tests=number, failures=number, errors="0")
        for finding in group:
            case = Xml.SubElement(suite, "testcase", name=finding.code, classname=one_line(where))
            if finding.line is not None and finding.cell is None:
                case.set("line", str(finding.line))
            failure = Xml.SubElement(case, "failure", message=one_line(finding.message), type=finding.severity.name)
            failure.text = one_line(f"{place(finding)}: {with_hint(finding, ' ')}")
    Xml.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(suites, encoding="unicode")


def _annotation(finding: Finding, root: str) -> str:
    level = GITHUB[finding.severity]
    fields: dict[str, Any] = {}
    message = with_hint(finding, "\n")
    if finding.file:
        fields["file"] = relative(finding.file, root)
        fields |= _span(finding)
        message = in_cell(finding, message)
    elif place(finding):
        message = f"{place(finding)}: {message}"
    fields["title"] = finding.code
    options = ",".join(f"{name}={_escape(str(value), ':,')}" for name, value in fields.items())
    return f"::{level} {options}::{_escape(message)}"


def _span(finding: Finding) -> dict[str, int]:
    """GitHub takes columns only where start and end are on one line."""
    if finding.cell is not None:
        return {"line": 1}
    if finding.line is None:
        return {}
    last = finding.end_line or finding.line
    span = {"line": finding.line, "endLine": last}
    if last == finding.line and finding.column is not None:
        span["col"] = finding.column
        span["endColumn"] = finding.end_column or finding.column
    return span


def _escape(text: str, also: str = "") -> str:
    """Workflow commands end at a line break, and their options at a comma or colon."""
    for char in "%\r\n" + also:
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def _issue(finding: Finding, fingerprint: str, root: str) -> dict[str, Any]:
    line = finding.line if finding.line is not None and finding.cell is None else 1
    return {
        "description": in_cell(finding, one_line(with_hint(finding, " "))),
        "check_name": finding.code,
        "fingerprint": fingerprint,
        "severity": GITLAB[finding.severity],
        "location": {"path": relative(finding.file, root) if finding.file else finding.site, "lines": {"begin": line}},
    }


def in_cell(place: Finding | Link, text: str) -> str:
    """A notebook's cell has no line in the file: it is said in the text, and the place is line 1."""
    return text if place.cell is None else f"cell {place.cell}, line {place.line}: {text}"


def with_hint(finding: Finding, gap: str) -> str:
    return f"{finding.message}{gap}Fix: {finding.hint}" if finding.hint else finding.message


def _without_numbers(text: str) -> str:
    return "".join("#" if char.isdigit() else char for char in text)
