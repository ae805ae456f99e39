"""GradScaler protocol: what is done to gradients between backward and step, and in which order."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...core.finding import Severity
from ...core.ops import NONLINEAR_FUNCTIONS
from ..chains import link, node_link
from ..interpreter.guards import is_latch
from ..interpreter.torch_names import LOG_METHODS
from ..interpreter.trace import Event, FileView, Trace, can_meet
from ..interpreter.uses import bound_in, dotted_name
from ..interpreter.values import Value, ancestors
from ..registry import Hit, rule
from .protocol import (  # fmt: skip
    Scaled,
    after,
    backward_for,
    before,
    doubt_of_object,
    doubt_of_pass,
    extra_guards,
    first_scale,
    identifiers,
    is_disabled,
    is_in_sight,
    is_scaled,
    loops_over_optimizers,
    near,
    run_together,
    same_object,
    scaler_of,
    window_keys,
)
from .training import MAKES_GRADIENTS

_SCALER_STATE = frozenset({"_per_optimizer_states", "OptState", "UNSCALED", "READY", "STEPPED"})
_SHIFTS = frozenset({"add_", "sub_"})
_SHOWN = ("unknown_call", "external")  # the gradient goes to a log: it misleads, and harms no training


@rule("SCALER_CLIP_BEFORE_UNSCALE", Severity.ERROR, on="trace")
def clip_before_unscale(trace: Trace, view: FileView) -> Iterator[Hit]:
    """Gradients are clipped, or their norm is taken, while they still carry the loss scale.

    Why: scaled gradients are about 65536 times too large, so `clip_grad_norm_(..., 1.0)` shrinks every step to almost
    nothing, and the amount changes whenever the scale does.

    Example:
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)

    Use instead:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)

    When not: the scaler is built with enabled=False, or the gradients were divided by the scale by hand.
    """
    if _is_off(trace, view):
        return
    for index, event in trace.with_positions("clip_grad"):
        scaled = backward_for(trace, index, event.arg(0, "parameters"))
        if scaled is None:
            yield from _clip_for_caller(trace, index, event, view)
            continue
        yield Hit(
            event.node,
            f"gradients are clipped while still scaled ({scaled.since(event)}): "
            f"the clip limit acts on gradients {first_scale(view)} times too large",
            _how_to_unscale(scaled),
            chain=scaled.links(event, "they are clipped"),
            unknown=scaled.unknown,
            mistake=("still scaled", scaled.backward.file, scaled.backward.line),
        )


def _clip_for_caller(trace: Trace, index: int, event: Event, view: FileView) -> Iterator[Hit]:
    """A clip in a function that is given the scaler and steps with it: its caller has made the gradients, and scaled them."""
    if view.of("scaler.unscale_") or any(e.op in MAKES_GRADIENTS for e in before(trace, index)):
        return
    step = next((e for e in after(trace, index) if e.op in ("scaler.step", *MAKES_GRADIENTS)), None)
    is_given = step is not None and not any(e.out.thing is scaler_of(step).thing for e in view.of("scaler.new"))
    if step is not None and step.op == "scaler.step" and is_given:
        yield Hit(
            event.node,
            f"gradients are clipped before scaler.step() at {step.place_in(event.file)}, and nothing here unscales them: "
            f"the clip limit acts on gradients {first_scale(view)} times too large",
            "call scaler.unscale_(optimizer) before clipping",
            chain=(link(event, "gradients are clipped"), link(step, "the scaler steps: the gradients carried its scale")),
            unknown="whether the caller has unscaled them",
        )


def _how_to_unscale(scaled: Scaled) -> str:
    if scaled.backward.op != "framework.backward":
        return "call scaler.unscale_(optimizer) after backward and before clipping"
    if scaled.backward.arg(0).ref == "fabric":
        return "use fabric.clip_gradients(model, optimizer, ...), which unscales first"
    if scaled.backward.arg(0).ref == "lightning":
        return "clip in on_before_optimizer_step, which Lightning calls after it has unscaled"
    return "use accelerator.clip_grad_norm_(...), which unscales first"


def _is_off(trace: Trace, view: FileView) -> bool:
    made = view.of("scaler.new")
    used = trace.of("scaler.scale")
    return bool(used) and all(is_disabled(scaler_of(e), made) for e in used)


@rule("SCALER_GRADS_STILL_SCALED", Severity.ERROR, on="trace")
def grads_still_scaled(trace: Trace, view: FileView) -> Iterator[Hit]:
    """Gradients are changed, measured or logged through `.grad` while they still carry the loss scale.

    Why: what is read is 65536 (or whatever the scale is) times the gradient; noise added to it is that much too small, and
    a limit compared with it means something else after every change of the scale.

    Example:
        scaler.scale(loss).backward()
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)

    Use instead:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)

    When not: the use is linear (dividing by the world size, all_reduce) or only asks whether values are finite.
    """
    reads = {id(e.out): i for i, e in trace.with_positions("grad_read")}
    if not view.of("scaler.scale", "framework.backward") or _is_off(trace, view):
        return
    reported = {id(gradient) for e in trace.events if (gradient := _measured_with_scale(e)) is not None}
    for position, event in enumerate(trace.events):
        source = _used_gradient(event)
        if source is not None and _is_only_tested(event, trace.events[position + 1 : position + 100]):
            continue
        if source is not None and "hook" in source.tags and id(source) not in reported and view.of("scaler.scale"):
            reported.add(id(source))
            text = f"a gradient hook uses ({event.op.rstrip('_')}) the scaled gradient: hooks run inside the scaled backward"
            hint = "do it after backward and scaler.unscale_(optimizer), on p.grad"
            scale = view.of("scaler.scale")[0]
            chain = (link(scale, "the loss is scaled"), link(event, f"the hook uses the gradient ({event.op.rstrip('_')})"))
            own = next((key for key, arm in event.at.guards if (key, arm) not in scale.at.guards), "")
            yield Hit(event.node, text, hint, chain=chain, unknown=f"whether `{own}` holds" if own else "")
            continue
        if source is None or id(source) not in reads or id(source) in reported:
            continue
        index = reads[id(source)]
        read = trace.events[index]
        scaled = backward_for(trace, index)
        if scaled is None:
            continue
        if _is_direction(event, trace.events[position + 1 : position + 100]):
            continue
        reported.add(id(source))
        name = event.op.rstrip("_")
        yield Hit(
            read.node,
            f"`.grad` ({name}) is still scaled ({scaled.since(event)}): "
            f"what is seen here is {first_scale(view)} times the gradient",
            "call scaler.unscale_(optimizer) first",
            chain=scaled.links(read, f"the gradient is used ({name})"),
            unknown=scaled.unknown or ("" if _is_final(event) else "what the number is used for"),
            is_proven=run_together(scaled.backward, read) and event.op not in _SHOWN,
            mistake=("still scaled", scaled.backward.file, scaled.backward.line),
        )


def _has_scale(event: Event) -> bool:
    return any(v.tags & {"scale", "scaled"} for v in (*event.args[1:], *event.kwargs.values()))


def _measured_with_scale(event: Event) -> Value | None:
    """The gradient of a hook that is held against a limit times the scale on one branch: another has no scale to take."""
    source = _gradient(event.arg(0)) if _has_scale(event) else None
    return source if source is not None and "hook" in source.tags else None


def _used_gradient(event: Event) -> Value | None:
    """The `.grad` that an event uses in a way that the scale changes; a limit that carries the scale itself does not."""
    if _has_scale(event):
        return None
    if event.op in NONLINEAR_FUNCTIONS or (event.op in _SHIFTS and not _has_gradient(event.arg(1))):
        return _gradient(event.arg(0))
    if event.op in ("mul_", "div_") and _has_gradient(event.arg(1)):
        return _gradient(event.arg(0))
    if event.op == "augassign" and event.arg(2).const in ("Add", "Sub") and not _has_gradient(event.arg(1)):
        return _gradient(event.arg(0)) if event.arg(0).op == "grad" else None
    if event.op == "set_grad":
        value = event.arg(1)
        return _gradient(value) if value.op in ("add", "sub") and not all(_has_gradient(v) for v in value.inputs) else None
    if event.op in _SHOWN:
        name = dotted_name(getattr(event.node, "func", event.node)).rpartition(".")[2]
        if name in LOG_METHODS and not any(_FINITE & identifiers(key) for key, _ in event.at.guards):  # what is NaN is shown
            return next((g for v in (*event.args, *event.kwargs.values()) if (g := _gradient(v))), None)
    return None


_FINITE = frozenset({"isfinite", "isnan", "isinf"})


def _is_only_tested(event: Event, later: list[Event]) -> bool:
    """Whether what is made of a gradient is only asked to be finite, which no scale changes."""
    uses = [e.op for e in later if any(v is event.out for v in e.args)] if event.out.op else []
    return bool(uses) and _FINITE.issuperset(uses)


def _is_final(event: Event) -> bool:
    """Whether the scale does harm here and now: the gradient itself is changed, or shown; a number made of it may be anything."""
    return event.op not in NONLINEAR_FUNCTIONS or event.op.endswith("_")


def _is_direction(event: Event, later: list[Event]) -> bool:
    """Whether what is made of a gradient only divides another gradient: an angle or a unit vector, which no scale changes."""
    over = [e for e in later if e.op == "div" and any(v is event.out for v in ancestors(e.arg(1), 60))]
    return bool(over) and all(any(v.op == "grad" for v in ancestors(e.arg(0), 60)) for e in over)


def _has_gradient(value: Value) -> bool:
    return _gradient(value) is not None


def _gradient(value: Value) -> Value | None:
    if "grad" not in value.tags or "unscaled" in value.tags:
        return None
    return next((v for v in ancestors(value, 60) if v.op == "grad"), None)


@rule("SCALER_UNSCALE_TWICE", Severity.ERROR, on="trace")
def unscale_twice(trace: Trace, view: FileView) -> Iterator[Hit]:
    """`unscale_` is called twice for one optimizer, or after its step, or it is stepped twice, without an `update` in between.

    Why: the second call raises RuntimeError; GradScaler allows one unscale_ and one step per optimizer and update.

    Example:
        scaler.unscale_(optimizer)
        log_norms(model)
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)

    Use instead:
        scaler.unscale_(optimizer)
        log_norms(model)
        clip_grad_norm_(model.parameters(), 1.0)

    When not: the two calls are for different optimizers or in branches that exclude each other.
    """
    yield from _unscaled_by_framework(trace)
    yield from _second_steps(trace, view)
    for index, event in trace.with_positions("scaler.unscale_"):
        if any(not _SCALER_STATE.isdisjoint(identifiers(key)) for key, _ in event.at.guards):  # the code asks the scaler itself
            continue
        if _repeats(trace, event):
            loop = event.at.loops[-1]
            yield Hit(
                event.node,
                "unscale_ runs again in every pass of this loop for the same optimizer: the second raises RuntimeError",
                "call it once, before the loop",
                chain=(node_link(loop, event.file, "the loop begins"), link(event, "unscale_ in every pass of it")),
                is_proven=is_in_sight(view, scaler_of(event), event.arg(1)),
            )
            continue
        for earlier in before(trace, index):
            if earlier.op == "scaler.update":
                break
            if earlier.op not in ("scaler.unscale_", "scaler.step"):
                continue
            if same_object(earlier.arg(1), event.arg(1)) and same_object(scaler_of(earlier), scaler_of(event)):
                what = "already unscaled" if earlier.op == "scaler.unscale_" else "already stepped"
                if earlier.node is event.node:
                    what = "already unscaled by the call before"
                yield Hit(
                    event.node,
                    f"this optimizer was {what} at {earlier.place_in(event.file)}, and no update() came since: "
                    "this call raises RuntimeError",
                    "keep one unscale_ per optimizer and step, before clipping",
                    chain=(link(earlier, what), link(event, "unscale_ once more, with no update() in between")),
                    unknown=doubt_of_object(earlier.arg(1), event.arg(1), "optimizer") or doubt_of_pass(earlier, event),
                    is_proven=run_together(earlier, event),
                )
                break


def _unscaled_by_framework(trace: Trace) -> Iterator[Hit]:
    """`accelerator.clip_grad_norm_` after `accelerator.unscale_gradients`: clipping unscales by itself."""
    for index, clip in trace.with_positions("framework.clip_grad_norm_", "framework.clip_grad_value_"):
        earlier = next((e for e in before(trace, index) if e.op.startswith("framework.") or e.op == "optimizer.step"), None)
        if earlier is None or earlier.op != "framework.unscale_gradients" or clip.arg(0).const != "fp16":
            continue
        yield Hit(
            clip.node,
            f"clipping unscales by itself, and the gradients are already unscaled at {earlier.place_in(clip.file)}: "
            "this call raises RuntimeError",
            "drop unscale_gradients, or read the norm that the clip gives back",
            chain=(link(earlier, "already unscaled"), link(clip, "unscaled once more by the clip")),
            is_proven=True,
        )


def _second_steps(trace: Trace, view: FileView) -> Iterator[Hit]:
    """Two steps of one optimizer in one pass."""
    for index, step in trace.with_positions("scaler.step"):
        if not is_in_sight(view, scaler_of(step), step.arg(1)):
            continue
        for earlier in before(trace, index):
            if earlier.op in ("scaler.update", "scaler.scale") or not run_together(earlier, step):
                break
            if earlier.op != "scaler.step" or earlier.node is step.node or earlier.at.loops != step.at.loops:
                continue
            if earlier.arg(1).thing is step.arg(1).thing:
                what = "already stepped"
                yield Hit(
                    step.node,
                    f"this optimizer was {what} at {earlier.place_in(step.file)}, and no update() came since: "
                    "this call raises RuntimeError",
                    "step each optimizer once, and call update() after the last",
                    chain=(link(earlier, what), link(step, "stepped once more, with no update() in between")),
                    is_proven=True,
                )
                break


def _repeats(trace: Trace, event: Event) -> bool:
    """Whether a loop without any backward or step of its own calls unscale_ on one optimizer."""
    if not event.at.loops:
        return False
    loop = event.at.loops[-1]
    if loop in loops_over_optimizers(event) or any(is_latch(loop, key) for key, _ in event.at.guards):
        return False
    return not any(loop in e.at.loops for e in trace.of("backward", "scaler.step", "scaler.update", "framework.backward"))


@rule("SCALER_IN_ACCUMULATION", Severity.ERROR, on="trace")
def in_accumulation(trace: Trace, view: FileView) -> Iterator[Hit]:
    """unscale_, step or update runs for every micro-batch although gradients are accumulated over several.

    Why: unscale_ or update in the window leaves gradients of different scales added together; unscale_ also raises at the
    second micro-batch.

    Example:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if (i + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()

    Use instead:
        scaler.scale(loss).backward()
        if (i + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    When not: the window's condition also guards the call, by another name.
    """
    steps, clears = trace.with_positions("scaler.step"), trace.with_positions("optimizer.zero_grad")
    backwards = [(index, e) for index, e in trace.with_positions("backward") if is_scaled(e)]
    for index, event in trace.with_positions("scaler.unscale_", "scaler.step", "scaler.update"):
        ends_window = clears if event.op == "scaler.step" else steps
        anchor = _window_anchor(event, near(ends_window, index), near(backwards, index))
        if anchor is None:
            continue
        name, ends = event.op.partition(".")[2], anchor.op.partition(".")[2]
        harm = {
            "unscale_": "it raises RuntimeError at the second micro-batch",
            "update": "gradients of different scales are added together",
            "step": "the weights move on a part of the gradient",
        }[name]
        yield Hit(
            event.node,
            f"{name}() runs every micro-batch, {ends}() at {anchor.place_in(event.file)} once a window: {harm}",
            f"move {name}() into the branch that ends the accumulation window",
            chain=(link(event, f"{name}() in every micro-batch"), link(anchor, f"{ends}() once a window")),
            unknown="" if anchor.at.stack == event.at.stack else "whether both run in one pass",
            is_proven=name == "unscale_" and run_together(event, anchor) and is_in_sight(view, scaler_of(event), event.arg(1)),
        )


def _window_anchor(event: Event, anchors: list[Event], backwards: list[Event]) -> Event | None:
    """The call that ends the accumulation window, if `event` runs more often than that."""
    name = event.op.partition(".")[2]
    if window_keys(event) or (name == "update" and (event.args[1:] or event.kwargs)):
        return None  # ends a window of its own, or sets the scale by hand
    steps = [a for a in anchors if name != "step" and same_object(scaler_of(a), scaler_of(event))]
    if name == "update" and any(can_meet(s, event) and s.at.loops == event.at.loops and not window_keys(s) for s in steps):
        return None  # another optimizer is stepped every time
    if name == "unscale_" and any(s.at.loops == event.at.loops and not window_keys(s) for s in steps):
        steps = [s for s in steps if same_object(s.arg(1), event.arg(1))]
        if any(s.at.loops == event.at.loops and not window_keys(s) and can_meet(s, event) for s in steps):
            return None  # it is stepped every time, too
    changing = bound_in(event.at.loops[-1]) if event.at.loops else set()
    own = extra_guards(event, backwards[-1]) if backwards else set()
    if any(changing & identifiers(key) for key in own):
        return None  # a condition that changes from pass to pass
    for anchor in anchors if name == "step" else steps:
        if anchor.node is event.node or not can_meet(anchor, event):
            continue
        if name == "step" and any(_clears_always(a, anchor, event) for a in anchors):
            continue
        stepped = event.arg(1) if name != "update" else anchor.arg(1)
        if not same_object(anchor.arg(1) if anchor.op == "scaler.step" else anchor.arg(0), stepped):
            continue
        windows = window_keys(anchor) - {key for key, _ in event.at.guards} - anchor.at.exits
        if windows and anchor.at.loops == event.at.loops and any(not window_keys(b) & windows for b in backwards):
            return anchor
        deeper = event.at.loops[: len(anchor.at.loops)] == anchor.at.loops and len(event.at.loops) > len(anchor.at.loops)
        has_own_step = any(s.at.loops == event.at.loops for s in steps)
        if name != "step" and deeper and not has_own_step and any(b.at.loops == event.at.loops for b in backwards):
            return anchor
    return None


def _clears_always(other: Event, anchor: Event, step: Event) -> bool:
    """Whether the gradients that `anchor` clears now and then are cleared beside every step as well."""
    if other.op != "optimizer.zero_grad" or other.at.loops != step.at.loops or window_keys(other):
        return False
    return same_object(other.arg(0), anchor.arg(0)) and can_meet(other, step)


@rule("SCALER_UPDATE_MISPLACED", Severity.WARNING, on="trace")
def update_misplacement(trace: Trace, view: FileView) -> Iterator[Hit]:
    """`scaler.update()` is not called exactly once after all steps of an iteration.

    Why: update moves the scale. Between two optimizers it makes the second unscale by the wrong factor; before step it
    throws the inf check away; called seldom, an overflow skips every step until it comes.

    Example:
        for opt in optimizers:
            scaler.step(opt)
            scaler.update()

    Use instead:
        for opt in optimizers:
            scaler.step(opt)
        scaler.update()

    When not: every optimizer has a backward of its own between the updates.
    """
    steps = trace.with_positions("scaler.step")
    for index, event in trace.with_positions("scaler.update"):
        if event.args[1:] or event.kwargs:
            continue
        mine = [s for s in near(steps, index) if same_object(scaler_of(s), scaler_of(event)) and can_meet(s, event)]
        reason = _misplacement(trace, index, event, mine)
        hint = "call update() once per iteration, after the last step"
        early = _unchecked_step(trace, index, event, view) if reason else None
        if early is not None:
            place = early.place_in(event.file)
            text = f"update() comes before step() at {place}, and nothing was unscaled: it raises AssertionError"
            chain = link(event, "update() with no inf check of this step"), link(early, "the scaler steps")
            yield Hit(event.node, text, hint, chain=chain, is_proven=True)
        elif reason:
            is_sure = run_together(event, *mine) and is_in_sight(view, scaler_of(event), *(s.arg(1) for s in mine))
            yield Hit(event.node, reason, hint, chain=(link(event, "update()"),), is_proven=is_sure)


def _unchecked_step(trace: Trace, index: int, update: Event, view: FileView) -> Event | None:
    """The step after an update that only the scaling of the loss comes before: no call has checked for inf by then."""
    made = next((e for e in before(trace, index) if e.op.startswith("scaler.")), None)
    step = next((e for e in after(trace, index) if e.op.startswith("scaler.")), None)
    if made is None or step is None or made.op != "scaler.scale" or step.op != "scaler.step":
        return None
    is_one_pass = made.at.loops == update.at.loops == step.at.loops and run_together(made, update, step)
    return step if is_one_pass and is_in_sight(view, scaler_of(step), step.arg(1)) else None


def _bound(loop: ast.AST) -> set[str]:
    """The names that a loop binds."""
    target = getattr(loop, "target", None)
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)} if target is not None else set()


def _is_retry(loop: ast.AST) -> bool:
    """`while True` around a step is a retry that is left by break."""
    return isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant)


def _misplacement(trace: Trace, index: int, event: Event, steps: list[Event]) -> str:
    own = {id(step) for step in steps}
    earlier = [e for e in before(trace, index) if id(e) in own]
    for later in after(trace, index):
        if later.op == "backward" or later.op == "scaler.scale":
            break
        if id(later) in own and later.at.loops == event.at.loops:
            if earlier and not same_object(later.arg(1), earlier[0].arg(1)):
                return (
                    f"the scale changes here; {later.place_in(event.file)} steps another optimizer with gradients of the old one"
                )
            if not earlier and any(e.op == "backward" and is_scaled(e) for e in before(trace, index)):
                return f"update() comes before step() at {later.place_in(event.file)}: the inf check of this step is lost"
    if not earlier:
        return ""
    step = earlier[0]
    over = loops_over_optimizers(step)
    picked = {name for key in event.at.exits for name in identifiers(key)}  # `if i != chosen: continue`
    shared = [loop for loop in over if loop in event.at.loops and picked.isdisjoint(_bound(loop))]
    if shared and not any(is_scaled(e) and shared[-1] in e.at.loops for e in trace.of("backward")):
        return "update() runs once per optimizer: the scale changes between their steps"
    inner = [loop for loop in step.at.loops if loop not in event.at.loops and loop not in over and not _is_retry(loop)]
    if inner and event.at.loops == step.at.loops[: len(event.at.loops)]:
        return f"update() stands outside the loop that steps at {step.place_in(event.file)}: the scale never adapts within it"
    extra = extra_guards(event, step)
    if extra and not any(
        not extra_guards(u, step) or _takes_turns(u, event, step) for u in trace.of("scaler.update") if can_meet(u, step)
    ):
        return f"update() runs only under a condition that step() at {step.place_in(event.file)} does not have"
    return ""


def _takes_turns(other: Event, update: Event, step: Event) -> bool:
    """Whether one of two updates, perhaps to a scale of the program's own, always runs: they stand in opposite branches."""
    apart = {key for key, arm in update.at.guards if (key, not arm) in other.at.guards}
    same = same_object(scaler_of(other), scaler_of(update))
    return same and len(apart) == 1 and extra_guards(update, step) == apart == extra_guards(other, step)
