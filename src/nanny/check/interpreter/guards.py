"""Conditions of branches, as keys that let two branches be recognised as the same question."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from .source import OwnClass
from .trace import Bound, Frame, Guard, NotAll, Walk
from .uses import dotted_name, nodes, path_of, source_of, test_key
from .values import UNKNOWN, Thing, Value, replace

AMP = "amp"  # the one key for "is mixed precision (with its scaler) on"
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.eq,  # the key of the second is that of the first
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


Guards = tuple[Guard, ...]


def arms_of(frame: Frame, test: ast.expr, value: Value) -> tuple[Guards, Guards]:
    """What is known to hold on the true and on the false arm of an `if` with this test, and what follows from it and from the ifs
    around: where `amp and last` does not hold and `last` does, `amp` does not."""
    yes, no = _arms(frame, test, value)
    return yes + _following(frame, yes), no + _following(frame, no)


def _following(frame: Frame, found: Guards) -> Guards:
    held = {*frame.at.guards, *found}
    tried = [[g for g in dict.fromkeys(key.parts) if g not in held] for key, _ in held if type(key) is NotAll]
    return tuple((missing[0][0], not missing[0][1]) for missing in tried if len(missing) == 1)


def _arms(frame: Frame, test: ast.expr, value: Value) -> tuple[Guards, Guards]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yes, no = _arms(frame, test.operand, value)
        return no, yes
    if isinstance(test, ast.BoolOp):
        is_and = isinstance(test.op, ast.And)  # all parts hold on its true arm; of an `or` all fail on the false one
        whole = ("mod:" if "modulo" in value.tags else "") + source_of(test)
        asked = zip(test.values, frame.asked.get(test, [value] * len(test.values)))
        parts = tuple(g for part, worth in asked for g in _arms(frame, part, worth)[not is_and])
        every, other = (*parts, (whole, is_and)), ((NotAll(whole, parts), not is_and),)
        return (every, other) if is_and else (other, every)
    key, truth = _question(frame, test, value)
    return ((key, truth),), ((key, not truth),)


def _question(frame: Frame, test: ast.expr, value: Value) -> Guard:
    """The key of a test, and the answer to it that the truth of the test gives."""
    key, truth = test_key(test)
    is_dtype = "dtype_test" in value.tags
    switched = None if is_dtype else _switch(frame, key)
    if switched is not None:
        return AMP, truth is switched
    asked = value.inputs[0] if isinstance(test, ast.Compare) and value.inputs else value
    path = path_of(test.left) if isinstance(test, ast.Compare) else path_of(test)
    if path == key and _is_scaler(frame, path, asked):
        return AMP, truth
    if isinstance(test, ast.Call) and test.args and dotted_name(test.func) == "hasattr":  # is it there, or what stands in for it
        held = dotted_name(test.args[0])
        if _is_scaler(frame, held, frame.lookup(held) or UNKNOWN):
            return AMP, truth
    if is_dtype:  # a flag is the question that it was set by, whoever holds it
        return "dtype:" + (source_of(value.node) if path == key and value.node is not None else key), truth
    known = frame.lookup(path) if path == key else None
    if known is not None and "modulo" in known.tags:  # the same test under another name is the same guard
        return "mod:" + (source_of(known.node) if known.node is not None else path), truth
    is_window = "modulo" in value.tags or _has_modulo(test) or path.rpartition(".")[2] == "sync_gradients"
    key = "mod:" + key if is_window else key
    return _bound_of(test, key) or key, truth


def _switch(frame: Frame, key: str) -> bool | None:
    """Whether the truth of a test means that mixed precision is on; None if it asks something else.

    What a class calls `self.needs_scaler` is the same switch where others ask an instance of it.
    """
    if key in frame.module.uses.switches:
        return frame.module.uses.switches[key]
    name, _, attribute = key.rpartition(".")
    owner = frame.lookup(name) if name else None
    if owner is None or not isinstance(owner.ref, OwnClass):
        return None
    return owner.ref.module.source.uses.switches.get(f"self.{attribute}")


def _bound_of(test: ast.expr, key: str) -> Bound | None:
    """The key of a test that holds one thing against a number."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and path_of(test.left)):
        return None
    other, compare = test.comparators[0], _COMPARISONS.get(type(test.ops[0]))
    number = other.value if isinstance(other, ast.Constant) else None
    if compare is None or isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    return Bound(key, path_of(test.left), compare, number)


def _is_scaler(frame: Frame, path: str, value: Value) -> bool:
    """Whether a test asks for the scaler itself: `if gs`, `gs is not None`."""
    thing = value.thing
    return value.kind == "scaler" or (thing is not None and thing.kind == "scaler") or path in frame.module.uses.scalers


