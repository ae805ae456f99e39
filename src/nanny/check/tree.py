"""One Python file as libcst sees it: nodes by their place, what stands around them, and edits that leave all other bytes alone.

A fix never prints a tree: it replaces spans of the text, so comments and formatting elsewhere cannot change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from ..core.finding import Finding

Node = TypeVar("Node", bound=cst.CSTNode)
LOOPS = (cst.For, cst.While)
SCOPES = (cst.FunctionDef, cst.Lambda, cst.Module)
_CHAINS = (cst.Name, cst.Attribute, cst.Call, cst.Subscript)  # what a method call can be appended to without parentheses


@dataclass(frozen=True, order=True)
class Edit:
    """Characters of the text, from `start` up to `end`, become `text`."""

    start: int
    end: int
    text: str


class Tree:
    """Raises libcst.ParserSyntaxError where Python itself would not read the text either."""

    def __init__(self, text: str):
        self.text = text
        self.module = cst.parse_module(text)
        self._places: dict[cst.CSTNode, CodeRange] = dict(
            MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)
        )
        self._lines = [0]
        for line in text.split("\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)

        self._parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self._scopes: dict[cst.CSTNode, cst.CSTNode] = {}
        self._kinds: dict[type[cst.CSTNode], list[cst.CSTNode]] = {}
        waiting: list[tuple[cst.CSTNode, cst.CSTNode]] = [(self.module, self.module)]
        while waiting:
            node, scope = waiting.pop()
            for child in node.children:
                self._parents[child], self._scopes[child] = node, scope
                self._kinds.setdefault(type(child), []).append(child)
                waiting.append((child, child if isinstance(child, SCOPES) else scope))
        for nodes in self._kinds.values():  # in the order of the text, what contains before what is contained
            nodes.sort(key=lambda node: (self.start(node), -self.end(node)))

    # where nodes are

    def offset(self, line: int, column: int) -> int:
        return self._lines[line - 1] + column

    def start(self, node: cst.CSTNode) -> int:
        place = self._places[node].start
        return self.offset(place.line, place.column)

    def end(self, node: cst.CSTNode) -> int:
        place = self._places[node].end
        return self.offset(place.line, place.column)

    def outer(self, node: cst.CSTNode) -> tuple[int, int]:
        """The span with the node's own parentheses."""
        left: Sequence[cst.CSTNode] = getattr(node, "lpar", ())
        right: Sequence[cst.CSTNode] = getattr(node, "rpar", ())
        return (self.start(left[0]) if left else self.start(node)), (self.end(right[-1]) if right else self.end(node))

    def code(self, node: cst.CSTNode) -> str:
        """Its text as it stands in the file, with its own parentheses."""
        start, end = self.outer(node)
        return self.text[start:end]

    def at(self, finding: Finding, kind: type[Node]) -> Node | None:
        """The node of this kind that a finding is about: the one that has exactly its place."""
        if None in (finding.line, finding.column, finding.end_line, finding.end_column):
            return None
        wanted = (finding.line, (finding.column or 1) - 1, finding.end_line, (finding.end_column or 1) - 1)
        for node, place in self._places.items():
            if isinstance(node, kind) and wanted == (place.start.line, place.start.column, place.end.line, place.end.column):
                return node
        return None

    # what is around them

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return self._parents.get(node)

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        current = self._parents.get(node)
        while current is not None:
            yield current
            current = self._parents.get(current)

    def scope(self, node: cst.CSTNode) -> cst.CSTNode:
        """The function that the node runs in, or the module."""
        return self._scopes.get(node, self.module)

    def owner(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The class whose method the node stands in."""
        return next((n for n in self.above(node) if isinstance(n, cst.ClassDef)), None)

    def contains(self, outer: cst.CSTNode, inner: cst.CSTNode) -> bool:
        return outer is inner or any(n is outer for n in self.above(inner))

    def all(self, kind: type[Node], within: cst.CSTNode | None = None) -> list[Node]:
        """Every node of a kind in the order of the text; `within` a function, those that run in it, not in one it defines."""
        found: list[Node] = self._kinds.get(kind, [])  # type: ignore[assignment]
        if within is None:
            return found
        if isinstance(within, SCOPES):
            return [n for n in found if self.scope(n) is within]
        return [n for n in found if self.contains(within, n)]

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The smallest statement around (or at) the node: an assignment, a call by itself, an `if` for what is in its test."""
        kinds = (cst.BaseSmallStatement, cst.BaseCompoundStatement)
        return node if isinstance(node, kinds) else next(n for n in self.above(node) if isinstance(n, kinds))

    def block(self, node: cst.CSTNode) -> cst.CSTNode:
        """The body that the node's statement is one line of."""
        line = self.parent(self.statement(node))
        return (self.parent(line) if isinstance(line, cst.SimpleStatementLine) else line) or self.module

    # names

    @cached_property
    def imports(self) -> dict[str, str]:
        """What each imported name stands for: `F` -> `torch.nn.functional`."""
        table: dict[str, str] = {}
        for node in self.all(cst.Import):
            for alias in node.names:
                path = dotted_name(alias.name)
                if alias.asname is not None:
                    table[dotted_name(alias.asname.name)] = path
                else:
                    table[path.partition(".")[0]] = path.partition(".")[0]
        for brought in self.all(cst.ImportFrom):
            if brought.relative or brought.module is None or isinstance(brought.names, cst.ImportStar):
                continue
            for alias in brought.names:
                name = dotted_name(alias.asname.name) if alias.asname is not None else dotted_name(alias.name)
                table[name] = f"{dotted_name(brought.module)}.{dotted_name(alias.name)}"
        return table

    def path(self, node: cst.CSTNode) -> str:
        """`torch.nn.functional.softmax` for `F.softmax`; empty for what is not imported."""
        root, dot, rest = dotted_name(node).partition(".")
        return f"{self.imports[root]}{dot}{rest}" if root in self.imports else ""

    def name_of(self, path: str) -> str:
        """How this file can write an imported path (`torch.finfo`, `th.finfo`); empty if it imports nothing of the kind."""
        roots = ("torch", "torch.nn", "torch.nn.functional", "torch.amp")
        names = [
            name + path[len(target) :]
            for name, target in self.imports.items()
            if target == path or (target in roots and path.startswith(f"{target}."))
        ]
        return min(names, key=len, default="")

    def reach(self, path: str) -> tuple[str, list[Edit]]:
        """How to write a path of torch here, with the import that this takes; an empty name where `torch` is something else."""
        name = self.name_of(path)
        if name or "torch" in self.bound_in(self.module):
            return name, []
        for line in self.module.body:
            first = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
            origin = first.module if isinstance(first, cst.ImportFrom) else None
            is_future = origin is not None and dotted_name(origin) == "__future__"
            if isinstance(first, (cst.Import, cst.ImportFrom)) and not is_future:
                edit = self.before(first, "import torch")
                return (path, [edit]) if edit is not None else ("", [])
        return "", []

    def bound_in(self, scope: cst.CSTNode) -> dict[str, int]:
        """Names and attributes that a function (or the module) binds -> where it does so first."""
        found: dict[str, int] = {}
        if isinstance(scope, (cst.FunctionDef, cst.Lambda)):
            for parameter in _parameters(scope.params):
                found.setdefault(parameter.name.value, self.start(scope))
        for target in self.targets(scope):
            name, at = self.code(target), self.start(target)
            found[name] = min(found.get(name, at), at)
        return found

    def targets(self, scope: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What is assigned to in a function or the module: names and attributes, those in tuples too."""
        kinds = (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.For, cst.CompFor, cst.NamedExpr)
        waiting: list[cst.CSTNode] = [node.target for kind in kinds for node in self.all(kind, scope)]  # type: ignore[attr-defined]
        names = [n for n in self.all(cst.AsName, scope) if not isinstance(self.parent(n), cst.ImportAlias)]
        waiting += [node.name for node in names]
        while waiting:
            target = waiting.pop()
            if isinstance(target, (cst.Tuple, cst.List)):
                waiting += [element.value for element in target.elements]
            elif isinstance(target, (cst.Name, cst.Attribute)):
                yield target

    def sees(self, node: cst.CSTNode, name: str) -> bool:
        """Whether a name is bound where the node stands: before it in its own function, or anywhere around that."""
        root = name.partition(".")[0]
        scope = self.scope(node)
        here = self.bound_in(scope)
        if root in here:
            return here[root] < self.start(node)
        outer = [n for n in self.above(scope) if isinstance(n, SCOPES)]
        return root in self.imports or any(root in self.bound_in(n) for n in outer)

    def rebound_between(self, scope: cst.CSTNode, name: str, start: int, end: int) -> bool:
        return any(dotted_name(target) == name and start < self.start(target) < end for target in self.targets(scope))

    def value_of(self, node: cst.CSTNode) -> cst.Assign | None:
        """The one assignment that gives a name its value here: alone in its function, before the use, in its block or around."""
        if not isinstance(node, cst.Name):
            return None
        scope = self.scope(node)
        if [dotted_name(t) for t in self.targets(scope)].count(node.value) != 1 or node.value in _parameter_names(scope):
            return None
        for assign in self.all(cst.Assign, scope):
            is_it = len(assign.targets) == 1 and dotted_name(assign.targets[0].target) == node.value
            if is_it and self.end(assign) < self.start(node) and self.contains(self.block(assign), node):
                return assign
        return None

    def uses(self, scope: cst.CSTNode, name: str) -> list[cst.Name]:
        """Where a function reads a name, closures within it too."""
        found = [n for n in self.all(cst.Name) if n.value == name and self.contains(scope, n)]
        targets = set(map(id, self.targets(scope)))
        return [n for n in found if id(n) not in targets and not self._is_label(n)]

    def names_in(self, node: cst.CSTNode) -> list[cst.Name]:
        start, end = self.outer(node)
        return [n for n in self.all(cst.Name) if start <= self.start(n) < end]

    def _is_label(self, name: cst.Name) -> bool:
        """`x` in `a.x`, in `f(x=1)` and in `def x(x)` is not read."""
        parent = self.parent(name)
        if isinstance(parent, cst.Attribute):
            return parent.attr is name
        if isinstance(parent, cst.Arg):
            return parent.keyword is name
        return isinstance(parent, (cst.FunctionDef, cst.ClassDef, cst.Param)) and parent.name is name

    def written_by(self, finding: Finding) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
        """The tensor and the value of `tensor[index] = value`, where a finding is about such a write."""
        place = self.at(finding, cst.Subscript)
        assign = self.statement(place) if place is not None and isinstance(self.parent(place), cst.AssignTarget) else None
        return (place.value, assign.value) if place is not None and isinstance(assign, cst.Assign) else None

    # edits

    def replace(self, node: cst.CSTNode, text: str) -> Edit:
        return Edit(*self.outer(node), text)

    def append_to(self, node: cst.CSTNode, suffix: str) -> list[Edit]:
        """`node.float()`, in parentheses where they are needed."""
        start, end = self.outer(node)
        if isinstance(node, _CHAINS) or self.outer(node) != (self.start(node), self.end(node)):
            return [Edit(end, end, suffix)]
        return [Edit(start, start, "("), Edit(end, end, f"){suffix}")]

    def indent(self, node: cst.CSTNode) -> str:
        """The white space that the node's line begins with."""
        line = self.text[self._lines[self._places[node].start.line - 1] :]
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def deeper(self, node: cst.CSTNode) -> str:
        """What one more step of indentation is made of where the node stands."""
        usual = self.module.default_indent
        return usual if "\t" in self.indent(node) or not usual.strip(" ") else "    "

    def before(self, node: cst.CSTNode, code: str) -> Edit | None:
        """Lines of code before the statement that the node stands in."""
        statement = self.statement(node)
        if isinstance(statement, cst.If) and isinstance(self.parent(statement), cst.If):  # nothing can stand before an `elif`
            return None
        start = self.start(statement)
        if self.text[start - len(self.indent(statement)) : start] != self.indent(statement) or not self._starts_line(start):
            return Edit(start, start, f"{code}; ") if "\n" not in code else None
        indent = self.indent(statement)
        return Edit(start, start, code.replace("\n", f"\n{indent}") + f"\n{indent}")

    def _starts_line(self, offset: int) -> bool:
        return not self.text[self.text.rfind("\n", 0, offset) + 1 : offset].strip()

    def after(self, statement: cst.CSTNode, code: str) -> Edit | None:
        """Lines of code after a statement that has a line of its own."""
        line = self.parent(statement)
        if not isinstance(line, cst.SimpleStatementLine) or not self._starts_line(self.start(statement)):
            return None
        end = self.text.find("\n", self.end(statement))
        end = len(self.text) if end < 0 else end
        indent = self.indent(statement)
        return Edit(end, end, f"\n{indent}" + code.replace("\n", f"\n{indent}"))

    def without(self, statement: cst.CSTNode) -> Edit | None:
        """The statement's lines taken out; None where that would take a comment or leave an empty block."""
        line = self.parent(statement)
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
            return None
        block = self.parent(line)
        if line.trailing_whitespace.comment is not None or (isinstance(block, cst.IndentedBlock) and len(block.body) < 2):
            return None
        start = self.text.rfind("\n", 0, self.start(line)) + 1
        end = self.text.find("\n", self.end(line))
        return Edit(start, len(self.text) if end < 0 else end + 1, "")

    def shift(self, statement: cst.CSTNode, by: str) -> list[Edit] | None:
        """Each of the statement's lines further to the right; None where a string of several lines would change with them."""
        first, last = self._places[statement].start.line, self._places[statement].end.line
        strings = [*self.all(cst.SimpleString, statement), *self.all(cst.FormattedString, statement)]
        if any(self._places[s].start.line != self._places[s].end.line for s in strings):
            return None
        rows = range(self._lines[first - 1], self._lines[last - 1] + 1)
        return [Edit(at, at, by) for at in self._lines if at in rows and self.text[at : at + 1] not in ("\n", "")]


def dotted_name(node: cst.CSTNode) -> str:
    """`self.scaler` for the expression of that look; empty for anything but names and attributes."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    return ".".join([node.value, *reversed(parts)]) if isinstance(node, cst.Name) else ""


def method(call: cst.CSTNode) -> tuple[str, str]:
    """(`scaler`, `step`) for `scaler.step(...)`; empty strings for other calls."""
    if isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute):
        return dotted_name(call.func.value), call.func.attr.value
    return "", ""


def argument(call: cst.Call, position: int, *names: str) -> cst.BaseExpression | None:
    """By keyword or position; None if it is missing or hidden behind a star."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value in names:
            return arg.value
    plain = []
    for arg in call.args:
        if arg.star or arg.keyword is not None:
            break
        plain.append(arg.value)
    return plain[position] if position < len(plain) else None


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """The text with edits that do not overlap; several at one place come in the order given."""
    out, last = [], 0
    for edit in sorted(edits, key=lambda e: (e.start, e.end)):
        out += [text[last : edit.start], edit.text]
        last = edit.end
    return "".join(out) + text[last:]


def _parameters(params: cst.Parameters) -> Iterator[cst.Param]:
    yield from (*params.posonly_params, *params.params, *params.kwonly_params)
    yield from (p for p in (params.star_arg, params.star_kwarg) if isinstance(p, cst.Param))


def _parameter_names(scope: cst.CSTNode) -> set[str]:
    return {p.name.value for p in _parameters(scope.params)} if isinstance(scope, (cst.FunctionDef, cst.Lambda)) else set()
