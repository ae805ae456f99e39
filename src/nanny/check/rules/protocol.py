"""Questions about the order of backward, unscale_, clip, step and update in a trace."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from ...core.finding import Link
from ..chains import link
from ..interpreter.guards import AMP, is_latch
from ..interpreter.objects import parameter_owners, parts_of
from ..interpreter.trace import Event, FileView, Trace, can_meet
from ..interpreter.uses import bound_in
from ..interpreter.values import UNKNOWN, Value

HORIZON = 1000  # events: what is further away belongs to another step


def near(events: list[tuple[int, Event]], index: int) -> list[Event]:
    """Of events with their positions, in order, those within the horizon of a position."""
    first = bisect_left(events, index - HORIZON, key=itemgetter(0))
    last = bisect_left(events, index + HORIZON, key=itemgetter(0))
    return [event for _, event in events[first:last]]


def is_scaled(event: Event) -> bool:
    """Whether a backward event runs on a scaled loss; Accelerate and Lightning in fp16 scale it themselves."""
    if event.op == "framework.backward":
        framework = event.arg(0)
        return framework.ref in ("accelerate", "fabric", "lightning") and framework.const in ("fp16", "16-mixed", 16, "16")
    return "scaled" in event.arg(0).tags


def before(trace: Trace, index: int) -> Iterator[Event]:
    """The events that the same pass can have met before event `index`, nearest first."""
    here = trace.events[index]
    for position in range(index - 1, max(index - HORIZON, 0) - 1, -1):
        if can_meet(here, trace.events[position]):
            yield trace.events[position]


def after(trace: Trace, index: int) -> Iterator[Event]:
    here = trace.events[index]
    for position in range(index + 1, min(index + HORIZON, len(trace.events))):
        if can_meet(here, trace.events[position]):
            yield trace.events[position]


def same_object(a: Value, b: Value) -> bool:
    """Whether two values name one object, as far as can be told."""
    if a is b:
        return True
    if a.thing is not None and b.thing is not None:
        return a.thing is b.thing or (bool(a.thing.name) and a.thing.name == b.thing.name)
    return False


def doubt_of_object(a: Value, b: Value, what: str) -> str:
    """What is open where two values only have one name: whether they are one object."""
    return "" if a is b or (a.thing is not None and a.thing is b.thing) else f"whether it is the same {what}"


def doubt_of_pass(earlier: Event, later: Event) -> str:
    """What is open where the branch of the earlier one may leave before the later one: whether it does."""
    taken = set(earlier.at.guards)
    for way in later.at.left - earlier.at.left:
        if taken & way and not any((key, not arm) in taken for key, arm in way):
            return f"whether it is left before, where `{sorted(way - taken)[0][0]}`"
    return ""


def scaler_of(event: Event) -> Value:
    return event.arg(0)


def is_disabled(scaler: Value, view_events: list[Event]) -> bool:
    """Whether the scaler is built with enabled=False: then every call on it passes through."""
    for event in view_events:
        if event.out is scaler or (event.out.thing is not None and event.out.thing is scaler.thing):
            enabled = event.kwargs.get("enabled")
            return enabled is not None and enabled.const is False
    return False


def run_together(*events: Event) -> bool:
    """Whether nothing decides between these events: one's conditions are among another's, and none waits for an error."""
    if len({guard for e in events for guard in e.at.guards if guard[0] == AMP}) > 1:
        return False
    taken = sorted(({guard for guard in e.at.guards if guard[0] != AMP} for e in events), key=len)
    caught = any(key.startswith("except@") for guards in taken for key, _ in guards)
    return not caught and all(one <= other for one, other in pairwise(taken))


def is_in_sight(view: FileView, scaler: Value, *optimizers: Value) -> bool:
    """Whether the one scaler of the program and these optimizers are made in the code that is read, the scaler switched on or by
    the program's own switch."""
    scalers, made = view.of("scaler.new"), {id(e.out.thing) for e in view.of("optimizer.new")}
    if len({id(e.out.thing) for e in scalers}) != 1 or scalers[0].out.thing is not scaler.thing:
        return False
    return not is_disabled(scaler, scalers) and all(value.thing is not None and id(value.thing) in made for value in optimizers)


def is_given(view: FileView) -> bool:
    """Whether there is a scaler at all: one is made, or a loss is scaled; a helper may offer to step one that nobody has."""
    return bool(view.of("scaler.new", "scaler.scale"))


def first_scale(view: FileView) -> str:
    """The scale that gradients carry at first, in words: what the program gives its scaler, or torch's default."""
    return next((f"{value.const:,.0f}" for value in _init_scales(view) if value.is_number), "65,536")


def has_own_scale(view: FileView) -> bool:
    """Whether the program chooses the scale that it begins with."""
    return any(value is not UNKNOWN for value in _init_scales(view))


def _init_scales(view: FileView) -> Iterator[Value]:
    for event in view.of("scaler.new"):
        yield event.kwargs.get("init_scale") or event.arg(0 if event.out.path.startswith("torch.cuda.amp") else 1)


_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_UNSCALES = (
    *("framework.clip_grad_norm_", "framework.clip_grad_value_", "framework.clip_gradients", "framework.unscale_gradients"),
    "optimizer.step",
)


