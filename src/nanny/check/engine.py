"""The checker's entry: source text in, findings out. No file is read here and torch is not imported.

findings = check_source(open("train.py").read(), "train.py", Options(device="cuda"))
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..core.finding import Finding, Severity
from .credit import loudest
from .interpreter.interpreter import Interpreter
from .interpreter.probe import probe
from .interpreter.source import Project, SourceFile, WalkedFile, says_half, span, starts_program
from .interpreter.trace import Event, FileView, Options
from .registry import CheckRule, Hit, event_rules, rules_on


def check_source(source: str, filename: str = "<source>", options: Options | None = None) -> list[Finding]:
    """The findings of one Python source text. Raises SyntaxError like `ast.parse`."""
    tree = ast.parse(source, filename)
    return check_tree(tree, filename, options, source) if says_half(source) else []


def check_tree(tree: ast.Module, filename: str = "<source>", options: Options | None = None, text: str = "") -> list[Finding]:
    """The findings of one parsed file."""
    found = _check_file(SourceFile(filename, tree, text=text), Project({filename: text}), options or Options()).findings
    return [finding for finding in found if finding.file == filename]


def check_project(sources: Mapping[str, str], options: Options | None = None) -> dict[str, list[Finding]]:
    """The findings of several files that may import each other, by file; files with a syntax error are left out."""
    merged: dict[str, dict[tuple[object, ...], Finding]] = {name: {} for name in sources}
    for entry in check_entries(Project(sources), sources, options or Options()):
        for finding in entry.findings:
            known = merged.setdefault(finding.file, {})
            place = (finding.code, finding.line, finding.column)
            known[place] = worse(known.get(place), finding)
    return {file: sorted(found.values(), key=_position) for file, found in merged.items()}


@dataclass(frozen=True)
class SeenFrom:
    """What was seen from one file, in it and in those that it imports; `read` names these."""

    filename: str
    findings: list[Finding]
    read: list[str]


def check_entries(
    project: Project, filenames: Iterable[str], options: Options, notes: list[str] | None = None
) -> Iterator[SeenFrom]:
    for filename in filenames:
        text = project.sources[filename]
        is_worth, read = says_half(text), [filename]
        if not is_worth and starts_program(text):
            is_worth, read = project.half_behind(filename)
        source = project.file(filename) if is_worth else None
        if source is not None:
            yield _check_file(source, project, options, notes)
        elif len(read) > 1:
            yield SeenFrom(filename, [], read)


def worse(known: Finding | None, finding: Finding) -> Finding:
    """Which of two findings about one place is told: the same one in whatever order they come.

    Of its circumstances only those stay that hold whenever the place is reached.
    """
    if known is None:
        return finding
    first = min(known, finding, key=lambda f: (-f.severity, f.column or 0, len(f.chain), f.message))
    if known.evidence.get("autocast") == finding.evidence.get("autocast"):
        return first
    return replace(first, evidence={key: value for key, value in first.evidence.items() if key != "autocast"})


def _position(finding: Finding) -> tuple[int, int, str]:
    return finding.line or 0, finding.column or 0, finding.code


def _check_file(source: SourceFile, project: Project, options: Options, notes: list[str] | None = None) -> SeenFrom:
    found: dict[tuple[object, ...], tuple[Finding, Hit]] = {}
    interpreter, trial = Interpreter(project, options), Interpreter(project, options)
    try:
        seen = probe(trial, source)
        is_empty = seen is not None and next(_hits(seen, None), None) is None
        trial.forget()
        if is_empty:
            return SeenFrom(source.filename, [], [source.filename])
        view = interpreter.walk(WalkedFile(source))
    except RecursionError:
        raise
    except Exception as error:
        if notes is None:
            raise
        notes.append(f"{source.filename}: not checked, {_failure(error)}")
        return SeenFrom(source.filename, [], [])
    tests = {source.filename: source.is_test}
    for rule, hit, file, event in _hits(view, notes):
        finding = _finding(rule, hit, file, event)
        if finding.file not in tests:
            other = project.file(finding.file) if finding.file in project.sources else None
            tests[finding.file] = other is not None and other.is_test
        if tests[finding.file] or source.is_test:  # a test may break things on purpose, with devices and formats of its own
            finding = replace(finding, severity=Severity(max(finding.severity - 1, Severity.INFO)))
        key = (finding.code, finding.file, finding.line)
        known = found.get(key)
        kept = worse(known[0] if known else None, finding)
        found[key] = kept, known[1] if known is not None and kept.message == known[0].message else hit
    told = sorted(_one_for_each_mistake(found.values()), key=_position)
    interpreter.forget()
    return SeenFrom(source.filename, told, sorted({*interpreter.modules, *tests}))


def _failure(error: Exception) -> str:
    return f"which is a fault of nanny ({type(error).__name__}: {error}); please report it"


def _finding(rule: CheckRule, hit: Hit, file: str, event: Event | None) -> Finding:
    severity, message = hit.severity or rule.severity, hit.message
    if hit.unknown:
        message = f"possible: {message}; {hit.unknown} is not known"
    if not hit.chain:
        severity = min(severity, Severity.WARNING)
    severity = loudest(rule.code, severity, is_open=bool(hit.unknown), is_proven=hit.is_proven and bool(hit.chain))
    evidence = {**hit.evidence, **_circumstances(event)}
    where = getattr(hit.node, "file", file)
    return Finding(rule.code, severity, message, hit.hint, file=where, evidence=evidence, chain=hit.chain, **span(hit.node))


def _circumstances(event: Event | None) -> dict[str, str]:
    """What a fix must know: the device type of the autocast region that the operation runs in."""
    region = event.at.region if event is not None else None
    return {"autocast": region.device or "unknown"} if region is not None else {}


def _one_for_each_mistake(found: Iterable[tuple[Finding, Hit]]) -> Iterator[Finding]:
    """Of several consequences of one mistake the worst, and of those the first."""
    worst: dict[Hashable, Finding] = {}
    for finding, hit in found:
        if hit.mistake is None:
            yield finding
            continue
        known = worst.get(hit.mistake)
        rank = (-finding.severity, finding.file, *_position(finding))
        if known is None or rank < (-known.severity, known.file, *_position(known)):
            worst[hit.mistake] = finding
    yield from worst.values()


def _hits(view: FileView, notes: list[str] | None) -> Iterator[tuple[CheckRule, Hit, str, Event | None]]:
    """What the rules say. One that fails is told in `notes`, once, and asked no more about this file."""
    wanted = event_rules()
    patched = _is_patched(view)
    failed: set[CheckRule] = set()

    def hits_of(rule: CheckRule, *about: object) -> Iterable[Hit]:
        if rule in failed:
            return []
        try:
            return list(rule.function(*about))
        except RecursionError:
            raise
        except Exception as error:
            if notes is None:
                raise
            failed.add(rule)
            notes.append(f"{view.module.filename}: {rule.code} was not checked, {_failure(error)}")
            return []

    for trace in view.traces:
        for event in trace.events:
            for rule in wanted.get(event.op, ()):
                if patched and rule.code.startswith("NUM_") and event.at.region is None:
                    continue
                for hit in hits_of(rule, event, view):
                    yield rule, hit, event.file, event
        for rule in rules_on("trace"):
            for hit in hits_of(rule, trace, view):
                yield rule, hit, trace.module.filename, None
    for rule in rules_on("file"):
        for hit in hits_of(rule, view):
            yield rule, hit, view.module.filename, None


def _is_patched(view: FileView) -> bool:
    """Whether apex's amp has replaced torch's functions (O1, its default): sums, losses and the like then run in float32."""
    made = [event for event in view.of("external") if event.arg(0).path == "apex.amp.initialize"]
    return any(event.kwargs.get("opt_level", event.arg(3)).const not in ("O2", "O3") for event in made)
