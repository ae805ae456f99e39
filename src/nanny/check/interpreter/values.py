"""What the checker knows about a value in the program: its kind, its dtype with the reason, and how it was made.

Values form a graph: `op` and `inputs` say which operation made a value from which others, so that a rule can ask
"is this the log of a softmax?" across assignments and calls. Objects with a life of their own (a model, an optimizer, a
scaler) carry a `Thing`, which all values naming that object share.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

HALF = frozenset({"fp16", "bf16", "half"})  # "half": one of the two, not known which
NOTHING: Any = type("Nothing", (), {"__repr__": lambda self: "NOTHING"})()


@dataclass(eq=False, repr=False)
class Thing:
    """An object that changes in place: a module, an optimizer, a scaler, or something not known yet."""

    name: str = ""
    kind: str = ""
    dtype: str = ""
    cast: ast.AST | None = None  # the call that made it half
    cast_line: int = 0
    device: str = ""
    owner: Thing | None = None  # the module that this is some part of
    is_frozen: bool = False  # eval() or requires_grad_(False)
    is_fixed: bool = False  # requires_grad_(False) was the last word: train() does not undo it
    is_trained: bool = False  # its parameters are in an optimizer
    is_set_to_train: bool = False  # train() was called
    is_built: bool = False  # its __init__ has been run
    region: Any = None  # the autocast region that a framework runs its forward in; what comes out is float32 again
    runs_in: str = ""  # the dtype that a framework casts the weights to for a forward; float32 ones are kept
    attrs: dict[str, Value] = field(default_factory=dict)


_put = object.__setattr__


def replace(item: T, **changes: Any) -> T:
    """A copy with changes, of what has slots: as that of dataclasses, in a quarter of the time."""
    kind = type(item)
    new = kind.__new__(kind)
    for name in kind.__slots__:  # type: ignore[attr-defined]
        _put(new, name, changes[name] if name in changes else getattr(item, name))
    return new


@dataclass(eq=False, slots=True, repr=False)  # never changed; frozen would cost four times as much to make
class Value:
    kind: str = ""  # tensor const dtype device tuple list dict function class instance module optimizer scaler context external
    dtype: str = ""
    why: str = ""
    line: int = 0
    sure: bool = True  # False: a convention, such as "a model called under autocast returns half"
    op: str = ""
    inputs: tuple[Value, ...] = ()
    const: Any = NOTHING
    ref: Any = None  # definition, Region, dotted name, dict of items: depends on the kind
    thing: Thing | None = None
    tags: frozenset[str] = frozenset()
    node: ast.AST | None = None

    @property
    def is_half(self) -> bool:
        return self.dtype in HALF

    @property
    def path(self) -> str:
        """The dotted name of something imported; empty for anything else."""
        return self.ref if isinstance(self.ref, str) else ""

    @property
    def last(self) -> str:
        """The last part of that name: what the package calls it."""
        return self.path.rpartition(".")[2]

    @property
    def is_number(self) -> bool:
        return isinstance(self.const, (int, float)) and not isinstance(self.const, bool)

    @property
    def is_none(self) -> bool:
        return self.kind == "const" and self.const is None


class Env(dict[str, Value]):
    """The bindings of one activation. What a branch changes can be taken back, at the cost of the changes alone."""

    def __init__(self) -> None:
        super().__init__()
        self._journals: list[dict[str, Value | None]] = []  # what each open branch found before its changes

    def __setitem__(self, name: str, value: Value) -> None:
        if self._journals:
            self._journals[-1].setdefault(name, self.get(name))
        super().__setitem__(name, value)

    def drop(self, name: str) -> None:
        if name in self:
            if self._journals:
                self._journals[-1].setdefault(name, self[name])
            del self[name]

    def begin(self) -> None:
        self._journals.append({})

    def take_back(self) -> dict[str, Value | None]:
        """Undoes all since `begin`, and gives what was bound (None: no longer) by then."""
        before = self._journals.pop()
        after = {name: self.get(name) for name in before}
        for name, value in before.items():
            if value is None:
                self.pop(name, None)
            else:
                super().__setitem__(name, value)
        return after

    def put(self, changes: dict[str, Value | None]) -> None:
        for name, value in changes.items():
            if value is None:
                self.drop(name)
            else:
                self[name] = value

    def put_joined(self, one: dict[str, Value | None], other: dict[str, Value | None]) -> None:
        """What is bound after two branches; what one of them does not bind is as the other has it."""
        for name in {**one, **other}:
            left, right = one.get(name, self.get(name)), other.get(name, self.get(name))
            if left is None or right is None:
                self.put({name: left or right})
            else:
                self[name] = left if left is right else join(left, right)


Args = list[Value]
Kwargs = dict[str, Value]
UNKNOWN = Value()
NONE = Value("const", const=None)


def constant(value: Any) -> Value:
    return Value("const", const=value)


def tensor(dtype: str = "", why: str = "", line: int = 0, **rest: Any) -> Value:
    return Value("tensor", dtype, why, line, **rest)


def copy_of(value: Value, known: dict[int, Thing] | None = None) -> Value:
    """A copy of an object, with copies of the modules inside it: what is trained or cast later is one of the two."""
    thing = value.thing
    known = {} if known is None else known
    if thing is None or value.kind == "tensor":
        return value
    if id(thing) not in known:
        known[id(thing)] = new = Thing("", thing.kind, thing.dtype, device=thing.device, is_built=thing.is_built)
        new.attrs = {k: copy_of(v, known) if v.kind in ("module", "instance") else v for k, v in thing.attrs.items()}
    inputs = tuple(copy_of(v, known) for v in value.inputs) if value.kind == "module" else value.inputs
    return replace(value, thing=known[id(thing)], inputs=inputs)


def as_default(value: Value, name: str, tags: frozenset[str] = frozenset()) -> Value:
    """A setting as it is if nobody gives another (an option of argparse, a node of yacs): it decides no branch."""
    soft = value.is_number or (isinstance(value.const, str) and value.const)
    tags |= {"default", "default_off"} if value.const is False else {"default"}
    return Value("const" if soft else "", const=value.const if soft else NOTHING, sure=False, tags=tags, thing=Thing(name))


def join_dtype(left: str, right: str) -> str:
    if left == right:
        return left
    return "half" if left in HALF and right in HALF else ""


_OBJECTS = ("scaler", "optimizer", "module", "context", "instance")


def join(left: Value, right: Value) -> Value:
    """The value after two branches: what holds on both; a missing (None) side gives way to the other."""
    if left is right or right.is_none:
        return left
    if left.is_none:
        return right
    tags = left.tags | right.tags
    if ("scaled" in left.tags) != ("scaled" in right.tags):
        tags |= {"maybe_scaled"}
    if left.kind != right.kind:
        if "" in (left.kind, right.kind) and (left.kind in _OBJECTS or right.kind in _OBJECTS):
            return left if left.kind in _OBJECTS else right
        return Value(tags=tags, op="phi", inputs=(left, right), thing=left.thing or right.thing)
    if left.kind == "const" and left.const == right.const and type(left.const) is type(right.const):
        return left
    if left.kind in ("dtype", "device", "const"):
        const = join_dtype(left.const, right.const) if left.kind == "dtype" else NOTHING
        return Value(left.kind, const=const, op="phi", inputs=(left, right))
    if left.kind in ("tuple", "list") and len(left.inputs) == len(right.inputs):
        return replace(left, inputs=tuple(join(a, b) for a, b in zip(left.inputs, right.inputs)))
    if left.kind in ("tensor", ""):
        known = left if left.dtype else right
        dtype = join_dtype(left.dtype, right.dtype)
        sure = left.sure and right.sure
        thing = left.thing if left.thing is right.thing else None
        if not left.kind:
            thing = left.thing or right.thing
        return Value(left.kind, dtype, known.why, known.line, sure, "phi", (left, right), thing=thing, tags=tags, node=left.node)
    return left


def widest(values: Iterator[Value] | tuple[Value, ...]) -> Value:
    """The operand that decides the dtype under torch's promotion, or UNKNOWN if that cannot be told."""
    best = UNKNOWN
    order = {"bool": 0, "int": 1, "half": 2, "fp16": 2, "bf16": 2, "fp32": 3, "fp64": 4}
    for value in values:
        if value.kind == "const" or value.is_number:
            continue
        if not value.dtype:
            return UNKNOWN
        if best is UNKNOWN or order[value.dtype] > order[best.dtype]:
            best = value
        elif order[value.dtype] == 2 and order[best.dtype] == 2 and value.dtype != best.dtype:
            if "half" not in (value.dtype, best.dtype):  # fp16 with bf16 gives fp32
                return replace(value, dtype="fp32", why="fp16 with bf16", op="", inputs=())
            best = value if best.dtype == "half" else best
    return best


def ancestors(value: Value, limit: int = 400) -> Iterator[Value]:
    """The value and everything that it was made from, each once."""
    seen: set[int] = set()
    stack = [value]
    while stack and len(seen) < limit:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        stack.extend(current.inputs)
        if current.kind == "dict" and isinstance(current.ref, dict):
            stack.extend(item for item in current.ref.values() if isinstance(item, Value))
