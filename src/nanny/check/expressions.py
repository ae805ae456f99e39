"""Evaluates expressions to `Value`s: constants folded, dtypes carried, operations recorded as events."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..formats import FORMATS
from . import calls, statements
from .dtypes import result
from .optable import DTYPES, TENSOR_TYPES
from .regions import Region
from .source import ClassInfo, FunctionInfo, dotted
from .trace import Frame
from .values import HALF, NOTHING, UNKNOWN, Thing, Value, constant, join, tensor

_BINARY: dict[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul",
    ast.FloorDiv: "floor_divide", ast.Mod: "remainder",
}  # fmt: skip
_FOLD: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_INTEGER_NAME = re.compile(r"^(?:position(?:s|_ids)?|pos_ids|input_ids|token_ids|timesteps?|time_steps?|step_ids|indices|idx)$")


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


def attribute(frame: Frame, base: Value, name: str, node: ast.AST) -> Value:
    if base.kind == "external":
        return _external_attribute(f"{base.ref}.{name}")
    if base.kind == "finfo":
        return _finfo(base, name)
    if base.kind == "instance":
        return _instance_attribute(frame, base, name, node)
    if base.kind == "class" and isinstance(base.ref, ClassInfo):
        method = base.ref.find(name)
        found = base.ref.field_of(name)
        return (
            Value("function", ref=method, tags=frozenset({"unbound"}))
            if method
            else found or Value(op=f"class.{name}", ref=base.ref)
        )
    if name == "grad" and base.kind in ("tensor", "", "instance", "module"):
        value = Value("tensor", op="grad", inputs=(base,), line=getattr(node, "lineno", 0), node=node, tags=frozenset({"grad"}))
        return frame.emit("grad_read", node, (base,), out=value)
    if name == "dtype":
        return Value("dtype", const=base.dtype or (base.thing.dtype if base.thing else ""), op="dtype", inputs=(base,))
    if name in ("shape", "ndim"):
        return Value("const" if name == "ndim" else "", dtype="int")
    if name == "type" and base.kind == "device":
        return constant(base.const) if base.const is not NOTHING else UNKNOWN
    if base.kind == "dict" and isinstance(base.ref, dict) and name in base.ref:
        return base.ref[name]
    if base.kind == "tensor":
        return _tensor_attribute(frame, base, name, node)
    if base.thing is not None:
        return _thing_attribute(frame, base, name, node)
    path = dotted(node)
    return frame.unknown(path) if path else Value(thing=Thing(name))


def _external_attribute(path: str) -> Value:
    head, _, last = path.rpartition(".")
    if head == "torch" and last in DTYPES:
        return Value("dtype", const=DTYPES[last])
    if head in ("torch", "torch.cuda") and last in TENSOR_TYPES:
        return Value("dtype", const=TENSOR_TYPES[last], ref=path)
    if head in ("math", "numpy", "np", "torch") and last in ("inf", "pi", "e"):
        return constant({"inf": float("inf"), "pi": 3.141592653589793, "e": 2.718281828459045}[last])
    return Value("external", ref=path)


def _finfo(base: Value, name: str) -> Value:
    known = FORMATS.get(base.const)
    numbers = {
        "min": lambda f: -f.max, "max": lambda f: f.max, "eps": lambda f: f.eps, "tiny": lambda f: f.min_normal,
        "smallest_normal": lambda f: f.min_normal,
    }  # fmt: skip
    if known is None or name not in numbers:
        return Value("const", tags=frozenset({"finfo"}))
    return Value("const", const=numbers[name](known), tags=frozenset({"finfo", f"finfo:{base.const}"}), ref=base)


def _instance_attribute(frame: Frame, base: Value, name: str, node: ast.AST) -> Value:
    owner = base.ref
    method = owner.find(name)
    found = owner.field_of(name)
    if found is not None:
        return found
    if method is not None:
        decorators = {dotted(d.func if isinstance(d, ast.Call) else d) for d in getattr(method.node, "decorator_list", ())}
        if decorators & {"property", "cached_property", "functools.cached_property"}:
            return calls.follow(frame, method, [base], {}, node)
        return Value("function", ref=method, inputs=(base,))
    value = Value(thing=Thing(f"self.{name}"))
    owner.fields[name] = value
    return value


def _tensor_attribute(frame: Frame, base: Value, name: str, node: ast.AST) -> Value:
    if name in ("T", "mT", "H", "data", "real"):
        return replace(base, op="view", inputs=(base,), node=node)
    if name in ("device", "is_cuda"):
        return Value("device" if name == "device" else "")
    if name in ("values", "indices"):
        return replace(base, op="getitem", inputs=(base,)) if name == "values" else tensor("int")
    if base.op == "module_call" and name == "loss":
        return Value("tensor", op="model_loss", inputs=(base,), line=base.line)
    if base.op in ("module_call", "part"):
        return replace(base, op="part", inputs=(base,), node=node)
    return UNKNOWN


def _thing_attribute(frame: Frame, base: Value, name: str, node: ast.AST) -> Value:
    thing = base.thing
    assert thing is not None
    found = thing.attrs.get(name)
    if found is None and isinstance(base.ref, ClassInfo):
        found = base.ref.field_of(name)
    if found is None:
        path = dotted(node)
        known = frame.lookup(path) if path else None
        found = known or Value(thing=Thing(f"{thing.name}.{name}" if thing.name else name))
        thing.attrs[name] = found
    return found


def part_of(frame: Frame, value: Value, position: int, target: ast.AST) -> Value:
    """One item of a value that is unpacked."""
    if value.kind in ("tuple", "list") and position < len(value.inputs):
        return value.inputs[position]
    if value.kind == "tensor":
        return replace(value, op="part" if value.op in ("module_call", "part") else "getitem", inputs=(value,))
    name = dotted(target)
    is_integer = value.dtype == "int" or bool(_INTEGER_NAME.match(name))
    return Value(thing=Thing(name), op="part", inputs=(value,), dtype="int" if is_integer else "", tags=value.tags & {"scaled"})


def element_of(frame: Frame, source: Value, target: ast.AST) -> Value:
    """What a loop over `source` binds."""
    if source.op == "range":
        return Value("", dtype="int", op="loop_index")
    if source.op == "enumerate" and source.inputs:
        inner = element_of(
            frame, source.inputs[0], target.elts[1] if isinstance(target, ast.Tuple) and len(target.elts) == 2 else target
        )
        return Value("tuple", inputs=(Value("", dtype="int", op="loop_index"), inner))
    if source.op == "zip":
        names = target.elts if isinstance(target, ast.Tuple) else []
        return Value("tuple", inputs=tuple(
            element_of(frame, s, names[i] if i < len(names) else target) for i, s in enumerate(source.inputs)
        ))  # fmt: skip
    if source.op in ("parameters", "named_parameters"):
        thing = source.thing
        param = Value("tensor", dtype=thing.dtype if thing else "", op="param", inputs=(source,), thing=Thing("p"), sure=True)
        return Value("tuple", inputs=(UNKNOWN, param)) if source.op == "named_parameters" else param
    if (source.kind in ("list", "tuple") and source.inputs) or (
        source.kind == "module" and source.ref == "ModuleList" and source.inputs
    ):
        value = source.inputs[0]
        for other in source.inputs[1:]:
            value = join(value, other)
        return value
    if source.kind == "tensor" and source.op != "module_call":
        return replace(source, op="getitem", inputs=(source,))
    return Value(thing=Thing(dotted(target)), op="element", inputs=(source,), tags=source.tags & {"scaled", "grad"})


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
    known = truth(node.test, test)
    if known is not None:
        return evaluate(frame, node.body if known else node.orelse)
    saved = frame.at
    from .guards import guards_of

    frame.at = replace(saved, guards=saved.guards + guards_of(frame, node.test, test, True))
    left = evaluate(frame, node.body)
    frame.at = replace(saved, guards=saved.guards + guards_of(frame, node.test, test, False))
    right = evaluate(frame, node.orelse)
    frame.at = saved
    if left.kind == right.kind == "context":
        return _join_contexts(left, right)
    return join(left, right)


def _join_contexts(left: Value, right: Value) -> Value:
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
        return replace(value, dtype="int") if _INTEGER_NAME.match(index.const) and not value.dtype else value
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
    saved, env = frame.at, frame.env
    frame.env = env.copy()
    source = UNKNOWN
    for generator in node.generators:
        source = evaluate(frame, generator.iter)
        frame.at = frame.inside(loops=(*frame.at.loops, node))
        statements.assign(frame, generator.target, element_of(frame, source, generator.target))
        for test in generator.ifs:
            evaluate(frame, test)
    if isinstance(node, ast.DictComp):
        evaluate(frame, node.key)
        item = evaluate(frame, node.value)
        out = Value("dict", ref={"*": item})
    else:
        item = evaluate(frame, node.elt)
        out = Value(
            "",
            op="comprehension",
            inputs=(item,),
            dtype=item.dtype,
            why=item.why,
            line=item.line,
            tags=item.tags,
            thing=item.thing,
        )
    frame.env, frame.at = env, saved
    return out


def _lambda(frame: Frame, node: ast.Lambda) -> Value:
    info = FunctionInfo(node, frame.module, None, frame.env)
    return Value("function", ref=info)


def _joined(frame: Frame, node: ast.JoinedStr) -> Value:
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            evaluate(frame, part.value)
    return Value("const")


def _wrapped(frame: Frame, node: ast.Starred | ast.Await | ast.YieldFrom | ast.Yield) -> Value:
    return evaluate(frame, node.value)


def _walrus(frame: Frame, node: ast.NamedExpr) -> Value:
    value = evaluate(frame, node.value)
    statements.assign(frame, node.target, value)
    return value


def truth(test: ast.expr, value: Value) -> bool | None:
    """The outcome of a test if the code itself fixes it."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.Compare) and dotted(test.left) == "__name__":
        return True
    if dotted(test).endswith("TYPE_CHECKING"):
        return False
    if isinstance(test, ast.Compare) and value.kind == "const" and isinstance(value.const, bool):
        return value.const
    return None


