"""Whether something is trained, as far as a file tells: in an optimizer, set to train, or under a loss that goes backward."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ..interpreter.objects import optimizer_base, parameter_owners, parts_of
from ..interpreter.source import OwnClass
from ..interpreter.torch_names import TRAINING_ARGUMENTS
from ..interpreter.trace import Event, FileView, can_meet
from ..interpreter.values import Thing, Value, ancestors

_MASTERS = ("param", "parameters", "named_parameters")
_BACKWARD = ("backward", "framework.backward")
MAKES_GRADIENTS = (*_BACKWARD, "scaler.scale")
_STEPS = ("optimizer.step", "scaler.step", "framework.step")
_WIDE = frozenset({"float32", "float", "float64", "int16", "uint16", "int32", "uint32"})


def is_trained(thing: Thing, view: FileView) -> bool:
    if thing.is_fixed:
        return False
    if thing.is_trained:
        return True
    if thing.owner is not None:
        return not thing.is_frozen and is_trained(thing.owner, view)
    if not view.of("optimizer.new", "optimizer.step", "scaler.step", "framework.backward"):
        return False
    if _others_are_trained(thing, view):
        return False
    if thing.is_set_to_train:
        return True
    if thing.is_frozen:
        return False
    for trace in view.traces:
        steps = trace.of(*_STEPS, "framework.backward")
        for event in trace.of(*_BACKWARD):
            if not any(share_loop(event, step) for step in steps):
                continue  # gradients that nothing steps train nothing
            for loss in event.args:
                if any(v.thing is thing and v.kind != "tensor" for v in ancestors(loss)):
                    return True
    return False


def is_stepped(backward: Event, view: FileView) -> bool:
    """Whether a step may use the gradients of a backward: one in its pass, or in code that is walked by itself."""
    made = view.trace_of(backward)
    steps = made.of(*_STEPS) if made is not None else []
    return any(share_loop(backward, step) for step in steps) if steps else bool(view.of(*_STEPS))


def is_tried_once(model: Value, view: FileView) -> bool:
    """Whether a model is made, stepped and left in one pass: a trial of the machine, no training."""
    made = next((e for e in view.of("layer", "from_pretrained", "module.new") if e.out.thing is model.thing), None)
    made = made or next((e for e in view.of("external", "unknown_call") if e.node is model.node), None)
    if made is None or view.of("framework.train"):  # a framework's loop is no single pass
        return False
    return all(e.at.loops == made.at.loops and e.at.stack == made.at.stack for e in view.of(*_STEPS, *_BACKWARD))


def share_loop(backward: Event, step: Event) -> bool:
    """Whether one pass makes the gradients and steps: their loops are the same, or one is inside the other's."""
    short, long = sorted((backward.at.loops, step.at.loops), key=len)
    return long[: len(short)] == short and bool(short or not long)


def _others_are_trained(thing: Thing, view: FileView) -> bool:
    """Whether every optimizer is known to hold the parameters of other modules."""
    made = view.of("optimizer.new")
    owners = [parameter_owners(event.arg(0)) for event in made]
    if not made or not all(owners):
        return False
    held = parts_of(owner for group in owners for owner in group)
    inside = {id(v.thing) for v in thing.attrs.values() if v.thing is not None}
    return id(thing) not in held and held.isdisjoint(inside)


def has_master_copy(view: FileView) -> bool:
    """Whether float32 copies of half parameters are kept: by hand, or by a wrapper around the optimizer that may do so."""
    if any(
        e.out.dtype == "fp32" and any(v.op in _MASTERS for v in ancestors(e.arg(0), 8)) and "grad" not in e.arg(0).tags
        for e in view.of("cast")
    ):
        return True
    if any(e.arg(0).kind != "framework" for e in view.of("framework.backward")):  # optimizer.backward(loss)
        return True
    if any(e.out.ref == "deepspeed" for e in view.of("framework.new")):
        return True
    if "deepspeed_plugin" in view.module.uses.identifiers or any(
        e.arg(0).last in TRAINING_ARGUMENTS and "deepspeed" in e.kwargs for e in view.of("external")
    ):
        return True  # whoever starts it may give DeepSpeed its settings, which keeps float32 weights
    if any(_keeps_bits(info) for info in view.module.classes):
        return True
    stepped = [e.arg(0) for e in view.of("optimizer.step")] + [e.arg(1) for e in view.of("scaler.step")]
    return any(v.kind == "" and v.op.startswith("call:") and "." in v.op for v in stepped)


def _keeps_bits(info: OwnClass) -> bool:
    """Whether an optimizer of the project keeps more of a weight than half has: a float32 copy, or its lower bits as integers."""
    step = info.methods.get("step")
    if step is None or not optimizer_base(info):
        return False
    made = [n for n in ast.walk(step.node) if isinstance(n, ast.keyword) and n.arg == "dtype"]
    return any(isinstance(n.value, ast.Attribute) and n.value.attr in _WIDE for n in made)


def trains_after(event: Event, view: FileView) -> bool:
    """Whether a backward can come after this event: a cast at the very end, for export, is no training in half, nor is one in
    a branch that never gets there."""
    for trace in view.traces:
        positions = [i for i, e in enumerate(trace.events) if e is event]
        if positions:
            backwards = [(i, e) for i, e in enumerate(trace.events) if e.op in (*_BACKWARD, "framework.train")]
            return not backwards or any(i > positions[0] and can_meet(event, e) for i, e in backwards)
    return True


def goes_backward(value: Value, events: Iterable[Event]) -> bool:
    """Whether a value is (a part of) a loss that one of the events scales or takes the gradient of."""
    return any(v is value for loss in losses_of(events) for v in ancestors(loss))


def losses_of(events: Iterable[Event]) -> list[Value]:
    """What the events scale or take the gradient of."""
    return [e.arg(1) if e.op in ("scaler.scale", "framework.backward") else e.arg(0) for e in events]
