"""Conditions of branches, as keys that let two branches be recognised as the same question."""

from __future__ import annotations

import ast
import re
from functools import cache

from .source import dotted
from .trace import Frame, Guard
from .values import Value

_AMP = re.compile(
    r"scaler|(?:^|_)amp(?:_|$)|fp16|float16|grad_?scal|loss_?scal|(?:^|_)half(?:_|$)|mixed_prec|autocast|use_mp$|_mp$", re.I
)
AMP = "amp"  # the one key for "is mixed precision (with its scaler) on"


@cache
def is_amp_name(path: str) -> bool:
    return bool(_AMP.search(path.rpartition(".")[2])) or (path.endswith("is_enabled") and bool(_AMP.search(path)))


def guards_of(frame: Frame, test: ast.expr, value: Value, arm: bool) -> tuple[Guard, ...]:
    """What is known to hold on the true (or false) arm of an `if` with this test."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return guards_of(frame, test.operand, value, not arm)
    if isinstance(test, ast.BoolOp):
        every = isinstance(test.op, ast.And) == arm  # all parts hold (and, true arm) or all fail (or, false arm)
        is_modulo = "modulo" in value.tags
        whole = ("mod:" if is_modulo else "") + _text(test), arm
        if every:
            return (*(g for part in test.values for g in guards_of(frame, part, value, arm)), whole)
        return (whole,)
    return (_simple(frame, test, value, arm),)


def _simple(frame: Frame, test: ast.expr, value: Value, arm: bool) -> Guard:
    if isinstance(test, ast.Call):
        path = dotted(test.func)
        return (AMP, arm) if path and is_amp_name(path) else (_opaque(test, "modulo" in value.tags), arm)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compare(frame, test, value, arm)
    path = _path(test)
    if not path:
        return _opaque(test, "modulo" in value.tags), arm
    if is_amp_name(path) or _is_scaler(frame, path, value):
        return AMP, arm
    known = frame.lookup(path)
    if known is not None and "modulo" in known.tags:  # the same test under another name is the same guard
        return "mod:" + (_text(known.node) if known.node is not None else path), arm
    return ("mod:" if path.endswith("sync_gradients") else "") + path, arm


def _is_scaler(frame: Frame, path: str, value: Value) -> bool:
    """Whether a test asks for the scaler itself: `if gs`, `gs is not None`."""
    thing = value.thing
    return value.kind == "scaler" or (thing is not None and thing.kind == "scaler") or frame.module.uses_as_scaler(path)


def _compare(frame: Frame, test: ast.Compare, value: Value, arm: bool) -> Guard:
    path, op, other = _path(test.left), test.ops[0], test.comparators[0]
    is_negative = isinstance(op, (ast.Is, ast.Eq)) == (isinstance(other, ast.Constant) and other.value in (None, False))
    if path and isinstance(op, (ast.Is, ast.IsNot)):
        asked = value.inputs[0] if value.inputs else value
        return (AMP if is_amp_name(path) or _is_scaler(frame, path, asked) else path), arm is not is_negative
    if path and is_amp_name(path) and isinstance(op, (ast.Eq, ast.NotEq)):
        text = _text(other)
        means_half = "16" in text or "half" in text or text == "True" or "amp" in text
        return AMP, arm is (means_half is isinstance(op, ast.Eq))
    return _opaque(test, "modulo" in value.tags or _has_modulo(test)), arm


def window_guard(frame: Frame, node: ast.If, arm: bool) -> tuple[Guard, ...]:
    """A guard of its own for an `if` that ends a window: it tests a counter or a queue, and sets that back inside.

    `if len(queue) == k: ...; queue.clear()`, `if micro == k: ...; micro = 0`, `if not pending: ...; pending = k`.
    """
    if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], (ast.Is, ast.IsNot)):
        return ()  # `if x is None: x = ...` fills in a default
    around = frame.at.loops[-1] if frame.at.loops else frame.at.stack[-1].node if frame.at.stack else None
    if around is None:
        return ()
    reset = _reset(node)
    if not reset or not reset & _grown(around):
        return ()
    return (("mod:" + _text(node.test), arm),)


def _reset(node: ast.If) -> set[str]:
    """Names that the `if` tests and sets back right in its body; kept on the node, which is met whenever its function is."""
    known: set[str] | None = getattr(node, "reset", None)
    if known is None:
        direct = [s for s in node.body if isinstance(s, (ast.Assign, ast.Expr))]
        known = {name for statement in direct for name in _changed(statement, (ast.Assign, ast.Call), "clear")} - {""}
        if known:
            known &= {dotted(n) for n in ast.walk(node.test) if isinstance(n, (ast.Name, ast.Attribute))}
        node.reset = known  # type: ignore[attr-defined]
    return known


def _grown(around: ast.AST) -> set[str]:
    """Names that are counted up or appended to somewhere in a loop or function; kept on its node."""
    known: set[str] | None = getattr(around, "grown", None)
    if known is None:
        known = set(_changed(around, (ast.AugAssign, ast.Call), "append"))
        around.grown = known  # type: ignore[attr-defined]
    return known


def _changed(tree: ast.AST, kinds: tuple[type[ast.AST], ...], method: str) -> list[str]:
    """Names that are assigned, or whose `method` is called, somewhere in a piece of code."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, kinds):
            continue
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == method:
                found.append(dotted(node.func.value))
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
            found += [dotted(t) for target in targets for t in ast.walk(target)]
    return found


def _path(test: ast.expr) -> str:
    """`args.fp16`, also for `args["fp16"]`."""
    if isinstance(test, ast.Subscript) and isinstance(test.slice, ast.Constant) and isinstance(test.slice.value, str):
        base = dotted(test.value)
        return f"{base}.{test.slice.value}" if base else ""
    return dotted(test)


def _has_modulo(test: ast.AST) -> bool:
    return "%" in _text(test)


def _text(test: ast.AST) -> str:
    """The test's source, kept on the node: the same branch is met again whenever its function is followed."""
    known: str | None = getattr(test, "text", None)
    if known is None:
        known = ast.unparse(test)
        test.text = known  # type: ignore[attr-defined]
    return known


def _opaque(test: ast.expr, is_modulo: bool) -> str:
    return "mod:" + _text(test) if is_modulo or _has_modulo(test) else _text(test)
