"""How a file uses its things, read from the syntax tree: what is called, stepped, scaled, trained, switched.

What an unknown object is follows from what is done with it. A name is only the thread that ties its uses together.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.ops import LAYERS
from .torch_names import WRAPPERS

LONGEST = 30
_MODULE_METHODS = frozenset({"parameters", "named_parameters", "modules", "named_modules", "children", "train", "eval"})
_SCALER_CALLS = frozenset({"scale", "step", "update", "unscale_"})
_MAKES_AMP = frozenset({"autocast", "GradScaler", "ShardedGradScaler"})
_FRAMEWORKS = frozenset(
    {"Accelerator", "Fabric", "Trainer", "LightningCLI", "TrainingArguments", "initialize", "fully_shard", "MixedPrecision"}
)
_ACTIVE = _MAKES_AMP | {"unscale_", "set_default_dtype"}
_CASTS = frozenset({"half", "bfloat16"})
_SAME_OBJECT = frozenset(
    ["to", "cuda", "cpu", "half", "bfloat16", "float", "double", "eval", "train", "requires_grad_", "contiguous"]
)
_HALVES = frozenset({"half", "float16", "bfloat16"})


@dataclass(eq=False, repr=False)
class Uses:
    """Paths are texts of names: `model`, `self.net`."""

    called: set[str] = field(default_factory=set)  # everything that is called: `model`, `self.net`, `loss.backward`
    methods: dict[str, set[str]] = field(default_factory=dict)  # path -> methods called on it
    identifiers: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # of variables, read or bound
    scalers: set[str] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)
    frameworks: set[str] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)  # sizes, counts and factors: used where only a number can stand
    switches: dict[str, bool] = field(default_factory=dict)  # test -> whether its truth means that mixed precision is on
    is_active: bool = False  # makes halves or scales itself, rather than only asking for a dtype

    def is_called(self, path: str) -> bool:
        return path in self.called

    def is_module(self, path: str) -> bool:
        """Whether something is asked for what only a model has."""
        return bool(path) and not _MODULE_METHODS.isdisjoint(self.methods.get(path, ()))


NO_USES = Uses()


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` for a chain of names, else the empty string; a chain of more than LONGEST links is no name."""
    parts: list[str] = []
    while type(node) is ast.Attribute and len(parts) < LONGEST:
        parts.append(node.attr)
        node = node.value
    if type(node) is not ast.Name:
        return ""
    parts.append(node.id)
    return ".".join(reversed(parts))


def owner_path(node: ast.AST) -> str:
    """The path that a chain of casts and moves starts from: `model` for `model.cuda().half().eval()`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_OBJECT:
        node = node.func.value
    return dotted_name(node)


def _children(kind: type[ast.AST]) -> tuple[str, ...]:
    """The fields of a kind of node that hold nodes with more to tell than an operator or a context."""
    if kind in (ast.Import, ast.ImportFrom):
        return ("names",)
    skipped = {"ctx", "op", "ops", "type_comment", "type_ignores", "kind", "name", "asname", "names", "arg", "attr", "id"}
    return tuple(name for name in kind._fields if name not in skipped)


_CHILDREN: dict[type[ast.AST], tuple[str, ...]] = {}


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk without constants and operators, in no particular order and in a fifth of the time."""
    stack: list[Any] = [tree]
    pop, extend, push, known = stack.pop, stack.extend, stack.append, _CHILDREN
    while stack:
        node = pop()
        kind = type(node)
        if kind is ast.Constant or not isinstance(node, ast.AST):
            continue
        yield node
        fields = known.get(kind)
        if fields is None:
            fields = known[kind] = _children(kind)
        for name in fields:
            inner = getattr(node, name, None)
            if type(inner) is list:
                extend(inner)
            elif inner is not None:
                push(inner)


