"""The project's own context managers: which regions a `with` on one of them enters."""

from __future__ import annotations

import ast
from dataclasses import replace

from . import calls, expressions, torchcalls
from .regions import AUTOCAST, Region
from .source import ClassInfo, FunctionInfo, dotted
from .trace import Context, Frame
from .values import UNKNOWN, Value

INNER = "(region)"  # field of a class derived from autocast: what its own __init__ opens
_ENTERS = ("__enter__", "__aenter__")


def is_manager(info: FunctionInfo) -> bool:
    """Whether a call of the function gives a context manager: `@contextmanager def zone(): ... yield`."""
    decorators = getattr(info.node, "decorator_list", ())
    return any(dotted(d).rpartition(".")[2] in ("contextmanager", "asynccontextmanager") for d in decorators)


def made_context(frame: Frame, info: FunctionInfo, outer: Context) -> Value | None:
    """What a `with` gets from a generator that yields inside regions, or from an `__enter__` that enters some."""
    if info.name in _ENTERS and info.owner is not None:
        return _context(tuple(frame.entered), outer.has_grad, outer)
    if not is_manager(info) or not frame.yields:
        return None
    value = UNKNOWN
    for position, place in enumerate(frame.yields):
        found = _context(place.regions[len(outer.regions) :], place.has_grad, outer)
        value = found if position == 0 else expressions.join_contexts(value, found)
    return value


def _context(regions: tuple[Region, ...], has_grad: bool, outer: Context) -> Value:
    tags = frozenset({"no_grad"}) if outer.has_grad and not has_grad else frozenset()
    inner = tuple(Value("context", ref=region) for region in regions[:-1])
    return Value("context", ref=regions[-1] if regions else None, inputs=inner, tags=tags)


def entered_instance(frame: Frame, value: Value) -> Value:
    """The context behind `with Zone():` for a class of the project."""
    if not isinstance(value.ref, ClassInfo):
        return UNKNOWN
    method = next((m for name in _ENTERS if (m := value.ref.find(name)) is not None), None)
    if method is not None:
        return calls.follow(frame, method, [value], {}, method.node)
    return value.ref.field_of(INNER) or UNKNOWN


def enter_by_hand(frame: Frame, value: Value) -> Value:
    """`stack.enter_context(region)`, or `region.__enter__()`: holds until the block of the frame ends, or `__exit__`."""
    if isinstance(value.ref, Region):
        is_conditional = bool(frame.at.guards)
        frame.entered.append(replace(value.ref, enabled=None) if is_conditional and value.ref.enabled else value.ref)
    return UNKNOWN


def leave_by_hand(frame: Frame, value: Value) -> Value:
    if isinstance(value.ref, Region):
        frame.entered[:] = [r for r in frame.entered if r.node is not value.ref.node]
        kept = tuple(r for r in frame.at.regions if r.node is not value.ref.node or r.node is None)
        frame.at = frame.inside(regions=kept)
    return UNKNOWN


def remember_base(frame: Frame, owner: ClassInfo, args: list[Value], kwargs: dict[str, Value], node: ast.Call) -> None:
    """`super().__init__("cuda", dtype=...)` in a class derived from autocast."""
    path = next((base for base in owner.bases if base in AUTOCAST), "")
    if path:
        owner.fields[INNER] = torchcalls.call_external(frame, node, path, args, kwargs)
