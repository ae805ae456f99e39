"""Which functions of a file can have anything to report: those that name halves, scalers or training, or use names that do.

A cheap reading of the text, so that the hundreds of functions of a modelling file that never touch precision are not walked.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from .source import EVIDENCE, FunctionInfo, ModuleInfo

_WORK = re.compile(EVIDENCE.pattern + r"|scaler|backward\(|\.step\(|[Oo]ptim|state_dict\(\)")
_FIELD = re.compile(r"""self\.(\w+)\s*(?::[^=]+)?=[^=]|register_buffer\(\s*["'](\w+)""")


def relevant_functions(module: ModuleInfo, functions: list[FunctionInfo]) -> list[FunctionInfo]:
    """The functions worth walking on their own, in their order."""
    lines = module.text.split("\n")
    marked = _marked_lines(module.text)
    names = set(_bound_names(module.tree.body, marked))
    for number in marked:
        names |= {name for match in _FIELD.finditer(lines[number - 1]) for name in match.groups() if name}
    chosen: set[int] = set()
    waiting: list[tuple[FunctionInfo, str]] = []
    for function in functions:
        first, last = _span(function.node)
        if _has_mark(marked, first, last):
            chosen.add(id(function))
            names |= _names(function)
        else:
            waiting.append((function, "\n".join(lines[first - 1 : last])))
    fresh = names
    while fresh:
        found = [(function, text) for function, text in waiting if any(name in text for name in fresh)]
        chosen |= {id(function) for function, _ in found}
        waiting = [item for item in waiting if id(item[0]) not in chosen]
        fresh = {name for function, _ in found for name in _names(function)} - names
        names |= fresh
    return [function for function in functions if id(function) in chosen]


def _marked_lines(text: str) -> list[int]:
    """Numbers of the lines that name a half, a scaler or a step of training."""
    found: list[int] = []
    line, position = 1, 0
    for match in _WORK.finditer(text):
        line += text.count("\n", position, match.start())
        position = match.start()
        if not found or found[-1] != line:
            found.append(line)
    return found


def _has_mark(marked: list[int], first: int, last: int) -> bool:
    position = bisect_left(marked, first)
    return position < len(marked) and marked[position] <= last


def _bound_names(body: Sequence[ast.stmt], marked: list[int]) -> Iterator[str]:
    """Names that statements with a mark bind, at the top of the file and in class bodies."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _bound_names(statement.body, marked)
        elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and _has_mark(marked, *_span(statement)):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id
                elif isinstance(node, ast.alias):
                    yield node.asname or node.name


def _span(node: ast.AST) -> tuple[int, int]:
    first: int = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
    return first, getattr(node, "end_lineno", None) or first


def _names(function: FunctionInfo) -> set[str]:
    """What others call to reach this function; a common method name alone says nothing."""
    if function.name in ("forward", "<lambda>") or function.name.startswith("__"):
        return {function.owner.name} if function.owner is not None else set()
    return {function.name}
