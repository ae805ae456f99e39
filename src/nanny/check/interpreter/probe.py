"""Whether a file that makes nothing half by itself can have a finding: looks at the few functions that name a half format.

Most files that name one only ask for it (`if x.dtype == torch.float16`). A half value, a region or a scaler has to come out of a
function that names something of the kind, or of one that gets it from there: from what such a function returns, or puts where
others find it. Only these are run. If none of them shows anything half, the others cannot.
"""

from __future__ import annotations

import ast
import re
from functools import cache

from .interpreter import Interpreter, heirs
from .source import OwnClass, OwnFunction, SourceFile, WalkedFile, says_half
from .trace import Event, FileView
from .values import HALF, Value

MOST = 400  # values looked at; what is larger may hold anything
_SPEAKING = ("scaler.", "framework.", "autocast", "module_cast", "reduce_policy", "set_default_dtype", "from_pretrained")


@cache
def _word() -> re.Pattern[str]:
    return re.compile(r"[^\W\d]\w*")


def probe(interpreter: Interpreter, source: SourceFile) -> FileView | None:
    """What is seen from the functions that matter, without anything half in it; None if all have to be run."""
    uses = source.uses
    if not says_half(source.text) or uses.scalers or uses.frameworks:
        return None  # what says nothing is a program that starts others
    module = WalkedFile(source)
    stored = interpreter.stored = {}
    interpreter.run_body(module)
    text, names, ran = _Functions(source.text), set[str](), set[ast.AST]()
    while True:
        if any(_shows_half(event) for trace in interpreter.traces[-1:] for event in trace.events):
            return None
        names |= {name for name, values in stored.items() if any(map(_carries, values))}
        stored.clear()
        waiting = (f for f in module.functions if f.module is module and f.node not in ran and text.matters(f, names))
        function = next(waiting, None)
        if function is None:
            return FileView(module, interpreter.traces, interpreter.options)
        ran.add(function.node)
        for owner in (function.owner, *heirs(function, module)):
            if _carries(interpreter.run_entry(function, owner)):
                names |= {function.name, function.called_as}
            if any(_shows_half(event) for event in interpreter.traces[-1].events):
                return None


class _Functions:
    """The texts of functions."""

    def __init__(self, text: str):
        self._lines = text.split("\n")
        self._known: dict[ast.AST, tuple[bool, frozenset[str]]] = {}

    def matters(self, function: OwnFunction, names: set[str]) -> bool:
        """Whether it names a half format or one of the names, or stands in a function that was run."""
        if function.closure is not None:
            return True
        if function.node not in self._known:
            node = function.node
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            text = "\n".join(self._lines[first - 1 : node.end_lineno])
            self._known[node] = says_half(text), frozenset(_word().findall(text))
        is_half, words = self._known[function.node]
        return is_half or not words.isdisjoint(names)


def _shows_half(event: Event) -> bool:
    if event.at.regions or event.op.startswith(_SPEAKING):
        return True
    return any(_is_half(value) for value in (*event.args, *event.kwargs.values(), event.out))


def _is_half(value: Value) -> bool:
    return value.dtype in HALF or (value.thing is not None and value.thing.dtype in HALF)


def _carries(value: Value) -> bool:
    """Whether something half, or the name of a half format, can be reached from a value."""
    seen: set[int] = set()
    waiting: list[object] = [value]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if len(seen) > MOST:
            return True
        if not isinstance(current, Value):
            continue
        if _is_half(current) or (isinstance(current.const, str) and (current.const in HALF or says_half(current.const))):
            return True
        waiting += current.inputs
        if current.thing is not None:
            waiting += current.thing.attrs.values()
        if isinstance(current.ref, dict):
            waiting += current.ref.values()
        elif isinstance(current.ref, OwnFunction) and current.ref.closure is not None:
            waiting += current.ref.closure.values()
        elif isinstance(current.ref, OwnClass):
            waiting += current.ref.attrs.values()
    return False
