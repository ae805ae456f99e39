"""The line of the program that made a bad tensor of good ones, where no call of a model did: asked once, when a loss is bad.

    for made in assignments_behind_backward():   # the earliest first
        made.variable, made.line
        made.as_module(), made.inputs            # what stands right of `=`, to be done again
        made.sources                             # the assignments of what it names, to be done again before

Before Python 3.13 a look at the variables of a function leaves a dictionary with the function, which would keep them alive and is
what `locals()` gives: it is emptied again, and where the program's own code asks for it nothing is looked at.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .places import is_users_own, near
from .python_state import names_in
from .tensors import is_readable, tensors_in

_MOST_FRAMES = 24
_LARGEST_FILE = 1 << 20
_MOST_TENSORS = 256
_MOST_SOURCES = 4
_LOOKED_INTO = (Tensor, tuple, list, dict)  # other collections may read files, or run the program's code
_ASK_FOR_VARIABLES = {"locals", "vars", "dir", "eval", "exec"}
_CONTEXTS = (torch.autocast, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.set_grad_enabled)
_Assignment = ast.Assign | ast.AnnAssign
_Question = Callable[[list[Tensor], list[Tensor]], bool]  # is it this one: of what it made, and what it read


@dataclass(frozen=True)
class MakingLine:
    """An assignment, `adv = ...`, whose result is bad, while all tensors that it names are finite; or one before it."""

    variable: str
    path: str
    line: int
    source: str
    value: ast.expr
    contexts: tuple[ast.expr, ...]  # of those around it that change what is computed: autocast, no_grad
    variables: Mapping[str, Any]
    outside: dict[str, Any]  # the variables of its module
    has_graph: bool
    sources: tuple[MakingLine, ...] = ()

    @property
    def result(self) -> Any:
        return self.variables.get(self.variable, self.outside.get(self.variable))

    @property
    def file(self) -> str:
        return near(self.path)

    @property
    def inputs(self) -> dict[str, Any]:
        names = {node.id for part in (self.value, *self.contexts) for node in ast.walk(part) if isinstance(node, ast.Name)}
        return {name: self.variables[name] for name in sorted(names & self.variables.keys())}

    def as_module(self) -> nn.Module:
        """Its forward, called with `inputs`, computes the value once more."""
        body: ast.stmt = ast.Return(self.value)
        for context in reversed(self.contexts):
            body = ast.With([ast.withitem(context)], [body])
        parameters = ast.arguments([], [ast.arg(name) for name in ("self", *self.inputs)], None, [], [], None, [])
        function: ast.stmt = ast.FunctionDef("forward", parameters, [body], [])
        if sys.version_info >= (3, 12):
            function.type_params = []  # type: ignore[attr-defined]
        code = compile(ast.fix_missing_locations(ast.Module([function], [])), self.path, "exec", dont_inherit=True)
        forward = next(one for one in code.co_consts if isinstance(one, CodeType))
        module = nn.Module()
        object.__setattr__(module, "forward", types.MethodType(types.FunctionType(forward, self.outside), module))
        return module


def assignments_behind_backward() -> Iterator[MakingLine]:
    """Of the frames below in which a bad loss is differentiated; the earliest first."""
    yield from _found_below(lambda made, read: not all(map(_is_good, made)) and all(map(_is_good, read)))


def assignment_of(is_it: Callable[[Tensor], bool]) -> MakingLine | None:
    """Whose result is this tensor, of the lines before the one that runs below."""
    return next(_found_below(lambda made, _: any(map(is_it, made)), of_all=True), None)


def reads_bad() -> bool:
    """A line behind the backward pass that is called below reads what is not finite and has no graph."""
    return any(_found_below(lambda made, read: not all(_is_good(t) for t in read if t.grad_fn is None and not t.requires_grad)))


def _found_below(is_it: _Question, of_all: bool = False) -> Iterator[MakingLine]:
    """`of_all`: not only what led to the values that the line names which runs below."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None or sys.gettrace() is not None:
            break
        if is_users_own(frame.f_code.co_filename):
            variables = _variables(frame)
            if variables is not None:
                yield from _assignments(frame, variables, is_it, of_all)
        frame = frame.f_back


def _variables(frame: FrameType) -> dict[str, Any] | None:
    code = frame.f_code
    if sys.version_info >= (3, 13) or not code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    if _ASK_FOR_VARIABLES & set(code.co_names):
        return None
    left = frame.f_locals
    found = dict(left)
    if sys.getrefcount(left) == 3:  # the frame, the name here, the question: nobody else has it
        left.clear()
    return found


