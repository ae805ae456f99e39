"""The checker's entry: source text in, findings out. No file is read here and torch is not imported.

findings = check_source(open("train.py").read(), "train.py", Options(device="cuda"))
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ..core.finding import Finding
from . import calls, statements
from .registry import Hit, Rule, event_rules, rules_on
from .relevance import relevant_functions
from .source import ClassInfo, FunctionInfo, ModuleInfo, Project, parse_module, says_half, span
from .trace import Context, FileView, Frame, Run, Trace
from .values import Thing, Value


@dataclass(frozen=True)
class Options:
    """What the user knows and the code does not say."""

    device: str | None = None  # cuda, cpu, ...
    amp_dtype: str | None = None  # fp16 or bf16


def check_source(source: str, filename: str = "<source>", options: Options | None = None) -> list[Finding]:
    """The findings of one Python source text. Raises SyntaxError like `ast.parse`."""
    if not says_half(source):
        ast.parse(source, filename)
        return []
    options = options or Options()
    module = parse_module(source, filename)
    found = _check_module(module, Project({filename: source}), options)
    return found.get(filename, [])


def check_project(
    sources: Mapping[str, str], options: Options | None = None, only: Collection[str] | None = None
) -> dict[str, list[Finding]]:
    """The findings of several files that may import each other, by file; files with a syntax error are left out.

    `only` names the files to start from (all, by default); the others are read where those import them.
    """
    options = options or Options()
    project = Project(sources)
    merged: dict[str, dict[tuple[object, ...], Finding]] = {name: {} for name in (only or sources)}
    for filename in only or sources:
        if not says_half(sources[filename]):
            continue
        module = project.module(filename)
        if module is None:
            continue
        for file, findings in _check_module(module, project, options).items():
            merged.setdefault(file, {}).update({(f.code, f.line, f.column): f for f in findings})
    return {file: sorted(found.values(), key=_position) for file, found in merged.items()}


def _position(finding: Finding) -> tuple[int, int, str]:
    return finding.line or 0, finding.column or 0, finding.code


def _check_module(module: ModuleInfo, project: Project, options: Options) -> dict[str, list[Finding]]:
    view = walk(module, project, options)
    found: dict[tuple[object, ...], Finding] = {}
    for rule, hit, file in _hits(view):
        severity = hit.severity or rule.severity
        finding = Finding(
            rule.code, severity, hit.message, hit.hint, file=hit.file or file, evidence=hit.evidence, **span(hit.node)
        )
        key = (finding.code, finding.file, finding.line)
        known = found.get(key)
        if known is None or (finding.severity, -(finding.column or 0)) > (known.severity, -(known.column or 0)):
            found[key] = finding
    out: dict[str, list[Finding]] = {}
    for finding in sorted(found.values(), key=_position):
        out.setdefault(finding.file, []).append(finding)
    return out


def _hits(view: FileView) -> Iterator[tuple[Rule, Hit, str]]:
    wanted = event_rules()
    for trace in view.traces:
        for event in trace.events:
            for rule in wanted.get(event.op, ()):
                for hit in rule.function(event, view):
                    yield rule, hit, event.file
        for rule in rules_on("trace"):
            for hit in rule.function(trace, view):
                yield rule, hit, trace.module.filename
    for rule in rules_on("file"):
        for hit in rule.function(view):
            yield rule, hit, view.module.filename


def walk(module: ModuleInfo, project: Project, options: Options) -> FileView:
    """Runs the module body, then every function that nothing has called yet, and keeps what was seen."""
    run = Run(project, options, module.is_active)
    body = Trace("<module>", module)
    run.traces.append(body)
    if not module.is_loaded:
        module.is_loaded = True
        statements.run_block(Frame(run, module, body, module.env), module.tree.body)
    called = {path.rpartition(".")[2] for path in module.called}
    own = relevant_functions(module, [f for f in module.functions if f.module is module])
    for function in sorted(own, key=lambda f: f.name in called):  # entry points first: they run their helpers
        if function.runs == 0:
            _enter(run, function, function.owner)
    for function in own:
        for owner in _heirs(function, module):
            _enter(run, function, owner)
    return FileView(module, run.traces, options)


def _heirs(function: FunctionInfo, module: ModuleInfo) -> Iterator[ClassInfo]:
    """Classes that inherit this method, override others that it may call, and are instantiated nowhere in the file."""
    owner = function.owner
    if owner is None or function.name.startswith("__") or f"self.{function.name}" in module.called:
        return
    for heir in module.classes:
        if heir is owner or heir.find(function.name) is not function or heir.name in module.called:
            continue
        if any(f"self.{name}" in module.called and owner.find(name) for name in heir.methods if name != "__init__"):
            yield heir


def _enter(run: Run, function: FunctionInfo, owner: ClassInfo | None) -> None:
    trace = Trace(function.name, function.module, owner)
    run.traces.append(trace)
    outer = Frame(run, function.module, trace, {}, closure=function.closure, owner=owner)
    args: list[Value] = []
    if owner is not None:
        this = Value("instance", ref=owner, thing=Thing("self", "module" if owner.is_module else ""))
        calls.build(outer, owner, this, [], {}, owner.node)
        args = [this]
        decorators = {getattr(d, "id", "") for d in getattr(function.node, "decorator_list", ())}
        args = [] if "staticmethod" in decorators else args
    if function.runs == 0 or owner is not function.owner:
        calls.run_function(outer, function, args, {}, Context(stack=(function,)), is_entry=True)