def uses_in(tree: ast.Module) -> Uses:
    uses = Uses()
    given: dict[str, set[str]] = {}  # path -> what its step() and unscale_() get
    same: list[tuple[str, str]] = []
    blocks: list[ast.AST] = []
    calls: list[ast.Call] = []
    for node in nodes(tree):
        kind = type(node)
        if kind is ast.Name:
            uses.identifiers.add(node.id)  # type: ignore[attr-defined]
            uses.names.add(node.id)  # type: ignore[attr-defined]
        elif kind is ast.Attribute:
            uses.identifiers.add(node.attr)  # type: ignore[attr-defined]
        elif kind is ast.Call:
            _note_call(uses, node, given)  # type: ignore[arg-type]
            calls.append(node)  # type: ignore[arg-type]
        elif kind is ast.Assign:
            same += _fields(node)  # type: ignore[arg-type]
        elif kind is ast.BinOp:
            _note_number(uses, node)  # type: ignore[arg-type]
        elif kind is ast.arg:
            annotation = node.annotation  # type: ignore[attr-defined]
            if isinstance(annotation, ast.Name) and annotation.id in ("int", "float"):
                uses.numbers.add(node.arg)  # type: ignore[attr-defined]
        elif kind is ast.alias:
            uses.identifiers.add(node.name.rpartition(".")[2])  # type: ignore[attr-defined]
        elif hasattr(node, "body"):
            blocks.append(node)
    for one, other in same:
        both = uses.methods.get(one, set()) | uses.methods.get(other, set())
        given[one] = given[other] = given.get(one, set()) | given.get(other, set())
        uses.methods[one] = uses.methods[other] = both
    for path, methods in uses.methods.items():
        if methods & {"unscale_", "get_scale"} or (given.get(path) and methods & {"scale", "update"}):
            uses.scalers.add(path)
        elif {"step", "zero_grad"} <= methods:
            uses.optimizers.add(path)
    for path in uses.scalers:
        uses.optimizers |= given.get(path, set())
    for table in (uses.optimizers, uses.frameworks, uses.numbers, uses.scalers):
        table.discard("")
        for one, other in same:
            if one in table or other in table:
                table |= {one, other}
    uses.is_active = uses.is_active or not _ACTIVE.isdisjoint(uses.identifiers)
    uses.is_active = uses.is_active or any(path.rpartition(".")[2] in _FRAMEWORKS for path in uses.called)
    if uses.scalers or not _MAKES_AMP.isdisjoint(uses.identifiers):
        _note_switches(uses, blocks, same, _Marks(uses, calls))
    return uses


def _fields(node: ast.Assign) -> list[tuple[str, str]]:
    """Attributes with the local names that they are set from: `self.net = net.cuda()` makes the two one object."""
    found = []
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts))
        found += [(dotted_name(a), owner_path(b)) for a, b in pairs if isinstance(a, ast.Attribute)]
    return [(one, other) for one, other in found if one and other]


def _note_call(uses: Uses, node: ast.Call, given: dict[str, set[str]]) -> None:
    func = node.func
    path = dotted_name(func)
    if _last(func) in _MAKES_AMP:
        uses.switches.update({dotted_name(k.value): True for k in node.keywords if k.arg == "enabled" and dotted_name(k.value)})
    uses.called.add(path or getattr(func, "attr", ""))
    if any(k.arg == "dtype" and _is_half(k.value) for k in node.keywords):
        uses.is_active = True
    if _last(func) in WRAPPERS and node.args:
        uses.methods.setdefault(owner_path(node.args[0]), set()).add("modules")
    if _last(func) in LAYERS or path in ("range", "math.sqrt", "math.log"):
        uses.numbers |= {dotted_name(argument) for argument in node.args}
    if not isinstance(func, ast.Attribute):
        return
    if func.attr in _CASTS or (func.attr == "to" and any(map(_is_half, node.args))):
        uses.is_active = True
    base = owner_path(func.value)
    if base:
        uses.methods.setdefault(base, set()).add(func.attr)
        if func.attr in ("step", "unscale_") and node.args:
            given.setdefault(base, set()).add(dotted_name(node.args[0]))
        if func.attr in ("backward", "prepare", "unwrap_model", "accumulate") and node.args:
            uses.frameworks.add(base)
    elif func.attr == "backward" and isinstance(func.value, ast.Call) and getattr(func.value.func, "attr", "") == "scale":
        uses.scalers.add(dotted_name(func.value.func.value))  # type: ignore[attr-defined]


def _note_number(uses: Uses, node: ast.BinOp) -> None:
    """`d // heads` and `d**-0.5` are about numbers."""
    if isinstance(node.op, ast.FloorDiv):
        uses.numbers |= {dotted_name(node.left), dotted_name(node.right)}
    elif isinstance(node.op, ast.Pow) and isinstance(node.right, (ast.Constant, ast.UnaryOp)):
        exponent = node.right.operand if isinstance(node.right, ast.UnaryOp) else node.right
        if isinstance(exponent, ast.Constant) and isinstance(exponent.value, float):
            uses.numbers.add(dotted_name(node.left))


