"""Context managers: what a `with`, a decorator or an `__enter__` of the project's own opens."""

from __future__ import annotations

import ast

from . import attributes, torch_calls
from .regions import AUTOCAST, NO_GRAD, Region
from .source import OwnClass, OwnFunction
from .trace import Context, Frame, Walk
from .uses import dotted_name
from .values import HALF, UNKNOWN, Value, replace

INNER = "(region)"  # field of a class derived from autocast: what its own __init__ opens


_ENTERS = ("__enter__", "__aenter__")


def is_manager(info: OwnFunction) -> bool:
    """Whether a call of the function gives a context manager: `@contextmanager def zone(): ... yield`."""
    return any(name.rpartition(".")[2] in ("contextmanager", "asynccontextmanager") for name in info.decorators)


def join_contexts(left: Value, right: Value) -> Value:
    both = [v.ref for v in (left, right) if isinstance(v.ref, Region)]
    tags = left.tags & right.tags
    if len(both) == 1:
        return Value("context", ref=replace(both[0], enabled=None if both[0].enabled else both[0].enabled), tags=tags)
    if len(both) == 2 and both[0].dtype != both[1].dtype:
        kind = "half" if {both[0].dtype, both[1].dtype} <= HALF else both[0].dtype
        return Value(
            "context",
            ref=replace(both[0], dtype=kind, device=both[0].device if both[0].device == both[1].device else ""),
            tags=tags,
        )
    return replace(left, tags=tags)


def _context(regions: tuple[Region, ...], has_grad: bool, outer: Context) -> Value:
    tags = frozenset({"no_grad"}) if outer.has_grad and not has_grad else frozenset()
    inner = tuple(Value("context", ref=region) for region in regions[:-1])
    return Value("context", ref=regions[-1] if regions else None, inputs=inner, tags=tags)


def enter(walk: Walk, frame: Frame, value: Value) -> None:
    """Takes the effect of entering a context manager; undone by whoever restores `frame.at`."""
    if value.kind == "instance":
        value = entered_instance(walk, frame, value)
    if value.kind != "context":
        return
    for inner in value.inputs:
        enter(walk, frame, inner)
    if isinstance(value.ref, Region):
        frame.at = frame.inside(regions=(*frame.at.regions, value.ref))
    if "no_grad" in value.tags:
        frame.at = frame.inside(has_grad=False)
    if "enable_grad" in value.tags:
        frame.at = frame.inside(has_grad=True)


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


def made_context(frame: Frame, info: OwnFunction, outer: Context) -> Value | None:
    """What a `with` gets from a generator that yields inside regions, or from an `__enter__` that enters some."""
    if info.name in _ENTERS and info.owner is not None:
        return _context(tuple(frame.entered), outer.has_grad, outer)
    if not is_manager(info) or not frame.yields:
        return None
    value = UNKNOWN
    for position, place in enumerate(frame.yields):
        found = _context(place.regions[len(outer.regions) :], place.has_grad, outer)
        value = found if position == 0 else join_contexts(value, found)
    return value


def entered_instance(walk: Walk, frame: Frame, value: Value) -> Value:
    """The context behind `with Zone():` for a class of the project."""
    if not isinstance(value.ref, OwnClass):
        return UNKNOWN
    method = next((m for name in _ENTERS if (m := value.ref.find(name)) is not None), None)
    if method is not None:
        return walk.follow(frame, method, [value], {}, method.node)
    return attributes.field_of(value, INNER) or UNKNOWN


def decorator_context(walk: Walk, frame: Frame, decorator: ast.expr) -> Value:
    """The context that a decorator puts a function's body into."""
    name = dotted_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
    if not name:
        return UNKNOWN
    value = walk.evaluate(frame, decorator.func if isinstance(decorator, ast.Call) else decorator)
    path = value.ref if value.kind == "external" else ""
    if path in NO_GRAD:
        return Value("context", tags=frozenset({"no_grad"}))
    if isinstance(path, str) and path.rpartition(".")[2] == "custom_fwd":
        return torch_calls.custom_fwd(decorator, path)
    if isinstance(decorator, ast.Call):
        return walk.evaluate(frame, decorator)
    if path in AUTOCAST:
        return Value(
            "context",
            ref=Region(AUTOCAST[path] or "", "fp16" if AUTOCAST[path] == "cuda" else "half", True, decorator.lineno, path),
        )
    return UNKNOWN