def _assignments(frame: FrameType, variables: Mapping[str, Any], is_it: _Question, of_all: bool) -> Iterator[MakingLine]:
    code, now, others = frame.f_code, frame.f_lineno, frame.f_globals
    body = _body(code)
    at = [node for node in _statements(body) if _spans(node, now) and not hasattr(node, "body")]  # several with `;`

    def values_of(names: set[str]) -> list[Any]:
        return [variables.get(name, others.get(name)) for name in sorted(names)]

    def tensors_of(names: set[str]) -> list[Tensor] | None:
        found = tensors_in([value for value in values_of(names) if isinstance(value, _LOOKED_INTO)])
        return found if len(found) <= _MOST_TENSORS else None

    def read_within(names: set[str]) -> list[Tensor]:
        """By the functions of the program that a line calls, if it names no tensor itself."""
        found = tensors_in([value for one in values_of(names) for value in _variables_of(one) if isinstance(value, _LOOKED_INTO)])
        return found if len(found) <= _MOST_TENSORS else []

    behind: list[_Assignment] = []
    wanted = set(variables) if of_all else set().union(*map(_names, at))
    for node in reversed(list(_statements(body))):
        if isinstance(node, _Assignment) and node.value is not None and node.lineno <= now and wanted & _targets(node):
            behind.append(node)
            wanted |= _read_by(node)
    behind.reverse()

    def made_by(node: _Assignment, sources: tuple[MakingLine, ...] = ()) -> MakingLine:
        assert node.value is not None
        return MakingLine(
            sorted(_targets(node))[0],
            code.co_filename,
            node.lineno,
            linecache.getline(code.co_filename, node.lineno).strip(),
            node.value,
            tuple(_contexts(body, node, variables, others)),
            variables,
            others,
            any(t.requires_grad for t in tensors_of(_targets(node)) or ()),
            sources,
        )

    def sources_of(last: _Assignment) -> tuple[MakingLine, ...]:
        """Those of what it reads, and of what that reads; the nearest ones, as they are written."""
        found, wanted = [], _read_by(last)
        for node in reversed(behind[: behind.index(last)]):
            tensors = tensors_of(_targets(node)) if wanted & _targets(node) and len(_targets(node)) == 1 else None
            reads = tensors_of(_read_by(node)) or any(
                isinstance(variables.get(n, others.get(n)), nn.Module) for n in _read_by(node)
            )
            if tensors and reads and _kept_what_it_read(node) and any(map(torch.is_floating_point, tensors)):
                found.append(made_by(node))
                wanted |= _read_by(node)
        return tuple(reversed(found[:_MOST_SOURCES]))

    for node in behind:
        made, read = tensors_of(_targets(node)), tensors_of(names := _read_by(node) - _targets(node))
        read = read_within(names) if read == [] else read
        if made and read and _kept_what_it_read(node) and is_it(made, read):
            yield made_by(node, sources_of(node))


def _variables_of(function: Any) -> Iterator[Any]:
    """The variables of its module, and of the function around it, that a function of the program uses."""
    if not isinstance(function, types.FunctionType) or not is_users_own(function.__code__.co_filename):
        return
    space = function.__globals__
    yield from (space[name] for name in names_in(function.__code__) & space.keys())
    yield from inspect.getclosurevars(function).nonlocals.values() if function.__closure__ else ()


def _read_by(node: _Assignment) -> set[str]:
    return set() if node.value is None else _names(node.value)


def _kept_what_it_read(node: _Assignment) -> bool:
    """Not `w = w / s`: what it was before is gone."""
    return not _read_by(node) & _targets(node)


def _body(code: CodeType) -> list[ast.stmt]:
    """The statements of a function or of a module."""
    text = "".join(linecache.getlines(code.co_filename))
    if len(text) > _LARGEST_FILE:
        return []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    if code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == code.co_firstlineno:
                return node.body
    return []


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """As they are written, those inside others too, but not those of functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))


def _contexts(body: list[ast.stmt], node: ast.stmt, *scopes: Mapping[str, Any]) -> Iterator[ast.expr]:
    for around in _statements(body):
        if isinstance(around, ast.With) and _spans(around, node.lineno):
            for item in around.items:
                kind = item.context_expr.func if isinstance(item.context_expr, ast.Call) else None
                if kind is not None and _resolve(kind, *scopes) in _CONTEXTS:
                    yield item.context_expr


def _resolve(node: ast.expr, *scopes: Mapping[str, Any]) -> Any:
    """What a dotted name stands for; modules alone are looked into, which answer without running the program's code."""
    if isinstance(node, ast.Name):
        return next((scope[node.id] for scope in scopes if node.id in scope), None)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, *scopes)
        found = vars(owner).get(node.attr) if isinstance(owner, types.ModuleType) else None
        return torch.autocast if isinstance(found, type) and issubclass(found, torch.autocast) else found
    return None


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _targets(node: _Assignment) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [one for target in targets for one in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _is_good(tensor: Tensor) -> bool:
    """Neither NaN nor +Inf; -Inf is what masks are made of."""
    if not tensor.is_floating_point() or not is_readable(tensor):
        return True
    return not bool((tensor.isnan() | tensor.isposinf()).any())
