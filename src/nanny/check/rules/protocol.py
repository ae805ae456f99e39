"""Questions about the order of backward, unscale_, clip, step and update in a trace."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..interpreter.guards import AMP
from ..interpreter.objects import parameter_owners
from ..interpreter.trace import Event, Trace, can_meet
from ..interpreter.values import UNKNOWN, Value


def is_scaled(event: Event) -> bool:
    """Whether a backward event runs on a scaled loss; an Accelerator in fp16 scales it by itself."""
    if event.op == "framework.backward":
        return event.arg(0).ref == "accelerate" and event.arg(0).const == "fp16"
    return "scaled" in event.arg(0).tags


def before(trace: Trace, index: int) -> Iterator[Event]:
    """The events that the same pass can have met before event `index`, nearest first."""
    here = trace.events[index]
    for event in reversed(trace.events[:index]):
        if can_meet(here, event):
            yield event


def after(trace: Trace, index: int) -> Iterator[Event]:
    here = trace.events[index]
    for event in trace.events[index + 1 :]:
        if can_meet(here, event):
            yield event


def same_object(a: Value, b: Value) -> bool:
    """Whether two values name one object, as far as can be told."""
    if a is b:
        return True
    if a.thing is not None and b.thing is not None:
        return a.thing is b.thing or (bool(a.thing.name) and a.thing.name == b.thing.name)
    return False


def scaler_of(event: Event) -> Value:
    return event.arg(0)


def is_disabled(scaler: Value, view_events: list[Event]) -> bool:
    """Whether the scaler is built with enabled=False: then every call on it passes through."""
    for event in view_events:
        if event.out is scaler or (event.out.thing is not None and event.out.thing is scaler.thing):
            enabled = event.kwargs.get("enabled")
            return enabled is not None and enabled.const is False
    return False


_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_UNSCALES = ("framework.clip_grad_norm_", "framework.clip_grad_value_", "framework.unscale_gradients", "optimizer.step")


def _hands_on_scaler(event: Event) -> bool:
    """Whether a scaler is given to code that we cannot see: it may unscale or step there."""
    if event.op not in ("unknown_call", "external", "module_call"):
        return False
    return any(
        v.kind == "scaler" or (v.thing is not None and v.thing.kind == "scaler")
        for v in (*event.args[1:], *event.kwargs.values())
    )


def backward_for(trace: Trace, index: int, params: Value = UNKNOWN) -> Event | None:
    """The scaled backward whose gradients are still scaled at event `index`; None if they are not.

    With `params`, an `unscale_` of an optimizer that is known to hold other parameters does not count.
    """
    owners = {id(t) for t in parameter_owners(params)}
    owners &= {id(t) for e in trace.of("scaler.step", "scaler.unscale_") for t in parameter_owners(e.arg(1))}
    for event in before(trace, index):
        if event.op in ("backward", "framework.backward"):
            return event if is_scaled(event) else None
        if event.op in _UNSCALES or _hands_on_scaler(event):
            return None
        if event.op in ("scaler.unscale_", "scaler.step"):
            held = {id(t) for t in parameter_owners(event.arg(1))} if event.arg(1).kind == "optimizer" else set()
            if not (owners and held and owners.isdisjoint(held)):
                return None
        elif event.op in ("optimizer.zero_grad", "module.zero_grad"):
            return None
    return None


def extra_guards(event: Event, base: Event) -> set[str]:
    """Conditions that `event` has and the step `base` has not, but for those about AMP itself, about which optimizer it is, or
    left by early exits."""
    known = {key for key, _ in base.at.guards}
    stepped = _names(base.node)
    mine = {key for key, _ in event.at.guards if key != AMP and not key.startswith("except@")} - known - event.at.exits
    return {key for key in mine if stepped.isdisjoint(identifiers(key))}


def _names(node: ast.AST) -> set[str]:
    """The variables in the arguments of a call: the optimizer, and the index that picks it."""
    arguments = node.args if isinstance(node, ast.Call) else []
    return {inner.id for argument in arguments for inner in ast.walk(argument) if isinstance(inner, ast.Name)} - {"self"}


def identifiers(key: str) -> set[str]:
    """The names in a guard's key, which is the source of its test."""
    return set(_IDENTIFIER.findall(key))


def window_keys(event: Event) -> set[str]:
    return {key for key, arm in event.at.guards if key.startswith("mod:")}


def loops_over_optimizers(event: Event) -> list[ast.AST]:
    """The loops around a `scaler.step(opt)` that run over optimizers: what is stepped is bound by the loop."""
    node = event.node
    if not (isinstance(node, ast.Call) and node.args):
        return []
    used = {n.id for n in ast.walk(node.args[0]) if isinstance(n, ast.Name)}
    found = []
    for loop in event.at.loops:
        names = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if names & used:
            found.append(loop)
    return found
