"""Walks statements in program order: both arms of a branch, a loop's body once, calls followed into the project's functions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from . import attributes, branches, expressions, managers
from .guards import guards_of, window_guard
from .regions import Region
from .source import ClassInfo, FunctionInfo, dotted
from .trace import MAX_STATEMENTS, Context, Frame, Guard
from .values import NONE, NOTHING, UNKNOWN, Thing, Value, ancestors, constant, join


def run_block(frame: Frame, body: Sequence[ast.stmt]) -> None:
    """Runs the statements; on return `frame.is_over` says whether the end of the block is reached."""
    frame.is_over = False
    saved = frame.at
    for statement in body:
        if frame.is_over:
            break
        frame.run.statements += 1
        if frame.run.statements > MAX_STATEMENTS:
            frame.is_over = True
            break
        for region in frame.entered:
            if region not in frame.at.regions:
                frame.at = frame.inside(regions=(*frame.at.regions, region))
        handler = _STATEMENTS.get(type(statement))
        if handler:
            handler(frame, statement)
    frame.at = saved


def assign(frame: Frame, target: ast.expr, value: Value) -> None:
    if isinstance(target, ast.Name):
        if target.id in frame.globals:
            frame.module.env[target.id] = value
        if value.thing is not None and not value.thing.name:
            value.thing.name = target.id
        frame.env[target.id] = value
    elif isinstance(target, (ast.Tuple, ast.List)):
        _assign_items(frame, target.elts, value)
    elif isinstance(target, ast.Attribute):
        _assign_attribute(frame, target, value)
    elif isinstance(target, ast.Subscript):
        base = expressions.evaluate(frame, target.value)
        index = expressions.evaluate(frame, target.slice)
        if base.kind == "dict" and isinstance(base.ref, dict):
            base.ref[index.const if index.const is not NOTHING else f"?{target.lineno}"] = value
        elif isinstance(index.const, str) and dotted(target.value):
            frame.env[f"{dotted(target.value)}[{index.const}]"] = value
        frame.emit("setitem", target, (base, index, value))
    elif isinstance(target, ast.Starred):
        assign(frame, target.value, UNKNOWN)


def _assign_items(frame: Frame, targets: list[ast.expr], value: Value) -> None:
    if value.kind in ("tuple", "list") and len(value.inputs) == len(targets):
        for target, item in zip(targets, value.inputs):
            assign(frame, target, item)
        return
    for position, target in enumerate(targets):
        part = attributes.part_of(frame, value, position, target)
        assign(frame, target, part)


def _assign_attribute(frame: Frame, target: ast.Attribute, value: Value) -> None:
    base = expressions.evaluate(frame, target.value)
    if target.attr == "grad":
        frame.emit("set_grad", target, (base, value))
        return
    path = dotted(target)
    if value.thing is not None and not value.thing.name:
        value.thing.name = path
    if base.kind == "instance" and isinstance(base.ref, ClassInfo):
        known = base.ref.fields.get(target.attr)
        is_conditional = bool(frame.at.guards) or value.is_none
        base.ref.fields[target.attr] = join(known, value) if known is not None and is_conditional else value
        return
    if target.attr == "data" and base.thing is not None and value.is_half:
        base.thing.dtype = value.dtype
    if base.thing is not None:
        base.thing.attrs[target.attr] = value
    if path:
        frame.env[path] = value


def _assign(frame: Frame, node: ast.Assign) -> None:
    frame.spine = _spine(node)
    value = expressions.evaluate(frame, node.value)
    frame.spine = (None, "")
    for target in node.targets:
        if value.op in ("add", "sub", "lerp") and value.dtype != "fp32":
            _notice_accumulation(frame, node, target, value)
        assign(frame, target, value)


def _spine(node: ast.Assign) -> tuple[ast.AST | None, str]:
    start: ast.AST = node.value
    while isinstance(start, ast.Call) and isinstance(start.func, ast.Attribute) and isinstance(start.func.value, ast.Call):
        start = start.func.value
    return start, dotted(node.targets[0])


def _notice_accumulation(frame: Frame, node: ast.Assign, target: ast.expr, value: Value) -> None:
    """`acc = acc * d + x` and `p.data = m * p.data + ...` are running sums."""
    known = frame.lookup(dotted(target)) if isinstance(target, ast.Name) else expressions.evaluate(frame, target)
    if known is None or not known.is_half:
        return
    origin = known.inputs[0] if known.op == "view" and known.inputs else known
    if any(v is known or v is origin for v in ancestors(value, 12)):
        frame.emit("accumulate", node, (known, value), out=value)


def _ann_assign(frame: Frame, node: ast.AnnAssign) -> None:
    if node.value is not None:
        assign(frame, node.target, expressions.evaluate(frame, node.value))


def _aug_assign(frame: Frame, node: ast.AugAssign) -> None:
    left = expressions.evaluate(frame, node.target)
    right = expressions.evaluate(frame, node.value)
    value = expressions.binary(frame, node, node.op, left, right, in_place=True)
    frame.emit("augassign", node, (left, right, constant(type(node.op).__name__)), out=value)
    if not (isinstance(node.target, ast.Attribute) and node.target.attr in ("grad", "data")):
        assign(frame, node.target, value)


def _expr(frame: Frame, node: ast.Expr) -> None:
    expressions.evaluate(frame, node.value)


def _return(frame: Frame, node: ast.Return) -> None:
    frame.returns.append(expressions.evaluate(frame, node.value) if node.value else NONE)
    frame.is_over = True


def _leave(frame: Frame, node: ast.stmt) -> None:
    if isinstance(node, ast.Raise) and node.exc:
        expressions.evaluate(frame, node.exc)
    frame.is_over = True


def _if(frame: Frame, node: ast.If) -> None:
    test = expressions.evaluate(frame, node.test)
    known = branches.truth(node.test, test)
    if known is not None:
        run_block(frame, node.body if known else node.orelse)
        return
    before = frame.env
    saved = frame.at
    yes, no = (guards_of(frame, node.test, test, arm) + window_guard(frame, node, arm) for arm in (True, False))

    frame.env = before.copy()
    branches.narrow(frame, node.test, True)
    frame.at = replace(saved, guards=saved.guards + yes)
    run_block(frame, node.body)
    env_yes, over_yes = frame.env, frame.is_over

    frame.env = before.copy()
    branches.narrow(frame, node.test, False)
    frame.at = replace(saved, guards=saved.guards + no)
    run_block(frame, node.orelse)
    env_no, over_no = frame.env, frame.is_over

    frame.at = saved
    frame.is_over = over_yes and over_no
    if over_yes and not over_no:
        frame.env, frame.at = env_no, _after_exit(saved, no)
    elif over_no and not over_yes:
        frame.env, frame.at = env_yes, _after_exit(saved, yes)
    else:
        frame.env = merge(env_yes, env_no)


def _after_exit(at: Context, implied: tuple[Guard, ...]) -> Context:
    return replace(at, guards=at.guards + implied, exits=at.exits | {key for key, _ in implied})


def merge(left: dict[str, Value], right: dict[str, Value]) -> dict[str, Value]:
    out = left
    for name, value in right.items():
        known = out.get(name)
        if known is None:
            out[name] = value
        elif known is not value:
            out[name] = join(known, value)
    return out


def _for(frame: Frame, node: ast.For | ast.AsyncFor) -> None:
    source = expressions.evaluate(frame, node.iter)
    saved = frame.at
    frame.at = replace(saved, loops=(*saved.loops, node))
    assign(frame, node.target, attributes.element_of(frame, source, node.target))
    run_block(frame, node.body)
    frame.at = saved
    run_block(frame, node.orelse)
    frame.is_over = False


def _while(frame: Frame, node: ast.While) -> None:
    expressions.evaluate(frame, node.test)
    saved = frame.at
    frame.at = replace(saved, loops=(*saved.loops, node))
    run_block(frame, node.body)
    frame.at = saved
    run_block(frame, node.orelse)
    frame.is_over = False


def _with(frame: Frame, node: ast.With | ast.AsyncWith) -> None:
    saved, entered = frame.at, len(frame.entered)
    for item in node.items:
        value = expressions.evaluate(frame, item.context_expr)
        enter(frame, value)
        if item.optional_vars is not None:
            assign(frame, item.optional_vars, value if value.kind != "context" else UNKNOWN)
    run_block(frame, node.body)
    frame.at = saved
    del frame.entered[entered:]


def enter(frame: Frame, value: Value) -> None:
    """Takes the effect of entering a context manager; undone by whoever restores `frame.at`."""
    if value.kind == "instance":
        value = managers.entered_instance(frame, value)
    if value.kind != "context":
        return
    for inner in value.inputs:
        enter(frame, inner)
    if isinstance(value.ref, Region):
        frame.at = frame.inside(regions=(*frame.at.regions, value.ref))
    if "no_grad" in value.tags:
        frame.at = frame.inside(has_grad=False)
    if "enable_grad" in value.tags:
        frame.at = frame.inside(has_grad=True)


def _try(frame: Frame, node: ast.Try) -> None:
    run_block(frame, node.body)
    over = frame.is_over
    if not over:
        run_block(frame, node.orelse)
        over = frame.is_over
    saved = frame.at
    env = frame.env
    for handler in node.handlers:
        frame.env = env.copy()
        frame.at = replace(saved, guards=(*saved.guards, (f"except@{handler.lineno}", True)))
        if handler.name:
            frame.env[handler.name] = UNKNOWN
        run_block(frame, handler.body)
        if not frame.is_over:  # what the body bound wins: the handler is the fallback
            env = {**frame.env, **env}
            over = False
    frame.env, frame.at = env, saved
    run_block(frame, node.finalbody)
    frame.is_over = frame.is_over or over


def _match(frame: Frame, node: ast.Match) -> None:
    expressions.evaluate(frame, node.subject)
    saved, env = frame.at, frame.env
    merged: dict[str, Value] = env.copy()
    for position, case in enumerate(node.cases):
        frame.env = env.copy()
        frame.at = replace(saved, guards=(*saved.guards, (f"match@{node.lineno}:{position}", True)))
        run_block(frame, case.body)
        merged = merge(merged, frame.env)
    frame.env, frame.at, frame.is_over = merged, saved, False


def _function(frame: Frame, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    info = FunctionInfo(node, frame.module, None, frame.env if frame.at.stack else None)
    frame.module.functions.append(info)
    for decorator in node.decorator_list:
        _decorator(frame, decorator)
    frame.env[node.name] = Value("function", ref=info)
    if frame.at.stack:
        frame.run.pending.append((info, frame.at, frame.trace))


def _decorator(frame: Frame, node: ast.expr) -> None:
    target = expressions.evaluate(frame, node.func if isinstance(node, ast.Call) else node)
    frame.emit("decorator", node, (target,))
    if isinstance(node, ast.Call):
        expressions.evaluate(frame, node)


def _class(frame: Frame, node: ast.ClassDef) -> None:
    info = ClassInfo(node, frame.module)
    names, parents = [], []
    for base in node.bases:
        value = expressions.evaluate(frame, base)
        if isinstance(value.ref, ClassInfo):
            parents.append(value.ref)
            names.append(value.ref.name)
        else:
            names.append(value.ref if isinstance(value.ref, str) else dotted(base))
    info.bases, info.parents = tuple(names), tuple(parents)
    frame.module.classes.append(info)
    body = Frame(frame.run, frame.module, frame.trace, info.attrs, frame.at, frame.env, info)
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            method = FunctionInfo(statement, frame.module, info, frame.env if frame.at.stack else None)
            info.methods[statement.name] = method
            frame.module.functions.append(method)
            for decorator in statement.decorator_list:
                _decorator(body, decorator)
        else:
            run_block(body, [statement])
    frame.env[node.name] = Value("class", ref=info, thing=Thing(node.name))


def _import(frame: Frame, node: ast.Import) -> None:
    for alias in node.names:
        name = alias.asname or alias.name.partition(".")[0]
        frame.env[name] = Value("external", ref=alias.name if alias.asname else name)
        if frame.run.follows_imports and (alias.asname or "." not in alias.name):
            found = frame.run.project.resolve(frame.module, alias.name)
            if found is not None:
                frame.env[name] = Value("lazy", ref=(found, "", alias.name))


def _import_from(frame: Frame, node: ast.ImportFrom) -> None:
    project = frame.run.project if frame.run.follows_imports else None
    target = project.resolve(frame.module, node.module or "", node.level) if project else None
    for alias in node.names:
        name = alias.asname or alias.name
        if name == "*":
            continue
        path = f"{node.module or ''}.{alias.name}".lstrip(".")
        frame.env[name] = Value("external", ref=path)
        inside = project.resolve(frame.module, f"{node.module or ''}.{alias.name}".lstrip("."), node.level) if project else None
        if inside is not None:  # from package import module
            frame.env[name] = Value("lazy", ref=(inside, "", path))
        elif target is not None:
            frame.env[name] = Value("lazy", ref=(target, alias.name, path))


def _delete(frame: Frame, node: ast.Delete) -> None:
    for target in node.targets:
        frame.env.pop(dotted(target), None)


def _global(frame: Frame, node: ast.Global | ast.Nonlocal) -> None:
    if isinstance(node, ast.Global):
        frame.globals.update(node.names)


def _assert(frame: Frame, node: ast.Assert) -> None:
    expressions.evaluate(frame, node.test)


_STATEMENTS: dict[type, Callable[[Frame, Any], None]] = {
    ast.Assign: _assign, ast.AnnAssign: _ann_assign, ast.AugAssign: _aug_assign, ast.Expr: _expr, ast.Return: _return,
    ast.Raise: _leave, ast.Continue: _leave, ast.Break: _leave, ast.If: _if, ast.For: _for, ast.AsyncFor: _for,
    ast.While: _while, ast.With: _with, ast.AsyncWith: _with, ast.Try: _try, ast.Match: _match, ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function, ast.ClassDef: _class, ast.Import: _import, ast.ImportFrom: _import_from,
    ast.Delete: _delete, ast.Global: _global, ast.Nonlocal: _global, ast.Assert: _assert,
}  # fmt: skip
if hasattr(ast, "TryStar"):
    _STATEMENTS[ast.TryStar] = _try