def narrow(frame: Frame, test: ast.expr, arm: bool) -> None:
    """Takes over what `if x.dtype == torch.float16` or `if isinstance(m, nn.LayerNorm)` says."""
    if isinstance(test, ast.Call):
        _narrow_class(frame, test, arm)
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Attribute)):
        return
    path = dotted(test.left.value)
    if test.left.attr != "dtype" or not path:
        return
    value = evaluate(frame, test.left.value)
    wanted = evaluate(frame, test.comparators[0])
    names = {v.const for v in (wanted.inputs or (wanted,)) if v.kind == "dtype"}
    holds = arm is isinstance(test.ops[0], (ast.Eq, ast.In, ast.Is))
    if holds and len(names) == 1:
        only = names.pop()
        frame.env[path] = replace(value, kind="tensor", dtype=only, why=f"tested at line {test.lineno}", line=test.lineno)
    elif value.dtype in names or (not holds and value.is_half):
        frame.env[path] = replace(value, dtype="")


def _narrow_class(frame: Frame, test: ast.Call, arm: bool) -> None:
    if dotted(test.func) != "isinstance" or len(test.args) != 2 or not arm:
        return
    path = dotted(test.args[0])
    wanted = evaluate(frame, test.args[1])
    names = [
        v.ref.rpartition(".")[2] for v in (wanted.inputs or (wanted,)) if v.kind == "external" and v.ref.startswith("torch.nn.")
    ]
    if path and names:
        known = evaluate(frame, test.args[0])
        frame.env[path] = replace(known, kind="module", ref=names[0], thing=known.thing or Thing(path, "module"))


_EXPRESSIONS: dict[type, Callable[[Frame, Any], Value]] = {
    ast.Constant: _constant, ast.Name: _name, ast.Attribute: _attribute, ast.BinOp: _binop, ast.UnaryOp: _unary,
    ast.BoolOp: _boolop, ast.Compare: _compare, ast.IfExp: _ifexp, ast.Subscript: _subscript, ast.Slice: _slice,
    ast.Tuple: _sequence, ast.List: _sequence, ast.Set: _sequence, ast.Dict: _dict, ast.ListComp: _comprehension,
    ast.SetComp: _comprehension, ast.GeneratorExp: _comprehension, ast.DictComp: _comprehension, ast.Lambda: _lambda,
    ast.JoinedStr: _joined, ast.Starred: _wrapped, ast.Await: _wrapped, ast.Yield: _wrapped, ast.YieldFrom: _wrapped,
    ast.NamedExpr: _walrus, ast.Call: lambda frame, node: calls.call(frame, node),
}  # fmt: skip
