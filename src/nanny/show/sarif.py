"""Findings as SARIF 2.1.0, the format of code-scanning services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from .. import __version__
from ..core.finding import Finding, Link, Severity
from ..core.plain_json import to_text
from .reports import fingerprints, in_cell, relative, with_hint

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def render_sarif(findings: Sequence[Finding], docs: Mapping[str, str] | None = None, root: str = "") -> str:
    """`docs` maps a code to the text of its page, `root` is the folder that file names are made relative to."""
    docs = docs or {}
    codes = sorted({finding.code for finding in findings})
    marks = fingerprints(findings, root)
    run = {
        "tool": {
            "driver": {
                "name": "nanny",
                "version": __version__,
                "rules": [_rule(code, docs.get(code, "")) for code in codes],
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": [_result(f, codes.index(f.code), mark, root) for f, mark in zip(findings, marks)],
    }
    return to_text({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(code: str, doc: str) -> dict[str, Any]:
    title = doc.strip().split("\n", 1)[0] or code
    out: dict[str, Any] = {"id": code, "shortDescription": {"text": title}}
    if doc.strip():
        out["help"] = {"text": doc.strip()}
    out["properties"] = {"tags": ["mixed-precision", code.split("_")[0].lower()]}
    return out


def _result(finding: Finding, index: int, fingerprint: str, root: str) -> dict[str, Any]:
    related = [_related_location(number, link, root) for number, link in enumerate(finding.chain, 1)]
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": LEVELS[finding.severity],
        "message": {"text": in_cell(finding, with_hint(finding, "\n"))},
        "locations": _locations(finding, root),
        **({"relatedLocations": related} if related else {}),
        "partialFingerprints": {"nanny/v1": fingerprint},
    }


def _related_location(number: int, link: Link, root: str) -> dict[str, Any]:
    """A place of the chain."""
    region = {"startLine": link.line if link.cell is None else 1}
    place = {"artifactLocation": {"uri": _uri(link.file, root)}, "region": region}
    return {"id": number, "message": {"text": in_cell(link, link.what)}, "physicalLocation": place}


def _locations(finding: Finding, root: str) -> list[dict[str, Any]]:
    if finding.file:
        artifact = {"uri": _uri(finding.file, root)}
        return [{"physicalLocation": {"artifactLocation": artifact, "region": _region(finding)}}]
    if finding.site:
        return [{"logicalLocations": [{"fullyQualifiedName": finding.site, "kind": "module"}]}]
    return []


def _uri(file: str, root: str) -> str:
    path = relative(file, root)
    return PurePath(path).as_uri() if PurePath(path).is_absolute() else quote(path, errors="surrogateescape")


def _region(finding: Finding) -> dict[str, int]:
    if finding.cell is not None or finding.line is None:
        return {"startLine": 1}
    region = {"startLine": finding.line, "startColumn": finding.column or 1}
    if finding.end_line is not None:
        region["endLine"] = finding.end_line
        if finding.end_column is not None:
            region["endColumn"] = finding.end_column
    return region