def window_of(frame: Frame, node: ast.If) -> str:
    """The key of a guard of its own for an `if` that ends a window: it tests a counter or a queue, and sets that back inside.

    `if len(queue) == k: ...; queue.clear()`, `if micro == k: ...; micro = 0`, `if not pending: ...; pending = k`.
    """
    if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], (ast.Is, ast.IsNot)):
        return ""  # `if x is None: x = ...` fills in a default
    around = frame.at.loops[-1] if frame.at.loops else frame.at.stack[-1].node if frame.at.stack else None
    if around is None:
        return ""
    reset = _reset(node)
    return "mod:" + source_of(node.test) if reset and reset & _growing_names(around) else ""


def is_latch(around: ast.AST, key: str) -> bool:
    """Whether an `if` asks this and answers it for the next time (`if first: ...; first = False`)."""
    return any(isinstance(n, ast.If) and test_key(n.test)[0] == key and _reset(n) for n in nodes(around))


def _reset(node: ast.If) -> set[str]:
    """Names that the `if` tests and sets back right in its body; kept on the node, which is met whenever its function is."""
    known: set[str] | None = getattr(node, "reset", None)
    if known is None:
        direct = [s for s in node.body if isinstance(s, (ast.Assign, ast.Expr))]
        known = {name for statement in direct for name in _changed_names(statement, (ast.Assign, ast.Call), "clear")} - {""}
        if known:
            known &= {dotted_name(n) for n in nodes(node.test) if isinstance(n, (ast.Name, ast.Attribute))}
        node.reset = known  # type: ignore[attr-defined]
    return known


def _growing_names(around: ast.AST) -> set[str]:
    """Names that are counted up or appended to somewhere in a loop or function; kept on its node."""
    known: set[str] | None = getattr(around, "grown", None)
    if known is None:
        known = set(_changed_names(around, (ast.AugAssign, ast.Call), "append"))
        around.grown = known  # type: ignore[attr-defined]
    return known


def _changed_names(tree: ast.AST, kinds: tuple[type[ast.AST], ...], method: str) -> list[str]:
    """Names that are assigned, or whose `method` is called, somewhere in a piece of code."""
    found = []
    for node in nodes(tree):
        if not isinstance(node, kinds):
            continue
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == method:
                found.append(dotted_name(node.func.value))
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
            found += [dotted_name(t) for target in targets for t in nodes(target)]
    return found


def _has_modulo(test: ast.AST) -> bool:
    known: bool | None = getattr(test, "has_modulo", None)
    if known is None:
        known = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for n in nodes(test))
        test.has_modulo = known  # type: ignore[attr-defined]
    return known


def truth(frame: Frame, test: ast.expr, value: Value) -> bool | None:
    """The outcome of a test if the code itself fixes it."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if "written" in value.tags:
        return bool(value.const)
    if value.is_none and "left_out" in value.tags:
        return False
    if isinstance(test, ast.Compare) and dotted_name(test.left) == "__name__":
        return frame.module.is_entry
    if dotted_name(test).rpartition(".")[2] == "TYPE_CHECKING":
        return False
    if isinstance(test, (ast.Compare, ast.BoolOp)) and value.kind == "const" and isinstance(value.const, bool):
        return value.const
    return None


def narrow(walk: Walk, frame: Frame, test: ast.expr, arm: bool) -> None:
    """Takes over what `if x.dtype == torch.float16` or `if isinstance(m, nn.LayerNorm)` says."""
    if isinstance(test, ast.Call):
        _narrow_class(walk, frame, test, arm)
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Attribute)):
        return
    path = dotted_name(test.left.value)
    if test.left.attr != "dtype" or not path:
        return
    value = walk.evaluate(frame, test.left.value)
    wanted = walk.evaluate(frame, test.comparators[0])
    names = {v.const for v in (wanted.inputs or (wanted,)) if v.kind == "dtype"}
    holds = arm is isinstance(test.ops[0], (ast.Eq, ast.In, ast.Is))
    if holds and names <= {"fp32", "fp64"} and len(names) == 1:
        frame.env[path] = replace(value, kind="tensor", dtype=names.pop(), why=f"tested at line {test.lineno}")
    elif value.dtype in names or (not holds and value.is_half):  # code that asks knows what it does
        frame.env[path] = replace(value, dtype="")


def _narrow_class(walk: Walk, frame: Frame, test: ast.Call, arm: bool) -> None:
    if dotted_name(test.func) != "isinstance" or len(test.args) != 2 or not arm:
        return
    path = dotted_name(test.args[0])
    wanted = walk.evaluate(frame, test.args[1])
    names = [
        v.ref.rpartition(".")[2] for v in (wanted.inputs or (wanted,)) if v.kind == "external" and v.ref.startswith("torch.nn.")
    ]
    if path and names:
        known = walk.evaluate(frame, test.args[0])
        frame.env[path] = replace(known, kind="module", ref=names[0], thing=known.thing or Thing(path, "module"))