def _is_half(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in _HALVES


class _Marks:
    """Where in a file regions and scalers are made and used, and where a backward or a step goes without: looked up by place,
    since every arm of every branch is asked."""

    def __init__(self, uses: Uses, calls: list[ast.Call]):
        made = [call for call in calls if _last(call.func) in _MAKES_AMP]
        used = [c for c in calls if _last(c.func) in _SCALER_CALLS and dotted_name(getattr(c.func, "value", c)) in uses.scalers]
        self.made = sorted(map(_start, made))
        self.used = sorted(map(_start, made + used))
        self.plain = sorted(_start(c) for c in calls if _last(c.func) == "backward" or (_last(c.func) == "step" and not c.args))


def _start(node: ast.AST) -> tuple[int, int]:
    first = min((node, *getattr(node, "decorator_list", ())), key=lambda n: n.lineno)
    return first.lineno, first.col_offset


def _has(places: list[tuple[int, int]], code: Sequence[ast.AST]) -> bool:
    """Whether one of these places is inside a piece of code."""
    if not code or not places:
        return False
    found = bisect_left(places, _start(code[0]))
    end = code[-1].end_lineno, code[-1].end_col_offset  # type: ignore[attr-defined]
    return found < len(places) and places[found] < end


def _note_switches(uses: Uses, blocks: list[ast.AST], same: list[tuple[str, str]], marks: _Marks) -> None:
    """Tests that turn mixed precision on or off: one arm has the scaler or makes the region, the other goes without."""
    for node in blocks:
        if isinstance(node, ast.IfExp):
            _note_switch(uses, node.test, [node.body], [node.orelse], marks)
            continue
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for position, statement in enumerate(block if isinstance(block, list) else ()):
                if isinstance(statement, ast.If):
                    leaves = isinstance(statement.body[-1], (ast.Return, ast.Continue, ast.Raise)) and not statement.orelse
                    others = block[position + 1 :] if leaves and block is not None else statement.orelse
                    _note_switch(uses, statement.test, statement.body, others, marks)
    for one, other in same + same:
        for a, b in ((one, other), (other, one)):
            if a in uses.switches:
                uses.switches.setdefault(b, uses.switches[a])


def _note_switch(uses: Uses, test: ast.expr, yes: Sequence[ast.AST], no: Sequence[ast.AST], marks: _Marks) -> None:
    if isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And):
            again = _keys_of(no[0].test) if len(no) == 1 and isinstance(no[0], ast.If) else set()
            for part in test.values:
                if test_key(part)[0] not in again:  # `elif last:` asks it of the arm without, too
                    _note_switch(uses, part, yes, no, marks)
        return
    uses_yes, uses_no = _has(marks.used, yes), _has(marks.used, no)
    if uses_yes and not uses_no and (_has(marks.made, yes) or _has(marks.plain, no)):
        key, arm = test_key(test)
        uses.switches[key] = arm
    elif uses_no and not uses_yes and (_has(marks.made, no) or _has(marks.plain, yes)):
        key, arm = test_key(test)
        uses.switches[key] = not arm


def _keys_of(test: ast.expr) -> set[str]:
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return {test_key(part)[0] for part in parts}


def test_key(test: ast.expr) -> tuple[str, bool]:
    """A text that is the same for the same question, and which answer the truth of the test gives to it; kept on the node."""
    known: tuple[str, bool] | None = getattr(test, "key", None)
    if known is None:
        known = _test_key(test)
        test.key = known  # type: ignore[attr-defined]
    return known


def _test_key(test: ast.expr) -> tuple[str, bool]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        key, arm = test_key(test.operand)
        return key, not arm
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        op, other = test.ops[0], test.comparators[0]
        path = path_of(test.left)
        if path and isinstance(op, (ast.Is, ast.IsNot)):
            is_nothing = isinstance(other, ast.Constant) and other.value in (None, False)
            return path, (isinstance(op, ast.Is)) != is_nothing
        if isinstance(op, ast.NotEq):
            return source_of(ast.copy_location(ast.Compare(test.left, [ast.Eq()], test.comparators), test)), False
    return path_of(test) or source_of(test), True


def path_of(test: ast.expr) -> str:
    """`args.fp16`, also for `args["fp16"]`."""
    if isinstance(test, ast.Subscript) and isinstance(test.slice, ast.Constant) and isinstance(test.slice.value, str):
        base = dotted_name(test.value)
        return f"{base}.{test.slice.value}" if base else ""
    return dotted_name(test)


def source_of(test: ast.AST) -> str:
    """The test's source, kept on the node: the same branch is met again whenever its function is followed."""
    known: str | None = getattr(test, "text", None)
    if known is None:
        known = ast.unparse(test)
        test.text = known  # type: ignore[attr-defined]
    return known


def _last(func: ast.AST) -> str:
    return getattr(func, "attr", getattr(func, "id", ""))


def bound_in(code: ast.AST) -> set[str]:
    """The variables that a loop or a function binds, in its head or its body; kept on its node."""
    known: set[str] | None = getattr(code, "bound", None)
    if known is None:
        known = {n.id for n in nodes(code) if type(n) is ast.Name and isinstance(n.ctx, ast.Store)}
        code.bound = known  # type: ignore[attr-defined]
    return known
