"""What happens in a program, in order: a `Trace` of `Event`s for each entry point, and the state while walking there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from .regions import Region
from .source import OwnClass, OwnFunction, Project, WalkedFile
from .values import UNKNOWN, Args, Env, Kwargs, Thing, Value, replace

MAX_DEPTH = 6  # calls followed into each other
MAX_STATEMENTS = 40_000  # per file; a generated monster must not hang the check

Guard = tuple[str, bool]


class Bound(str):
    """The key of a guard that holds something against a number: two that no number satisfies exclude each other."""

    path: str
    compare: Callable[[float, float], bool]
    number: float

    def __new__(cls, key: str, path: str, compare: Callable[[float, float], bool], number: float) -> Bound:
        new = super().__new__(cls, key)
        new.path, new.compare, new.number = path, compare, number
        return new

    def excludes(self, arm: bool, other: Bound, other_arm: bool) -> bool:
        tried = (number + shift for number in (self.number, other.number) for shift in (-1, -0.5, 0, 0.5, 1))
        return self.path == other.path and not any(
            self.compare(x, self.number) is arm and other.compare(x, other.number) is other_arm for x in tried
        )


class NotAll(str):
    """The key of a guard that was tried with all of these parts, and did not hold."""

    parts: tuple[Guard, ...]

    def __new__(cls, key: str, parts: tuple[Guard, ...]) -> NotAll:
        new = super().__new__(cls, key)
        new.parts = parts
        return new


@dataclass(frozen=True)
class Options:
    """What the user knows and the code does not say."""

    device: str | None = None  # cuda, cpu, ...
    amp_dtype: str | None = None  # fp16 or bf16


@dataclass(eq=False, slots=True)
class Context:
    """Where in the program we are; replaced, never changed, while descending."""

    regions: tuple[Region, ...] = ()
    has_grad: bool = True
    guards: tuple[Guard, ...] = ()
    loops: tuple[ast.AST, ...] = ()
    stack: tuple[OwnFunction, ...] = ()
    exits: frozenset[str] = frozenset()  # guards that hold only because the other way has left (return, continue, raise)
    left: frozenset[frozenset[Guard]] = frozenset()  # conditions under which this function has been left before

    @property
    def region(self) -> Region | None:
        """The innermost region that is on; None outside, and inside an island with enabled=False."""
        if not self.regions:
            return None
        inner = self.regions[-1]
        return inner if inner.is_on else None

    @property
    def island(self) -> Region | None:
        """The region with enabled=False that we are in, if an enabled one surrounds it."""
        if len(self.regions) < 2 or self.regions[-1].enabled is not False:
            return None
        return self.regions[-1] if any(r.is_on for r in self.regions[:-1]) else None


@dataclass(slots=True, eq=False)
class Event:
    """One operation: what, where, on which values, under which circumstances."""

    op: str
    node: ast.AST
    module: WalkedFile
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    out: Value
    at: Context

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 0)

    @property
    def file(self) -> str:
        return self.module.filename

    def place_in(self, file: str) -> str:
        """`line 12`, or `train.py:12` for a message in another file."""
        return f"line {self.line}" if self.file == file else f"{self.file}:{self.line}"

    def arg(self, position: int, name: str = "") -> Value:
        if name and name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if position < len(self.args) else UNKNOWN


def can_meet(a: Event, b: Event) -> bool:
    """Whether one pass through the code can meet both: no condition is taken both ways."""
    if not a.at.guards and not b.at.guards:
        return True
    taken, others = dict(a.at.guards), dict(b.at.guards)
    if not all(taken.get(key, arm) == arm for key, arm in others.items()):
        return False
    bounds = [(key, arm) for key, arm in taken.items() if type(key) is Bound]
    if bounds and any(key.excludes(arm, k, a) for key, arm in bounds for k, a in others.items() if type(k) is Bound):
        return False
    return not (_has_left(a.at, b.at) or _has_left(b.at, a.at))


def _has_left(one: Context, other: Context) -> bool:
    """Whether the conditions of one place are among those under which the code is left before the other."""
    return bool(other.left) and any(way.issubset(one.guards) for way in other.left)


@dataclass(eq=False, repr=False)
class Trace:
    """The events of one entry point (the module body, or a function nobody in the file calls) in program order."""

    name: str
    module: WalkedFile
    owner: OwnClass | None = None
    events: list[Event] = field(default_factory=list)
    _kept: dict[tuple[str, ...], list[tuple[int, Event]]] = field(default_factory=dict)

    @cached_property
    def by_op(self) -> dict[str, list[tuple[int, Event]]]:
        """Events with their positions, by operation; only once the trace is complete."""
        table: dict[str, list[tuple[int, Event]]] = {}
        for index, event in enumerate(self.events):
            table.setdefault(event.op, []).append((index, event))
        return table

    def of(self, *ops: str) -> list[Event]:
        """The events of these operations, in program order."""
        return [event for _, event in self.with_positions(*ops)]

    def with_positions(self, *ops: str) -> list[tuple[int, Event]]:
        """The same with their positions; asked for at every event of some rules, so it is kept."""
        if ops not in self._kept:
            self._kept[ops] = sorted((item for op in ops for item in self.by_op.get(op, ())), key=lambda item: item[0])
        return self._kept[ops]


@dataclass(eq=False, repr=False)
class FileView:
    """All that was seen from one file's entry points."""

    module: WalkedFile
    traces: list[Trace]
    options: Options
    _made: dict[str, set[int]] = field(default_factory=dict)

    @cached_property
    def events(self) -> list[Event]:
        return [e for trace in self.traces for e in trace.events]

    @cached_property
    def by_op(self) -> dict[str, list[Event]]:
        table: dict[str, list[Event]] = {}
        for event in self.events:
            table.setdefault(event.op, []).append(event)
        return table

    @cached_property
    def _traces_of(self) -> dict[int, Trace]:
        return {id(event): trace for trace in reversed(self.traces) for event in trace.events}

    def trace_of(self, event: Event) -> Trace | None:
        """The trace that an event is in."""
        return self._traces_of.get(id(event))

    def of(self, *ops: str) -> list[Event]:
        return [e for op in ops for e in self.by_op.get(op, ())]

    def once(self, key: str, make: Callable[[], set[int]]) -> set[int]:
        """A set that rules ask for at every event, made at the first."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def is_training(self) -> bool:
        """Whether gradients are made or used anywhere in this file."""
        return bool(self.of("backward", "optimizer.step", "scaler.step", "scaler.scale", "framework.backward", "framework.train"))


@dataclass(eq=False, repr=False)
class Frame:
    """One activation of a function, or the module body."""

    options: Options
    module: WalkedFile
    trace: Trace
    env: Env
    at: Context = field(default_factory=Context)
    closure: dict[str, Value] | None = None
    owner: OwnClass | None = None
    returns: list[Value] = field(default_factory=list)
    yields: list[Context] = field(default_factory=list)  # where the function yields
    globals: set[str] = field(default_factory=set)
    entered: list[Region] = field(default_factory=list)  # by ExitStack.enter_context
    spine: tuple[ast.AST | None, str] = (None, "")  # the call that starts what is being assigned, and the name it will get
    is_over: bool = False  # the current block has returned, raised, continued or broken
    left: list[frozenset[Guard]] = field(default_factory=list)  # the branches that have, each by its conditions in here
    base: int = 0  # guards around the call
    asked: dict[ast.BoolOp, list[Value]] = field(default_factory=dict)  # what the parts of a test were worth

    def __post_init__(self) -> None:
        self.base = len(self.at.guards)

    def lookup(self, name: str) -> Value | None:
        found = self.env.get(name)
        if found is None and self.closure is not None:
            found = self.closure.get(name)
        if found is None:
            found = self.module.env.get(name)
        return found

    def unknown(self, path: str) -> Value:
        """A value we know nothing of but its name; the same one each time it is named."""
        found = self.lookup(path)
        if found is None:
            found = Value(thing=Thing(path))
            self.env[path] = found
        return found

    def fresh(self, node: ast.AST) -> Thing:
        """A new object made by a call; named already if it is on its way into a variable (`model = make().cuda().half()`)."""
        return Thing(self.spine[1] if node is self.spine[0] else "")

    def emit(
        self, op: str, node: ast.AST, args: tuple[Value, ...], kwargs: Mapping[str, Value] | None = None,
        out: Value = UNKNOWN,
    ) -> Value:  # fmt: skip
        self.mark(node)
        self.trace.events.append(Event(op, node, self.module, args, kwargs or {}, out, self.at))
        return out

    def mark(self, node: ast.AST) -> None:
        """Notes on a node in which file it stands: what is said about it may be said while walking another."""
        node.file = self.module.filename  # type: ignore[attr-defined]

    def inside(self, **changes: object) -> Context:
        return replace(self.at, **changes)


class Walk(Protocol):
    """What the files beside the interpreter ask of it: whatever runs code of the project goes back through here."""

    project: Project
    options: Options
    modules: dict[str, WalkedFile | None]
    follows_imports: bool

    def evaluate(self, frame: Frame, node: ast.AST | None) -> Value: ...

    def assign(self, frame: Frame, target: ast.expr, value: Value) -> None: ...

    def run_block(self, frame: Frame, body: Sequence[ast.stmt]) -> None: ...

    def follow(self, frame: Frame, info: OwnFunction, args: Args, kwargs: Kwargs, node: ast.AST) -> Value: ...

    def construct(self, frame: Frame, info: OwnClass, args: Args, kwargs: Kwargs, node: ast.AST) -> Value: ...

    def build(self, frame: Frame, info: OwnClass, value: Value, args: Args, kwargs: Kwargs, node: ast.AST) -> None: ...
