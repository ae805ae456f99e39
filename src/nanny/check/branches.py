"""What a test says: its outcome if the code fixes it, and what its arms may take for granted."""

from __future__ import annotations

import ast
from dataclasses import replace

from . import expressions
from .source import dotted
from .trace import Frame
from .values import Thing, Value


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
    value = expressions.evaluate(frame, test.left.value)
    wanted = expressions.evaluate(frame, test.comparators[0])
    names = {v.const for v in (wanted.inputs or (wanted,)) if v.kind == "dtype"}
    holds = arm is isinstance(test.ops[0], (ast.Eq, ast.In, ast.Is))
    if holds and names <= {"fp32", "fp64"} and len(names) == 1:
        frame.env[path] = replace(value, kind="tensor", dtype=names.pop(), why=f"tested at line {test.lineno}")
    elif value.dtype in names or (not holds and value.is_half):  # code that asks knows what it does
        frame.env[path] = replace(value, dtype="")


def _narrow_class(frame: Frame, test: ast.Call, arm: bool) -> None:
    if dotted(test.func) != "isinstance" or len(test.args) != 2 or not arm:
        return
    path = dotted(test.args[0])
    wanted = expressions.evaluate(frame, test.args[1])
    names = [
        v.ref.rpartition(".")[2] for v in (wanted.inputs or (wanted,)) if v.kind == "external" and v.ref.startswith("torch.nn.")
    ]
    if path and names:
        known = expressions.evaluate(frame, test.args[0])
        frame.env[path] = replace(known, kind="module", ref=names[0], thing=known.thing or Thing(path, "module"))
