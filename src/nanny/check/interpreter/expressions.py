"""What an expression is worth: one function for each kind of node, entered in `EXPRESSIONS`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from . import attributes, calls, contexts, guards, imports
from .dtypes import result
from .source import OwnFunction
from .trace import Frame, Walk
from .uses import dotted_name
from .values import NOTHING, UNKNOWN, Kwargs, Thing, Value, constant, join, replace

_BINARY: dict[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul",
    ast.FloorDiv: "floor_divide", ast.Mod: "remainder",
}  # fmt: skip


_FOLD: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


_BUILTINS = frozenset(
    ("abs", "all", "any", "bool", "dict", "enumerate", "filter", "float", "getattr", "hasattr", "int", "isinstance", "iter",
     "len", "list", "map", "max", "min", "next", "pow", "print", "range", "reversed", "round", "set", "setattr", "sorted", "str",
     "sum", "super", "tuple", "type", "zip")
)  # fmt: skip


def _fold(op: ast.operator, left: Value, right: Value) -> Value:
    try:
        if isinstance(op, ast.Pow) and abs(right.const) > 512:
            return Value("const")
        return Value("const", const=_FOLD[type(op)](left.const, right.const), tags=(left.tags | right.tags) & {"finfo"})
    except (ArithmeticError, ValueError, TypeError):
        return Value("const")


def value_constant(walk: Walk, frame: Frame, node: ast.Constant) -> Value:
    frame.mark(node)
    return Value("const", const=node.value, node=node)


def value_name(walk: Walk, frame: Frame, node: ast.Name) -> Value:
    found = frame.lookup(node.id)
    if found is None:
        if node.id in _BUILTINS:
            return Value("external", ref=f"builtins.{node.id}")
        return frame.unknown(node.id)
    return imports.resolve_lazy(walk, frame, found, node.id) if found.kind == "lazy" else found


def value_attribute(walk: Walk, frame: Frame, node: ast.Attribute) -> Value:
    base = walk.evaluate(frame, node.value)
    return attributes.attribute(walk, frame, base, node.attr, node)


def binary(frame: Frame, node: ast.AST, op: ast.operator, left: Value, right: Value, *, in_place: bool = False) -> Value:
    if left.is_number and right.is_number and type(op) in _FOLD:
        return _fold(op, left, right)
    if isinstance(op, ast.Add) and left.kind in ("list", "tuple") and left.kind == right.kind:
        return replace(left, inputs=left.inputs + right.inputs)
    name = _BINARY.get(type(op), "bitop")
    if in_place and name != "matmul" and left.kind == "tensor":
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


def value_binop(walk: Walk, frame: Frame, node: ast.BinOp) -> Value:
    return binary(frame, node, node.op, walk.evaluate(frame, node.left), walk.evaluate(frame, node.right))


def value_unaryop(walk: Walk, frame: Frame, node: ast.UnaryOp) -> Value:
    value = walk.evaluate(frame, node.operand)
    if isinstance(node.op, ast.USub):
        if value.is_number:
            return replace(value, const=-value.const)
        return replace(value, op="neg", inputs=(value,), node=node) if value.kind == "tensor" else value
    if isinstance(node.op, ast.Not):
        if value.const is NOTHING:
            return Value(tags=value.tags & {"modulo"})
        return replace(constant(not value.const), tags=value.tags & {"written"})
    return value


def value_boolop(walk: Walk, frame: Frame, node: ast.BoolOp) -> Value:
    frame.asked[node] = values = [walk.evaluate(frame, v) for v in node.values]
    decides = isinstance(node.op, ast.Or)
    if any(value.kind == "const" and value.const is decides for value in values):
        return constant(decides)
    if not decides and all(value.kind == "context" for value in values):
        return values[-1]  # `with autocast() and no_grad()` enters the last alone
    out = values[0]
    for value in values[1:]:
        out = join(out, value)
    tags = out.tags | frozenset(t for v in values for t in v.tags if t == "modulo")
    return replace(out, tags=tags, node=node if "dtype_test" in tags else out.node)


def value_compare(walk: Walk, frame: Frame, node: ast.Compare) -> Value:
    left = walk.evaluate(frame, node.left)
    others = [walk.evaluate(frame, c) for c in node.comparators]
    tags = {"modulo"} if any("modulo" in v.tags or v.op == "remainder" for v in (left, *others)) else set()
    if left.kind == "dtype" or any(o.kind == "dtype" for o in others):
        tags.add("dtype_test")
    if len(others) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        a, b = left.const, others[0].const
        if {left.kind, others[0].kind} == {"dtype", "const"} and isinstance(a, str) and isinstance(b, str):
            return constant(isinstance(node.ops[0], ast.NotEq))  # `dtype == "float16"`: a dtype is no text
        is_open = "default" in left.tags | others[0].tags or any(v.kind == "dtype" and v.const == "half" for v in (left, *others))
        if not is_open and isinstance(a, str) and isinstance(b, str) and a and b:
            return constant((a == b) is isinstance(node.ops[0], ast.Eq))
    if len(others) == 1 and others[0].is_none and isinstance(node.ops[0], (ast.Is, ast.IsNot)):  # what the caller gives
        is_text = left.kind == "const" and isinstance(left.const, str) and left.sure and "default" not in left.tags
        if is_text or "left_out" in left.tags:
            return constant(isinstance(node.ops[0], ast.IsNot) is is_text)
    return Value(
        "tensor" if left.kind == "tensor" else "",
        dtype="bool",
        op="compare",
        inputs=(left, *others),
        tags=frozenset(tags),
        node=node,
    )


def value_ifexp(walk: Walk, frame: Frame, node: ast.IfExp) -> Value:
    test = walk.evaluate(frame, node.test)
    known = guards.truth(frame, node.test, test)
    if known is not None:
        return walk.evaluate(frame, node.body if known else node.orelse)
    saved = frame.at
    yes, no = guards.arms_of(frame, node.test, test)
    frame.at = replace(saved, guards=saved.guards + yes)
    left = walk.evaluate(frame, node.body)
    frame.at = replace(saved, guards=saved.guards + no)
    right = walk.evaluate(frame, node.orelse)
    frame.at = saved
    if left.kind == right.kind == "context":
        return contexts.join_contexts(left, right)
    out = join(left, right)
    if out.kind == "dtype" and left.is_none is not right.is_none:  # this format, or whatever the call gives by itself
        out = replace(out, sure=False)
    return out


def value_subscript(walk: Walk, frame: Frame, node: ast.Subscript) -> Value:
    base = walk.evaluate(frame, node.value)
    index = walk.evaluate(frame, node.slice)
    if base.kind in ("tuple", "list") and isinstance(index.const, int) and -len(base.inputs) <= index.const < len(base.inputs):
        return base.inputs[index.const]
    if base.kind == "module" and base.inputs:
        if (
            base.ref in ("ModuleList", "Sequential")
            and isinstance(index.const, int)
            and -len(base.inputs) <= index.const < len(base.inputs)
        ):
            return base.inputs[index.const]
        return base if index.kind == "slice" else base.inputs[0]
    is_known = index.const is not NOTHING and "default" not in index.tags
    if base.kind == "dict" and isinstance(base.ref, dict) and is_known and index.const in base.ref:
        return base.ref[index.const]
    if (
        base.kind == "dict" and isinstance(base.ref, dict) and "*" in base.ref and "**" not in base.ref
    ):  # made by a comprehension: all items are alike
        return base.ref["*"]
    if base.kind == "dict" and isinstance(base.ref, dict) and base.ref and (not is_known or index.const == ""):
        values = [v for v in base.ref.values() if isinstance(v, Value)]
        if len(values) == 1:  # a registry of one
            return values[0]
        if values and all(v.kind in ("dtype", "const") for v in values):  # {"fp16": torch.float16, ...}[args.dtype]
            out = values[0]
            for value in values[1:]:
                out = join(out, value)
            return out
        if isinstance(index.const, str) and index.const in base.ref:  # LOSSES[args.loss], as it is if nobody asks for another
            return replace(base.ref[index.const], sure=False)
    if base.kind == "tensor":
        name = "part" if base.op in ("module_call", "part") else "getitem"
        if name == "part" and index.const == "loss":
            return Value("tensor", op="model_loss", inputs=(base,), line=base.line)
        return replace(base, op=name, inputs=(base, index), node=node)
    path = dotted_name(node.value)
    if path and isinstance(index.const, str):
        found = frame.unknown(f"{path}[{index.const}]")
        return found if found.kind or found.op else replace(found, op="key", ref=index.const, inputs=(base,))
    if base.thing is not None and base.thing.dtype:
        return Value(thing=base.thing)
    return Value(thing=Thing(""), op="getitem", inputs=(base,), tags=base.tags & {"scaled", "grad"})


def value_slice(walk: Walk, frame: Frame, node: ast.Slice) -> Value:
    for part in (node.lower, node.upper, node.step):
        if part is not None:
            walk.evaluate(frame, part)
    return Value("slice")


def value_sequence(walk: Walk, frame: Frame, node: ast.Tuple | ast.List | ast.Set) -> Value:
    items = tuple(walk.evaluate(frame, e) for e in node.elts)
    return Value("tuple" if isinstance(node, ast.Tuple) else "list", inputs=items, node=node)


def value_dict(walk: Walk, frame: Frame, node: ast.Dict) -> Value:
    items: dict[Any, Value] = {}
    for key, value in zip(node.keys, node.values):
        item = walk.evaluate(frame, value)
        if key is None:
            if item.kind == "dict" and isinstance(item.ref, dict):
                items.update(item.ref)
            else:
                items["**"] = item
            continue
        name = walk.evaluate(frame, key).const
        try:
            items[name if name is not NOTHING else f"?{value.lineno}:{value.col_offset}"] = item
        except TypeError:
            continue
    return frame.emit(
        "dict", node, (), {k: v for k, v in items.items() if isinstance(k, str)}, Value("dict", ref=items, node=node)
    )


def value_lambda(walk: Walk, frame: Frame, node: ast.Lambda) -> Value:
    info = OwnFunction(node, frame.module, None, frame.env)
    is_entry = not any(ast.iter_child_nodes(node.args))  # whoever it is given to calls it: `bench(lambda: loss.backward())`
    (frame.module.functions if is_entry else frame.module.lambdas).append(info)
    return Value("function", ref=info)


def value_joinedstr(walk: Walk, frame: Frame, node: ast.JoinedStr) -> Value:
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            walk.evaluate(frame, part.value)
    return Value("const")


def value_wrapped(walk: Walk, frame: Frame, node: ast.Starred | ast.Await | ast.YieldFrom) -> Value:
    return walk.evaluate(frame, node.value)


def value_yield(walk: Walk, frame: Frame, node: ast.Yield) -> Value:
    frame.yields.append(frame.at)
    return walk.evaluate(frame, node.value)


def value_namedexpr(walk: Walk, frame: Frame, node: ast.NamedExpr) -> Value:
    value = walk.evaluate(frame, node.value)
    walk.assign(frame, node.target, value)
    return value


def value_comprehension(walk: Walk, frame: Frame, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
    saved = frame.at
    frame.env.begin()
    first = node.generators[0]
    source = walk.evaluate(frame, first.iter)
    known = attributes.objects_in(source) if len(node.generators) == 1 and not first.ifs else ()
    if isinstance(node, ast.DictComp) and known:
        items: dict[Any, Value] = {}
        for element in known:
            walk.assign(frame, first.target, element)
            name = walk.evaluate(frame, node.key).const
            items[name if name is not NOTHING else f"?{len(items)}"] = walk.evaluate(frame, node.value)
        frame.env.take_back()
        return Value("dict", ref=items, node=node)
    for generator in node.generators:
        source = source if generator is first else walk.evaluate(frame, generator.iter)
        frame.at = frame.inside(loops=(*frame.at.loops, node))
        walk.assign(frame, generator.target, attributes.element_of(frame, source, generator.target))
        for test in generator.ifs:
            walk.evaluate(frame, test)
    if isinstance(node, ast.DictComp):
        walk.evaluate(frame, node.key)
        item = walk.evaluate(frame, node.value)
        is_chosen = any(generator.ifs for generator in node.generators)  # whether an item is in it, the program decides
        out = Value("dict", ref={"*": replace(item, sure=False) if is_chosen else item})
    else:
        out = attributes.comprehension_of(walk.evaluate(frame, node.elt))
    frame.env.take_back()
    frame.at = saved
    return out


def value_call(walk: Walk, frame: Frame, node: ast.Call) -> Value:
    args: list[Value] = []
    for argument in node.args:
        value = walk.evaluate(frame, argument)
        if isinstance(argument, ast.Starred) and value.kind in ("tuple", "list"):
            args.extend(value.inputs)
        else:
            args.append(value)
    if isinstance(node.func, ast.Attribute):
        receiver = _receiver(walk, frame, node.func)
    else:
        receiver = None
    kwargs = _keywords(walk, frame, node)
    if receiver is not None and isinstance(node.func, ast.Attribute):
        return calls.call_method(walk, frame, node, receiver, node.func.attr, args, kwargs)
    return calls.call_value(walk, frame, node, walk.evaluate(frame, node.func), args, kwargs)


def _receiver(walk: Walk, frame: Frame, func: ast.Attribute) -> Value | None:
    if isinstance(func.value, ast.Call) and dotted_name(func.value.func) == "super" and frame.owner is not None:
        return Value("super", ref=frame.owner, inputs=(frame.env.get("self", UNKNOWN),))
    return walk.evaluate(frame, func.value)


def _keywords(walk: Walk, frame: Frame, node: ast.Call) -> dict[str, Value]:
    kwargs: Kwargs = {}
    for keyword in node.keywords:
        value = walk.evaluate(frame, keyword.value)
        if keyword.arg is not None:
            kwargs[keyword.arg] = value
        elif value.kind == "dict" and isinstance(value.ref, dict):
            kwargs.update({k: v for k, v in value.ref.items() if isinstance(k, str) and isinstance(v, Value)})
    return kwargs


EXPRESSIONS: dict[type[ast.AST], Callable[..., Value]] = {
    ast.Constant: value_constant, ast.Name: value_name, ast.Attribute: value_attribute, ast.Call: value_call,
    ast.BinOp: value_binop, ast.UnaryOp: value_unaryop, ast.BoolOp: value_boolop, ast.Compare: value_compare,
    ast.IfExp: value_ifexp, ast.Subscript: value_subscript, ast.Slice: value_slice, ast.Dict: value_dict,
    ast.Lambda: value_lambda, ast.JoinedStr: value_joinedstr, ast.Yield: value_yield, ast.NamedExpr: value_namedexpr,
    **dict.fromkeys((ast.Tuple, ast.List, ast.Set), value_sequence),
    **dict.fromkeys((ast.Starred, ast.Await, ast.YieldFrom), value_wrapped),
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp), value_comprehension),
}  # fmt: skip