def _hands_on_scaler(event: Event) -> bool:
    """Whether a scaler is given to code that we cannot see: it may unscale or step there."""
    if event.op not in ("unknown_call", "external", "module_call"):
        return False
    return any(
        v.kind == "scaler" or (v.thing is not None and v.thing.kind == "scaler")
        for v in (*event.args[1:], *event.kwargs.values())
    )


@dataclass(frozen=True)
class Scaled:
    """Gradients that still carry the loss scale: the backward that made them, and what would have to be known to be sure."""

    backward: Event
    unknown: str = ""

    def links(self, use: Event, what: str) -> tuple[Link, ...]:
        is_framework = self.backward.op == "framework.backward"
        first = "backward of the scaled loss (the framework scales the loss)" if is_framework else "backward of the scaled loss"
        return link(self.backward, first), link(use, f"{what}, with no unscale_ in between")

    def since(self, use: Event) -> str:
        return f"backward at {self.backward.place_in(use.file)}{'' if self.unknown else ', no unscale_ since'}"


def backward_for(trace: Trace, index: int, params: Value = UNKNOWN) -> Scaled | None:
    """The scaled backward whose gradients are still scaled at event `index`; None if they are not.

    With `params`, an `unscale_` of an optimizer that is known to hold other parameters does not count. One that runs only
    under a condition of its own, or for an optimizer that is not the one stepped, leaves it open.
    """
    owners = parts_of(parameter_owners(params))
    beside = near(trace.with_positions("scaler.step", "scaler.unscale_"), index) if owners else []
    owners &= {part for e in beside for part in parts_of(parameter_owners(e.arg(1)))}
    here = trace.events[index]
    doubtful: list[Event] = []
    plain: list[Event] = []
    for event in before(trace, index):
        if event.op in ("backward", "framework.backward"):
            if not is_scaled(event):  # unless it stands in the other arm of the branch that scales, which this pass took
                plain.append(event)
                if not event.at.guards:
                    return None
                continue
            if any(can_meet(event, other) for other in plain) or _is_scaled_elsewhere(trace, index, event):
                return None
            reasons = [_why_open(trace, index, unscale, event, here) for unscale in doubtful]
            if not all(reasons) or _covers_all(doubtful):
                return None
            return Scaled(event, (reasons or [doubt_of_scale(event, here)])[0])
        if event.op in _UNSCALES or _hands_on_scaler(event):
            return None
        if event.op == "scaler.unscale_":
            held = parts_of(parameter_owners(event.arg(1))) if event.arg(1).kind == "optimizer" else set()
            if not (owners and held and owners.isdisjoint(held)):
                doubtful.append(event)
        elif event.op in ("scaler.step", "optimizer.zero_grad", "module.zero_grad"):
            held = parts_of(parameter_owners(event.arg(1))) if event.op == "scaler.step" else set()
            if not (owners and held and owners.isdisjoint(held)):
                return None
    return None


def _why_open(trace: Trace, index: int, unscale: Event, backward: Event, use: Event) -> str:
    """Why gradients may still be scaled after an `unscale_`, in words; empty if they are not."""
    shared = {key for e in (backward, use) for key, _ in e.at.guards}
    if shared <= {key for key, _ in backward.at.guards}:  # the use runs after every such backward
        only = [key for key, _ in unscale.at.guards if key not in shared and key != AMP and not key.startswith("except@")]
        only = [key for key in only if not any(is_latch(loop, key) for loop in unscale.at.loops)]
        if only and not set(only) & unscale.at.exits:
            test = only[0].removeprefix("mod:").removeprefix("dtype:")
            return f"whether `{test}` holds, without which unscale_ at {unscale.place_in(use.file)} does not run"
    stepped = [e for e in trace.of("scaler.step", "optimizer.step") if can_meet(e, use)]
    of = [e.arg(1) if e.op == "scaler.step" else e.arg(0) for e in stepped]
    names = {v.thing.name if v.thing is not None else "" for v in (unscale.arg(1), *of)}
    if of and "" not in names and not any(same_object(v, unscale.arg(1)) for v in of):
        return f"whether these parameters are in the optimizer unscaled at {unscale.place_in(use.file)} and never stepped"
    return ""


def _is_scaled_elsewhere(trace: Trace, index: int, backward: Event) -> bool:
    """Whether the loss is scaled only on a branch that excludes the event at `index` (`if scaler: loss = scaler.scale(loss)`)."""
    if "maybe_scaled" not in backward.arg(0).tags:
        return False
    scales = near(trace.with_positions("scaler.scale"), index)
    return bool(scales) and not any(can_meet(e, trace.events[index]) for e in scales)


def doubt_of_scale(backward: Event, use: Event) -> str:
    """What is open about a loss that is scaled on one branch only, if the use has a condition of its own."""
    if "maybe_scaled" not in backward.arg(0).tags or {*use.at.guards} <= {*backward.at.guards}:
        return ""
    return f"whether the loss of {backward.place_in(use.file)} is scaled when this runs"


def _covers_all(unscales: list[Event]) -> bool:
    """Whether one of two opposite branches always unscales."""
    arms = [(key, arm) for event in unscales for key, arm in event.at.guards]
    return any((key, not arm) in arms for key, arm in arms)


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
        if bound_in(loop) & used:
            found.append(loop)
    return found
