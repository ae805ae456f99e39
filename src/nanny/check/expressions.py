"""Evaluates expressions to `Value`s: constants folded, dtypes carried, operations recorded as events."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import branches, calls, sequences, statements
from .attributes import INTEGER_NAME, attribute
from .dtypes import result
from .guards import guards_of
from .regions import Region
from .source import FunctionInfo, dotted
from .trace import Frame
from .values import HALF, NOTHING, UNKNOWN, Thing, Value, constant, join

_BINARY: dict[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul",
    ast.FloorDiv: "floor_divide", ast.Mod: "remainder",
}  # fmt: skip
_FOLD: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def evaluate(frame: Frame, node: ast.AST | None) -> Value:
    handler = _EXPRESSIONS.get(type(node))
    return handler(frame, node) if handler else UNKNOWN


def _constant(frame: Frame, node: ast.Constant) -> Value:
    return Value("const", const=node.value, node=node)


def _name(frame: Frame, node: ast.Name) -> Value:
    found = frame.lookup(node.id)
    if found is None:
        if node.id in _BUILTINS:
            return Value("external", ref=f"builtins.{node.id}")
        return frame.unknown(node.id)
    return calls.resolve_lazy(frame, found, node.id) if found.kind == "lazy" else found


_BUILTINS = frozenset(
    [
        "float",
        "int",
        "abs",
        "min",
        "max",
        "sum",
        "len",
        "range",
        "enumerate",
        "zip",
        "list",
        "tuple",
        "dict",
        "isinstance",
        "getattr",
        "hasattr",
        "print",
        "sorted",
        "map",
        "filter",
        "any",
        "all",
        "str",
        "bool",
        "set",
        "super",
        "type",
        "round",
        "pow",
        "iter",
        "next",
        "reversed",
        "setattr",
    ]
)


def _attribute(frame: Frame, node: ast.Attribute) -> Value:
    base = evaluate(frame, node.value)
    return attribute(frame, base, node.attr, node)


def binary(frame: Frame, node: ast.AST, op: ast.operator, left: Value, right: Value, *, in_place: bool = False) -> Value:
    if left.is_number and right.is_number and type(op) in _FOLD:
        return _fold(op, left, right)
    if isinstance(op, ast.Add) and left.kind in ("list", "tuple") and left.kind == right.kind:
        return replace(left, inputs=left.inputs + right.inputs)
    name = _BINARY.get(type(op), "bitop")
    if in_place and name in ("add", "sub", "mul", "div") and left.kind == "tensor":
        out = replace(left, op=name, inputs=(left, right), node=node, tags=left.tags | (right.tags & {"scaled"}))
    elif "tensor" in (left.kind, right.kind) or name == "matmul":
        out = result(frame, name, node, (left, right), {})
    else:
        out = replace(result(frame, name, node, (left, right), {}), kind="", dtype="")
    if ("loop_index" in (left.op, right.op) and name == "remainder") or "modulo" in left.tags | right.tags:
        out = replace(out, tags=out.tags | {"modulo"})
    if (
        frame.at.regions
        or out.is_half
        or left.is_half
        or right.is_half
        or out.tags & {"scaled", "unscaled"}
        or "grad" in left.tags | right.tags
    ):
        frame.emit(name, node, (left, right), out=out)
    return out


def _fold(op: ast.operator, left: Value, right: Value) -> Value:
    try:
        if isinstance(op, ast.Pow) and abs(right.const) > 512:
            return Value("const")
        return Value("const", const=_FOLD[type(op)](left.const, right.const), tags=(left.tags | right.tags) & {"finfo"})
    except (ArithmeticError, ValueError, TypeError):
        return Value("const")


def _binop(frame: Frame, node: ast.BinOp) -> Value:
    return binary(frame, node, node.op, evaluate(frame, node.left), evaluate(frame, node.right))


def _unary(frame: Frame, node: ast.UnaryOp) -> Value:
    value = evaluate(frame, node.operand)
    if isinstance(node.op, ast.USub):
        if value.is_number:
            return replace(value, const=-value.const)
        return replace(value, op="neg", inputs=(value,), node=node) if value.kind == "tensor" else value
    if isinstance(node.op, ast.Not):
        return constant(not value.const) if value.const is not NOTHING else Value(tags=value.tags & {"modulo"})
    return value


def _boolop(frame: Frame, node: ast.BoolOp) -> Value:
    values = [evaluate(frame, v) for v in node.values]
    out = values[0]
    for value in values[1:]:
        out = join(out, value)
    return replace(out, tags=out.tags | frozenset(t for v in values for t in v.tags if t == "modulo"))


def _compare(frame: Frame, node: ast.Compare) -> Value:
    left = evaluate(frame, node.left)
    others = [evaluate(frame, c) for c in node.comparators]
    tags = {"modulo"} if any("modulo" in v.tags or v.op == "remainder" for v in (left, *others)) else set()
    if left.kind == "dtype" or any(o.kind == "dtype" for o in others):
        tags.add("dtype_test")
    if len(others) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        a, b = left.const, others[0].const
        if isinstance(a, str) and isinstance(b, str) and a and b and "half" not in (a, b):
            return constant((a == b) is isinstance(node.ops[0], ast.Eq))
    return Value(
        "tensor" if left.kind == "tensor" else "",
        dtype="bool",
        op="compare",
        inputs=(left, *others),
        tags=frozenset(tags),
        node=node,
    )


def _ifexp(frame: Frame, node: ast.IfExp) -> Value:
    test = evaluate(frame, node.test)
    known = branches.truth(node.test, test)
    if known is not None:
        return evaluate(frame, node.body if known else node.orelse)
    saved = frame.at
    frame.at = replace(saved, guards=saved.guards + guards_of(frame, node.test, test, True))
    left = evaluate(frame, node.body)
    frame.at = replace(saved, guards=saved.guards + guards_of(frame, node.test, test, False))
    right = evaluate(frame, node.orelse)
    frame.at = saved
    if left.kind == right.kind == "context":
        return join_contexts(left, right)
    return join(left, right)


def join_contexts(left: Value, right: Value) -> Value:
    both = [v.ref for v in (left, right) if isinstance(v.ref, Region)]
    tags = left.tags & right.tags
    if len(both) == 1:
        return Value("context", ref=replace(both[0], enabled=None if both[0].enabled else both[0].enabled), tags=tags)
    if len(both) == 2 and both[0].dtype != both[1].dtype:
        kind = "half" if {both[0].dtype, both[1].dtype} <= HALF else both[0].dtype
        return Value(
            "context",
            ref=replace(both[0], dtype=kind, device=both[0].device if both[0].device == both[1].device else ""),
            tags=tags,
        )
    return replace(left, tags=tags)


def _subscript(frame: Frame, node: ast.Subscript) -> Value:
    base = evaluate(frame, node.value)
    index = evaluate(frame, node.slice)
    if base.kind in ("tuple", "list") and isinstance(index.const, int) and -len(base.inputs) <= index.const < len(base.inputs):
        return base.inputs[index.const]
    if base.kind == "module" and base.inputs:
        if base.ref == "ModuleList" and isinstance(index.const, int) and -len(base.inputs) <= index.const < len(base.inputs):
            return base.inputs[index.const]
        return base if index.kind == "slice" else base.inputs[0]
    if base.kind == "dict" and isinstance(base.ref, dict) and index.const is not NOTHING and index.const in base.ref:
        return base.ref[index.const]
    if base.kind == "dict" and isinstance(base.ref, dict) and "*" in base.ref:  # made by a comprehension: all items are alike
        return base.ref["*"]
    if base.kind == "dict" and isinstance(base.ref, dict) and base.ref and index.const is NOTHING:
        values = [v for v in base.ref.values() if isinstance(v, Value)]
        if values and all(v.kind in ("dtype", "const") for v in values):  # {"fp16": torch.float16, ...}[args.dtype]
            out = values[0]
            for value in values[1:]:
                out = join(out, value)
            return out
    if base.kind == "tensor":
        name = "part" if base.op in ("module_call", "part") else "getitem"
        if name == "part" and index.const == "loss":
            return Value("tensor", op="model_loss", inputs=(base,), line=base.line)
        return replace(base, op=name, inputs=(base, index), node=node)
    path = dotted(node.value)
    if path and isinstance(index.const, str):
        value = frame.unknown(f"{path}[{index.const}]")
        return replace(value, dtype="int") if INTEGER_NAME.match(index.const) and not value.dtype else value
    if base.thing is not None and base.thing.dtype:
        return Value(thing=base.thing)
    return Value(thing=Thing(""), op="getitem", inputs=(base,), tags=base.tags & {"scaled", "grad"})


def _slice(frame: Frame, node: ast.Slice) -> Value:
    for part in (node.lower, node.upper, node.step):
        if part is not None:
            evaluate(frame, part)
    return Value("slice")


def _sequence(frame: Frame, node: ast.Tuple | ast.List | ast.Set) -> Value:
    items = tuple(evaluate(frame, e) for e in node.elts)
    return Value("tuple" if isinstance(node, ast.Tuple) else "list", inputs=items, node=node)


def _dict(frame: Frame, node: ast.Dict) -> Value:
    items: dict[Any, Value] = {}
    for key, value in zip(node.keys, node.values):
        item = evaluate(frame, value)
        if key is None:
            if item.kind == "dict" and isinstance(item.ref, dict):
                items.update(item.ref)
            else:
                items["**"] = item
            continue
        name = evaluate(frame, key).const
        try:
            items[name if name is not NOTHING else f"?{value.lineno}:{value.col_offset}"] = item
        except TypeError:
            continue
    return frame.emit(
        "dict", node, (), {k: v for k, v in items.items() if isinstance(k, str)}, Value("dict", ref=items, node=node)
    )


def _comprehension(frame: Frame, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
    return sequences.comprehension(frame, node)


def _lambda(frame: Frame, node: ast.Lambda) -> Value:
    info = FunctionInfo(node, frame.module, None, frame.env)
    return Value("function", ref=info)


def _joined(frame: Frame, node: ast.JoinedStr) -> Value:
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            evaluate(frame, part.value)
    return Value("const")


def _wrapped(frame: Frame, node: ast.Starred | ast.Await | ast.YieldFrom) -> Value:
    return evaluate(frame, node.value)


def _yield(frame: Frame, node: ast.Yield) -> Value:
    frame.yields.append(frame.at)
    return evaluate(frame, node.value)


def _walrus(frame: Frame, node: ast.NamedExpr) -> Value:
    value = evaluate(frame, node.value)
    statements.assign(frame, node.target, value)
    return value


_EXPRESSIONS: dict[type, Callable[[Frame, Any], Value]] = {
    ast.Constant: _constant, ast.Name: _name, ast.Attribute: _attribute, ast.BinOp: _binop, ast.UnaryOp: _unary,
    ast.BoolOp: _boolop, ast.Compare: _compare, ast.IfExp: _ifexp, ast.Subscript: _subscript, ast.Slice: _slice,
    ast.Tuple: _sequence, ast.List: _sequence, ast.Set: _sequence, ast.Dict: _dict, ast.ListComp: _comprehension,
    ast.SetComp: _comprehension, ast.GeneratorExp: _comprehension, ast.DictComp: _comprehension, ast.Lambda: _lambda,
    ast.JoinedStr: _joined, ast.Starred: _wrapped, ast.Await: _wrapped, ast.Yield: _yield, ast.YieldFrom: _wrapped,
    ast.NamedExpr: _walrus, ast.Call: lambda frame, node: calls.call(frame, node),
}  # fmt: skip
