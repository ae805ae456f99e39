"""The checker's entry: source text in, findings out. No file is read here and torch is not imported.

findings = check_source(open("train.py").read(), "train.py", Options(device="cuda"))
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ..core.finding import Finding
from .interpreter.interpreter import Interpreter
from .interpreter.source import Project, SourceFile, WalkedFile, says_half, span
from .interpreter.trace import Event, FileView, Options
from .registry import CheckRule, Hit, event_rules, rules_on


def check_source(source: str, filename: str = "<source>", options: Options | None = None) -> list[Finding]:
    """The findings of one Python source text. Raises SyntaxError like `ast.parse`."""
    tree = ast.parse(source, filename)
    return check_tree(tree, filename, options) if says_half(source) else []


def check_tree(tree: ast.Module, filename: str = "<source>", options: Options | None = None) -> list[Finding]:
    """The findings of one parsed file."""
    return _check_file(SourceFile(filename, tree), Project({filename: ""}), options or Options()).get(filename, [])


def check_project(
    sources: Mapping[str, str],
    options: Options | None = None,
    only: Collection[str] | None = None,
    trees: Mapping[str, ast.Module] | None = None,
) -> dict[str, list[Finding]]:
    """The findings of several files that may import each other, by file; files with a syntax error are left out.

    `only` names the files to start from (all, by default); the others are read where those import them.
    `trees` are those that are parsed already.
    """
    options = options or Options()
    project = Project(sources, trees)
    merged: dict[str, dict[tuple[object, ...], Finding]] = {name: {} for name in (only or sources)}
    for filename in only or sources:
        if not says_half(sources[filename]):
            continue
        source = project.file(filename)
        if source is None:
            continue
        for file, findings in _check_file(source, project, options).items():
            known = merged.setdefault(file, {})
            for f in findings:
                place = (f.code, f.line, f.column)
                known[place] = _agreed(f, known.get(place, f))
    return {file: sorted(found.values(), key=_position) for file, found in merged.items()}


def _position(finding: Finding) -> tuple[int, int, str]:
    return finding.line or 0, finding.column or 0, finding.code


def _check_file(source: SourceFile, project: Project, options: Options) -> dict[str, list[Finding]]:
    view = Interpreter(project, options).walk(WalkedFile(source))
    found: dict[tuple[object, ...], Finding] = {}
    for rule, hit, file, event in _hits(view):
        severity = hit.severity or rule.severity
        finding = Finding(
            rule.code,
            severity,
            hit.message,
            hit.hint,
            file=getattr(hit.node, "file", file),
            evidence={**hit.evidence, **_circumstances(event)},
            **span(hit.node),
        )
        key = (finding.code, finding.file, finding.line)
        known = found.get(key)
        if known is None or (finding.severity, -(finding.column or 0)) > (known.severity, -(known.column or 0)):
            found[key] = finding if known is None else _agreed(finding, known)
        elif known.column == finding.column:
            found[key] = _agreed(known, finding)
    out: dict[str, list[Finding]] = {}
    for finding in sorted(found.values(), key=_position):
        out.setdefault(finding.file, []).append(finding)
    return out


def _circumstances(event: Event | None) -> dict[str, str]:
    """What a fix must know: the device type of the autocast region that the operation runs in."""
    region = event.at.region if event is not None else None
    return {"autocast": region.device or "unknown"} if region is not None else {}


def _agreed(finding: Finding, other: Finding) -> Finding:
    """The finding with only those circumstances that hold whenever this place is reached."""
    if finding.evidence.get("autocast") == other.evidence.get("autocast"):
        return finding
    return replace(finding, evidence={key: value for key, value in finding.evidence.items() if key != "autocast"})


def _hits(view: FileView) -> Iterator[tuple[CheckRule, Hit, str, Event | None]]:
    wanted = event_rules()
    for trace in view.traces:
        for event in trace.events:
            for rule in wanted.get(event.op, ()):
                for hit in rule.function(event, view):
                    yield rule, hit, event.file, event
        for rule in rules_on("trace"):
            for hit in rule.function(trace, view):
                yield rule, hit, trace.module.filename, None
    for rule in rules_on("file"):
        for hit in rule.function(view):
            yield rule, hit, view.module.filename, None
