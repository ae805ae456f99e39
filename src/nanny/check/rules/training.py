"""Whether something is trained, as far as a file tells: in an optimizer, set to train, or under a loss that goes backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..interpreter.trace import Event, FileView
from ..interpreter.values import HALF, Thing, Value, ancestors

_MASTERS = ("param", "parameters", "named_parameters")
_BACKWARD = ("backward", "framework.backward")


def is_trained(thing: Thing, view: FileView) -> bool:
    if thing.is_trained:
        return True
    if thing.owner is not None:
        return not thing.is_frozen and is_trained(thing.owner, view)
    if not view.of("optimizer.new", "optimizer.step", "scaler.step", "framework.backward"):
        return False
    if thing.is_set_to_train:
        return True
    if thing.is_frozen:
        return False
    for event in view.of(*_BACKWARD):
        for loss in event.args:
            if any(v.thing is thing and v.kind != "tensor" for v in ancestors(loss)):
                return True
    return False


def has_master_copy(view: FileView) -> bool:
    """Whether the file keeps float32 copies of half parameters, as a mixed-precision optimizer written by hand does."""
    return any(
        e.out.dtype == "fp32" and any(v.op in _MASTERS for v in ancestors(e.arg(0), 8)) and "grad" not in e.arg(0).tags
        for e in view.of("cast")
    )


def trains_after(event: Event, view: FileView) -> bool:
    """Whether a backward can come after this event: a cast at the very end, for export, is no training in half."""
    for trace in view.traces:
        positions = [i for i, e in enumerate(trace.events) if e is event]
        if positions:
            backwards = [i for i, e in enumerate(trace.events) if e.op in _BACKWARD]
            return not backwards or backwards[-1] > positions[0]
    return True


def _until_float32(value: Value) -> Iterator[Value]:
    stack, seen = [value], 0
    while stack and seen < 100:
        seen += 1
        current = stack.pop()
        if current.dtype == "fp32" and current.op == "cast":
            continue
        yield current
        stack.extend(current.inputs)


def half_parameters(params: Value, event: Event) -> str:
    """`fp16` or `bf16` if the parameters handed to an optimizer are known to be that."""
    stack, seen = [params], set[int]()
    while stack and len(seen) < 300:
        root = stack.pop()
        if id(root) in seen:
            continue
        seen.add(id(root))
        for value in _until_float32(root):
            for kind in (value.thing.dtype if value.thing else "", value.dtype if value.op in ("parameter", "param") else ""):
                if kind in HALF:
                    return kind
            if value.kind == "dict" and isinstance(value.ref, dict):
                stack.extend(v for v in value.ref.values() if isinstance(v, Value))
            if value.kind == "instance" and value.thing is not None:
                stack.extend(value.thing.attrs.values())
    return ""


def goes_backward(value: Value, events: Iterable[Event]) -> bool:
    """Whether a value is (a part of) a loss that one of the events scales or takes the gradient of."""
    losses = (e.arg(1) if e.op in ("scaler.scale", "framework.backward") else e.arg(0) for e in events)
    return any(v is value for loss in losses for v in ancestors(loss))
