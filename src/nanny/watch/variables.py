"""The line of the program that made a bad tensor of good ones, where no graph tells it: asked once, when a loss is bad.

Variables are read where reading them leaves no trace: of a script's own level, and since Python 3.13 of functions too. Before,
a look at a function's variables writes into what `locals()` once gave to the program.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .places import is_users_own, near
from .storages import key_of
from .tensors import has_storage, is_readable, tensors_in

_MOST_FRAMES = 24
_LARGEST_FILE = 1 << 20
_READS_FUNCTIONS = sys.version_info >= (3, 13)


class MadeBy(NamedTuple):
    """An assignment: `adv = ...`."""

    variable: str
    file: str
    line: int
    source: str


def assignment_of(bad: Tensor) -> MadeBy | None:
    """The one that gave a variable this bad value, if all tensors that it names are finite now."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None or sys.gettrace() is not None:
            break
        if is_users_own(frame.f_code.co_filename) and (frame.f_code.co_name == "<module>" or _READS_FUNCTIONS):
            found = _assignment(frame.f_code, frame.f_lineno, dict(frame.f_locals), frame.f_globals, bad)
            if found is not None:
                file = frame.f_code.co_filename
                return MadeBy(_target(found), near(file), found.lineno, linecache.getline(file, found.lineno).strip())
        frame = frame.f_back
    return None


def _assignment(
    code: CodeType, now: int, variables: Mapping[str, Any], others: Mapping[str, Any], bad: Tensor
) -> ast.Assign | ast.AnnAssign | None:
    names = [name for name, value in variables.items() if isinstance(value, Tensor) and _is_same(value, bad)]
    if not names:
        return None
    made = [node for node in _statements(code) if node.value is not None and _target(node) in names and node.lineno <= now]
    last = max(made, key=lambda node: node.lineno, default=None)
    if last is None or last.value is None:
        return None
    read = [n.id for n in ast.walk(last.value) if isinstance(n, ast.Name)]
    known = [t for name in read for t in tensors_in(variables.get(name, others.get(name)))]
    return last if known and all(not is_readable(t) or bool(t.isfinite().all()) for t in known) else None


def _statements(code: CodeType) -> list[ast.Assign | ast.AnnAssign]:
    text = "".join(linecache.getlines(code.co_filename))
    if len(text) > _LARGEST_FILE:
        return []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    last = max((line for *_, line in code.co_lines() if line is not None), default=0)
    first = 0 if code.co_name == "<module>" else code.co_firstlineno
    kinds = (ast.Assign, ast.AnnAssign)
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and first <= node.lineno <= last]


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    return has_storage(one) and has_storage(other) and key_of(one) == key_of(other) and torch.Size(one.shape) == other.shape
