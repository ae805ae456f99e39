"""GradScaler protocol: calls that are missing, or that go around the scaler."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.finding import Severity
from ..chains import half_links, link, node_link, region_link, unknown_link
from ..interpreter.guards import AMP
from ..interpreter.regions import Region
from ..interpreter.source import OwnFunction
from ..interpreter.torch_names import ADAPTIVE, GRAD_SCALERS, IN_FILE
from ..interpreter.trace import Event, FileView, Trace, can_meet
from ..interpreter.values import HALF, UNKNOWN, Value, ancestors
from ..registry import Hit, limits, rule
from .protocol import (
    after,
    before,
    doubt_of_scale,
    first_scale,
    has_own_scale,
    is_disabled,
    is_in_sight,
    is_scaled,
    near,
    run_together,
    same_object,
    scaler_of,
)
from .training import is_stepped, share_loop


@rule("SCALER_UPDATE_MISSING", Severity.ERROR, on="trace")
def update_missing(trace: Trace, view: FileView) -> Iterator[Hit]:
    """`scaler.step` is called, but never `scaler.update`.

    Why: update ends the step: without it the scale never changes, and the second step() raises RuntimeError.

    Example:
        scaler.scale(loss).backward()
        scaler.step(optimizer)

    Use instead:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    When not: update is called by the caller in another file.
    """
    made = view.of("scaler.new")
    here = trace.with_positions("scaler.update")
    mine_too = {id(e) for _, e in here}
    for index, step in trace.with_positions("scaler.step"):
        if is_disabled(scaler_of(step), made):
            continue
        mine = (u for u in near(here, index) if same_object(scaler_of(u), scaler_of(step)) and can_meet(u, step))
        others = (u for u in view.of("scaler.update") if id(u) not in mine_too and _is_one_object(u, step) and can_meet(u, step))
        if any(mine) or any(others) or _escapes(view, scaler_of(step)):
            continue
        is_made_here = any(e.out.thing is scaler_of(step).thing for e in made)
        if not is_made_here and not any(e.op == "backward" for e in before(trace, index)):
            continue
        yield Hit(
            step.node,
            "scaler.step() without scaler.update() anywhere after it: the second step() raises RuntimeError",
            "call scaler.update() once per iteration, after step",
            chain=(link(step, "the scaler steps, and nothing in this program updates it"),),
            unknown="" if is_made_here else "whether whoever made the scaler updates it",
            is_proven=is_in_sight(view, scaler_of(step), step.arg(1)) and not here,
        )


def _is_one_object(a: Event, b: Event) -> bool:
    left, right = scaler_of(a).thing, scaler_of(b).thing
    return left is not None and left is right


def _escapes(view: FileView, scaler: Value) -> bool:
    """Whether the scaler is handed to code that we cannot see, which may update it."""
    for event in view.of("unknown_call", "external", "scaler.passed", "framework.prepare", "module_call"):
        given = event.args[1:] if event.op != "scaler.passed" else event.args
        if any(same_object(v, scaler) for v in (*given, *event.kwargs.values())):
            return True
    return False


@rule("SCALER_STEP_BYPASSED", Severity.ERROR, on="trace")
def step_bypassed(trace: Trace, view: FileView) -> Iterator[Hit]:
    """`optimizer.step()` is called on gradients of a scaled loss, beside or instead of `scaler.step(optimizer)`.

    Why: the optimizer takes gradients that are 65536 times too large (or already used), and infinities are not skipped.
    A closure that is given to scaler.step does the same: what it makes is scaled after unscaling is over.

    Example:
        scaler.scale(loss).backward()
        optimizer.step()
        scaler.update()

    Use instead:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    When not: the scaler is disabled in that branch, or this optimizer has a backward of its own without scaling.
    """
    made = view.of("scaler.new")
    if _all_disabled(trace, made):
        return
    for index, event in trace.with_positions("optimizer.step"):
        owned = event.arg(0)
        if owned.thing is not None and owned.thing.kind == "framework_optimizer":
            continue
        last = next((e for e in before(trace, index) if e.op == "backward"), None)
        if last is None or not is_scaled(last):
            continue
        is_open = "maybe_scaled" in last.arg(0).tags or any("enabled" in e.kwargs for e in made)
        if is_open and (AMP, False) in event.at.guards:
            continue  # the same switch turns the scaler off
        scaled = next((e for e in before(trace, index) if e.op == "scaler.step" and same_object(e.arg(1), event.arg(0))), None)
        undone = next((e for e in before(trace, index) if e.op == "scaler.unscale_" and same_object(e.arg(1), owned)), None)
        is_held = owned.kind == "optimizer" and owned.ref in ADAPTIVE and not view.of("scaler.update", "scaler.step")
        if is_held and has_own_scale(view):
            continue  # a scale that was chosen and stays, under an optimizer that divides the gradient by its own size
        if scaled is not None:
            harm = f"the same gradients are used twice, scaler.step() ran at {scaled.place_in(event.file)}"
        elif undone is not None or is_held:
            harm = "it does not skip infinite gradients, as scaler.step() would"
        else:
            harm = f"they are {first_scale(view)} times too large"
        yield Hit(
            event.node,
            f"optimizer.step() on gradients of the scaled loss (backward at {last.place_in(event.file)}): {harm}",
            "use scaler.step(optimizer), and drop the plain optimizer.step()",
            chain=(
                link(last, "backward of the scaled loss"),
                *((link(undone, "unscale_ of this optimizer"),) if undone else ()),
                *((link(scaled, "scaler.step() of this optimizer"),) if scaled else ()),
                link(event, "the optimizer steps without the scaler"),
            ),
            unknown=doubt_of_scale(last, event) or ("whether a gradient overflows at this scale" if is_held else ""),
            is_proven=run_together(last, event),
        )


@rule("SCALER_STEP_BYPASSED", Severity.ERROR, on="trace")
def step_with_closure(trace: Trace, view: FileView) -> Iterator[Hit]:
    for step in trace.of("scaler.step"):
        closure = step.kwargs.get("closure", step.arg(2))
        if is_disabled(scaler_of(step), view.of("scaler.new")) or not isinstance(closure.ref, OwnFunction):
            continue
        inside = [e for e in view.events if any(f.node is closure.ref.node for f in e.at.stack)]
        made = next((e for e in inside if e.op == "backward" and is_scaled(e)), None)
        if "closure" in step.kwargs:
            harm = "GradScaler takes no closure: this call raises RuntimeError"
        elif made is not None and not any(e.op == "scaler.unscale_" for e in inside):
            harm = (
                f"the closure runs after scaler.step() has unscaled, and its backward at {made.place_in(step.file)} is scaled: "
                f"the optimizer takes gradients {first_scale(view)} times too large"
            )
        else:
            continue
        yield Hit(
            step.node,
            harm,
            "step without a closure: each backward, then unscale_ and step by itself; or use bf16, which needs no scaler",
            chain=(*((link(made, "the closure's backward of the scaled loss"),) if made else ()), link(step, "the scaler steps")),
        )


def _all_disabled(trace: Trace, made: list[Event]) -> bool:
    used = trace.of("scaler.scale")
    return bool(used) and all(is_disabled(scaler_of(e), made) for e in used)


@rule("SCALER_BACKWARD_UNSCALED", Severity.ERROR, on="trace")
def backward_unscaled(trace: Trace, view: FileView) -> Iterator[Hit]:
    """`loss.backward()` without `scaler.scale`, although the scaler steps the optimizer.

    Why: scaler.step divides the gradients by the scale, so unscaled ones come out 65536 times too small: the model stops
    learning without any error. Where nothing is scaled at all, step() raises AssertionError.

    Example:
        loss.backward()
        scaler.step(optimizer)

    Use instead:
        scaler.scale(loss).backward()
        scaler.step(optimizer)

    When not: that loss belongs to another optimizer which is stepped plainly.
    """
    made = view.of("scaler.new")
    if not made and not view.of("scaler.scale"):
        return  # whoever made the scaler, a base class outside the project perhaps, may run the scaled backward too
    if all(is_scaled(event) for event in trace.of("backward")):
        return
    for index, step in trace.with_positions("scaler.step"):
        if is_disabled(scaler_of(step), made):
            continue
        is_seen = any(e.out.thing is scaler_of(step).thing for e in made)
        for event in before(trace, index):
            if event.op in ("optimizer.step", "scaler.update", "framework.backward", "optimizer.zero_grad", "module.zero_grad"):
                break  # stepped, or thrown away
            if event.op == "backward" and not is_scaled(event) and event.at.loops == step.at.loops:
                if _is_given(event.arg(0)):
                    continue  # the caller may have scaled it
                place = step.place_in(event.file)
                text = f"this backward is not scaled, nor is any other: scaler.step() at {place} raises AssertionError"
                if view.of("scaler.scale"):
                    text = (
                        f"this backward is not scaled, but scaler.step() at {place} divides by the scale: "
                        f"the gradients come out {first_scale(view)} times too small"
                    )
                yield Hit(
                    event.node,
                    text,
                    "use scaler.scale(loss).backward()",
                    chain=(link(event, "backward of the plain loss"), link(step, "the scaler divides by its scale and steps")),
                    unknown="" if is_seen else "whether the scaler is switched on",
                    is_proven=run_together(event, step),
                )


def _is_given(loss: Value) -> bool:
    """Whether nothing is known of where a loss comes from: it is an argument of a function that nothing here calls."""
    return not loss.kind and not loss.op and not loss.inputs


def _goes_elsewhere(event: Event, trace: Trace) -> bool:
    """Whether, on the other arm of a branch, the same loss is given to something that runs its backward (`loss_scaler(loss,
    optimizer)`): the one flag that chooses it may open the region, too."""
    loss = event.arg(0)
    return bool(event.at.guards) and any(
        any(v is loss for v in (*e.args, *e.kwargs.values())) and not can_meet(e, event)
        for e in trace.of("unknown_call", "external", "loss", "loss_call", "module_call")
    )


@rule("SCALER_MISSING", Severity.ERROR, on="trace")
def scaler_missing(trace: Trace, view: FileView) -> Iterator[Hit]:
    """A model is trained under fp16 autocast without a GradScaler, or with one that is switched off.

    Why: gradients below 6e-8 become 0 in fp16. Many layers then learn nothing, and no error tells.

    Example:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        loss.backward()
        optimizer.step()

    Use instead:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    When not: autocast runs in bf16, which needs no scaler, or a framework scales the loss.
    """
    if view.of("framework.new", "framework.backward", "framework.prepare"):
        return
    has_scaler = not GRAD_SCALERS.isdisjoint(view.module.uses.identifiers) or bool(view.of("scaler.scale", "scaler.step"))
    has_scaler = has_scaler and not _is_idle(view)
    for index, event in trace.with_positions("backward"):
        if _is_scaled_by_hand(event.arg(0), trace):
            continue
        if has_scaler:  # one loss goes past it; where it is switched off is no business of this rule
            yield from _beside_a_scaler(trace, index, event)
            continue
        inside = [
            e for e in before(trace, index) if e.at.region and e.at.region.dtype in ("fp16", "half") and e.at.has_grad
            and not e.at.region.is_framework and e.op not in ("autocast", "decorator") and share_loop(event, e)
        ]  # fmt: skip
        parts = {id(v): id(v.node) for v in ancestors(event.arg(0))}
        asked = {*parts.values()}  # what a model gives back may be float32: it can leave autocast by itself
        inside = [e for e in inside if e.out.is_half or (e.op == "unknown_call" and id(e.node) in asked)]
        if not inside or not is_stepped(event, view) or _goes_elsewhere(event, trace):
            continue
        made = next((e for e in inside if e.out.is_half and id(e.out) in parts), None)
        region = (made or inside[0]).at.region
        assert region is not None
        if region.dtype == "half" and not _offers_fp16(region, view):
            continue
        unknown = "what the loss is made of" if made is None else ""
        unknown = unknown or ("" if trace.of("optimizer.step") else "whether a step uses these gradients")
        opened = region.label_in(event.file)
        if region.dtype == "half":
            opened = f"{opened}, where fp16 is chosen"
        yield Hit(
            event.node,
            f"fp16 training without a loss scaler ({opened}): gradients below 6e-8 become 0, and nothing says so",
            "use torch.amp.GradScaler, or autocast with dtype=torch.bfloat16",
            chain=(region_link(region, event.file), link(event, "backward of the plain loss")),
            unknown=unknown,
            is_proven=made is not None
            and region.dtype == "fp16"
            and region.enabled is True
            and _is_stepped_plainly(event, made, trace),
        )


_KEEPING = frozenset({"state_dict", "load_state_dict"})


def _is_idle(view: FileView) -> bool:
    """Whether every scaler of the program is only made, saved and loaded: it scales nothing, and is handed to nobody."""
    uses = view.module.uses
    made = {id(e.out.thing) for e in view.of("scaler.new")}
    if not made or any(not methods <= _KEEPING for path, methods in uses.methods.items() if path in uses.scalers):
        return False
    passed = (e for e in view.of("scaler.scale", "scaler.step", "scaler.unscale_", "scaler.passed", "unknown_call", "external"))
    return all(e.op in ("unknown_call", "external") and made.isdisjoint(_things(e)) for e in passed)


def _things(event: Event) -> set[int]:
    return {id(v.thing) for given in (*event.args, *event.kwargs.values()) for v in ancestors(given, 20)}


def _is_stepped_plainly(backward: Event, made: Event, trace: Trace) -> bool:
    """Whether an optimizer that is made here steps on what this backward makes, and nothing decides between them."""
    made_here = {id(e.out.thing) for e in trace.of("optimizer.new")}
    steps = [e for e in trace.of("optimizer.step") if e.at.loops == backward.at.loops and id(e.arg(0).thing) in made_here]
    return made.out.sure and any(run_together(made, backward, step) for step in steps)


@rule("SCALER_MISSING", Severity.ERROR, on="trace")
def scaler_missing_under_policy(trace: Trace, view: FileView) -> Iterator[Hit]:
    """FSDP computes gradients in the format of its parameters: fp16 ones need a scale as under autocast."""
    if not trace.of("backward"):
        return
    if view.of("framework.new", "framework.backward", "framework.prepare", "scaler.scale", "scaler.step"):
        return
    if not GRAD_SCALERS.isdisjoint(view.module.uses.identifiers):
        return
    asked = ((e, v) for e in view.of("call") for v in e.kwargs.values() if v.op == "reduce_policy" and v.const == "fp16")
    wrap, policy = next(asked, (None, UNKNOWN))
    if wrap is None:
        return
    for event in trace.of("backward"):
        if _is_scaled_by_hand(event.arg(0), trace) or not is_stepped(event, view) or not _comes_from_a_model(event.arg(0)):
            continue
        made = node_link(policy.node or wrap.node, wrap.file, "parameters and their gradients are fp16")
        place = f"line {made.line}" if made.file == event.file else f"{made.file}:{made.line}"
        yield Hit(
            event.node,
            f"fp16 training without a loss scaler (FSDP computes in fp16, {place}): gradients below 6e-8 become 0, and nothing "
            "says so",
            "use a scaler (FSDP1: ShardedGradScaler), or param_dtype=torch.bfloat16",
            chain=(made, link(wrap, "the model is sharded with it"), link(event, "backward of the plain loss")),
            unknown="" if trace.of("optimizer.step") else "whether a step uses these gradients",
        )
        return


def _comes_from_a_model(loss: Value) -> bool:
    return any(v.op in ("module_call", "model_loss") for v in ancestors(loss, 200))


@rule("SCALER_MISSING", Severity.ERROR, on="trace")
def scaler_off(trace: Trace, view: FileView) -> Iterator[Hit]:
    for index, event in trace.with_positions("backward", "framework.backward"):
        off, unknown = _switched_off(trace, view, event)
        made = _made_in_fp16(trace, index, event.arg(1 if event.op == "framework.backward" else 0)) if off is not None else None
        region = made.at.region if made is not None else None
        if off is None or made is None or region is None or region.enabled is not True or region.is_framework:
            continue
        own = [guard for e in (made, event) for guard in e.at.guards if guard not in off.at.guards]
        if any(not key.startswith("mod:") for key, _ in own) or not is_stepped(event, view):
            continue  # the switch that turns the scaler off may keep this from running
        yield Hit(
            off.node,
            f"nothing scales the loss here, but its training runs in fp16 ({region.label_in(off.file)}): "
            "gradients below 6e-8 become 0, and nothing says so",
            "switch the scaler on wherever autocast runs in fp16, or use bf16",
            chain=(link(off, "loss scaling is off"), region_link(region, off.file), link(event, "backward of the plain loss")),
            unknown=unknown,
        )


def _switched_off(trace: Trace, view: FileView, event: Event) -> tuple[Event | None, str]:
    """What should scale the loss of a backward and is built switched off, and what is open about that."""
    if event.op == "backward":
        used = {id(v): v for v in ancestors(event.arg(0), 8) if v.op == "scale"}
        scaler = next((scaler_of(e) for e in trace.of("scaler.scale") if id(e.out) in used), None)
        made = [e for e in view.of("scaler.new") if scaler is not None and e.out.thing is scaler.thing]
        is_off = scaler is not None and is_disabled(scaler, made) and made[0].kwargs["enabled"].sure
        return (made[0] if is_off else None), ""
    framework = event.arg(0)
    new = next((e for e in view.of("framework.new") if framework.ref == "accelerate" and e.out.thing is framework.thing), None)
    asked = new.kwargs.get("mixed_precision", new.kwargs.get(IN_FILE)) if new is not None else UNKNOWN
    if asked is None or asked.is_none:
        return new, "whether accelerate is launched with fp16"
    return (new if asked.const == "no" else None), ""


def _made_in_fp16(trace: Trace, index: int, loss: Value) -> Event | None:
    """The event that makes a part of a loss under fp16 autocast, with gradients."""
    parts = {id(v) for v in ancestors(loss, 60) if v.dtype == "fp16" and "autocast" in v.tags}
    return next((e for e in before(trace, index) if id(e.out) in parts and e.at.has_grad and e.at.region is not None), None)


def _offers_fp16(region: Region, view: FileView) -> bool:
    """Whether a region whose format is chosen when the program runs names fp16 as one to choose."""
    made = next((e for e in view.of("autocast") if e.out.ref is region), None)
    asked = made.kwargs.get("dtype", made.arg(1)) if made is not None else UNKNOWN
    return asked.kind == "dtype" and any(v.kind == "dtype" and v.const == "fp16" for v in ancestors(asked, 8))


def _beside_a_scaler(trace: Trace, index: int, event: Event) -> Iterator[Hit]:
    """A plain backward of a loss made under fp16 autocast whose optimizer is stepped plainly, beside losses that are scaled."""
    scaled = next((e for e in trace.events if e.op == "backward" and is_scaled(e) and e.at.guards == event.at.guards), None)
    if scaled is None or is_scaled(event) or any(key == AMP for key, _ in event.at.guards):
        return
    source = _made_in_fp16(trace, index, event.arg(0))
    step = next((e for e in after(trace, index) if e.op in ("optimizer.step", "scaler.step", "backward")), None)
    if source is None or step is None or step.op != "optimizer.step":
        return
    made = source.out
    yield Hit(
        event.node,
        f"this loss is made under fp16 autocast and goes backward unscaled, while that at {scaled.place_in(event.file)} is "
        "scaled: its gradients below 6e-8 become 0",
        "scale this loss too and step its optimizer with scaler.step",
        chain=(*half_links(made, event.file), link(event, "backward of the plain loss"), link(step, "the optimizer steps")),
        unknown=unknown_link(made, event.file),
    )


def _is_scaled_by_hand(loss: Value, trace: Trace) -> bool:
    """Whether the loss is multiplied by a large number, or by one that the gradients are divided by again."""
    factors = [v for value in ancestors(loss, 8) if value.op == "mul" for v in value.inputs]
    if any(v.is_number and v.const >= limits().fixed_scale_low for v in factors):
        return True
    things = {id(v.thing) for v in factors if v.thing is not None}
    return bool(things) and any(
        id(v.thing) in things for e in trace.events if "grad" in e.arg(0).tags for v in e.args[1:] if v.thing is not None
    )


@rule("SCALER_WITHOUT_AUTOCAST", Severity.WARNING, on="file")
def scaler_without_autocast(view: FileView) -> Iterator[Hit]:
    """A GradScaler scales the loss of a model that runs in float32: nothing opens autocast or casts to half.

    Why: float32 gradients need no scale. The scaler adds a check and a wait for the device to every step, and where mixed
    precision was meant, it is not on: the run has the speed and the memory of float32.

    Example:
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(criterion(model(x), y)).backward()

    Use instead:
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()

    When not: the model opens autocast itself, in code that is not seen here.
    """
    made = view.of("scaler.new")
    scaled = [e for e in view.of("scaler.scale") if e.file == view.module.filename]
    if not scaled or not made or all(is_disabled(scaler_of(e), made) for e in scaled):
        return
    if _opens_half(view):
        return
    for event in scaled[:1]:
        models = [v for v in ancestors(event.arg(1), 200) if v.op == "module_call"]
        if not models:
            continue  # a helper that scales the loss of others
        seen = all(any(i.kind in ("instance", "module") for i in v.inputs) for v in models)
        yield Hit(
            event.node,
            "the loss is scaled, but nothing in this program runs in half: no autocast, no cast",
            "compute the loss under torch.autocast, or drop the scaler",
            chain=(link(made[0], "the scaler is made"), link(event, "it scales a float32 loss")),
            unknown="" if seen else "what the model does inside",
        )


def _opens_half(view: FileView) -> bool:
    """Whether anything here, or a file that was read for it, may run in half."""
    if view.of("autocast", "framework.new", "framework.prepare", "reduce_policy", "module_cast", "set_default_dtype"):
        return True
    if any(event.at.regions for event in view.events):
        return True
    return any(event.out.dtype in HALF for event in view.events) or bool(view.module.uses.identifiers & _OPENS)


@rule("SCALER_UPDATE_SKIPPED", Severity.ERROR, on="trace")
def update_skipped(trace: Trace, view: FileView) -> Iterator[Hit]:
    """A pass leaves the loop after `unscale_` and before `update`.

    Why: GradScaler remembers that the optimizer is unscaled until update; the next unscale_ raises RuntimeError.

    Example:
        scaler.unscale_(optimizer)
        if not torch.isfinite(clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.zero_grad()
            continue
        scaler.step(optimizer)
        scaler.update()

    Use instead:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    When not: the pass that leaves also ends the training, or updates the scaler itself.
    """
    made = view.of("scaler.new")
    leaves = trace.with_positions("leave")
    for index, event in trace.with_positions("scaler.unscale_") if leaves else ():
        if is_disabled(scaler_of(event), made) or not event.at.loops:
            continue
        updates = trace.with_positions("scaler.update")
        end, update = next(((i, e) for i, e in updates if i > index and can_meet(e, event)), (0, event))
        if not end or update.at.loops != event.at.loops or not same_object(scaler_of(update), scaler_of(event)):
            continue
        for position, leave in leaves:
            if index < position < end and _leaves_between(trace.events[index:position], event, leave):
                yield Hit(
                    leave.node,
                    f"this pass ends after unscale_ at {event.place_in(leave.file)} and without update(): "
                    "the next unscale_ raises RuntimeError",
                    "let scaler.step skip the bad step, or call scaler.update() before leaving",
                    chain=(link(event, "unscale_"), link(leave, "the pass ends"), link(update, "update() is not reached")),
                )
                break


def _leaves_between(between: list[Event], unscale: Event, leave: Event) -> bool:
    """Whether `continue` ends a pass after unscale_, on a way that neither updates nor hands the scaler on."""
    if not can_meet(unscale, leave) or leave.at.loops != unscale.at.loops or leave.at.stack != unscale.at.stack:
        return False
    own = [g for g in leave.at.guards if g not in unscale.at.guards]
    if not own or any(key == AMP or key.startswith("except@") for key, _ in own):
        return False
    return not any(
        e.op in ("scaler.update", "scaler.new") or _hands_on(e, unscale) for e in between if set(own) & set(e.at.guards)
    )


def _hands_on(event: Event, unscale: Event) -> bool:
    given = (*event.args[1:], *event.kwargs.values()) if event.op in ("unknown_call", "external") else ()
    return any(same_object(v, scaler_of(unscale)) for v in given)


_OPENS = frozenset({"autocast", "maybe_autocast", "half", "float16", "bfloat16", "custom_fwd", "MixedPrecision"})
