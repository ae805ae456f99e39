"""Comprehensions, generator expressions and `map`: many values made alike, known by one of them."""

from __future__ import annotations

import ast

from . import attributes, calls, expressions, statements
from .trace import Frame
from .values import UNKNOWN, Value


def comprehension(frame: Frame, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
    saved, env = frame.at, frame.env
    frame.env = env.copy()
    source = UNKNOWN
    for generator in node.generators:
        source = expressions.evaluate(frame, generator.iter)
        frame.at = frame.inside(loops=(*frame.at.loops, node))
        statements.assign(frame, generator.target, attributes.element_of(frame, source, generator.target))
        for test in generator.ifs:
            expressions.evaluate(frame, test)
    if isinstance(node, ast.DictComp):
        expressions.evaluate(frame, node.key)
        out = Value("dict", ref={"*": expressions.evaluate(frame, node.value)})
    else:
        out = _alike(expressions.evaluate(frame, node.elt))
    frame.env, frame.at = env, saved
    return out


def mapped(frame: Frame, node: ast.Call, args: list[Value]) -> Value:
    """`map(f, xs)`: f is called once, on an element of xs."""
    if len(args) < 2 or len(node.args) != len(args):
        return Value("", op="call:map", inputs=tuple(args))
    saved = frame.at
    frame.at = frame.inside(loops=(*saved.loops, node))
    made = ast.copy_location(ast.Call(func=node.args[0], args=node.args[1:], keywords=[]), node)
    elements = [attributes.element_of(frame, source, name) for source, name in zip(args[1:], node.args[1:])]
    item = calls.call_value(frame, made, args[0], elements, {})
    frame.at = saved
    return _alike(item)


def _alike(item: Value) -> Value:
    return Value(
        "", item.dtype, item.why, item.line, op="comprehension", inputs=(item,), tags=item.tags, thing=item.thing
    )  # fmt: skip
