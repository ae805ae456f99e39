"""GradScaler: how it is built, kept and saved, and gradients taken around it."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from ...core.finding import Severity
from ...core.formats import FP16
from ..chains import half_links, link, node_link, region_link, unknown_link
from ..interpreter.guards import AMP
from ..interpreter.trace import Event, FileView, Trace, can_meet
from ..interpreter.uses import dotted_name
from ..interpreter.values import UNKNOWN, Value, ancestors
from ..registry import Hit, limits, rule
from .protocol import after, is_disabled, is_given, is_in_sight, is_scaled, scaler_of
from .training import goes_backward


@rule("SCALER_WITH_BF16", Severity.WARNING, on="file")
def scaler_with_bf16(view: FileView) -> Iterator[Hit]:
    """A GradScaler is used although training runs in bf16.

    Why: bf16 has the exponent range of float32, so there is nothing to rescue; the scaler adds a host sync per step and its
    inf checks can skip steps for no reason.

    Example:
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            ...

    Use instead:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            ...
        loss.backward()
        optimizer.step()

    When not: the dtype is chosen at run time and the scaler is enabled for fp16 only.
    """
    regions = [e.out.ref for e in view.of("autocast") if e.out.ref.enabled is not False]
    regions = [r for r in regions if not r.is_framework]
    kinds = {r.dtype for r in regions if r.dtype in ("fp16", "bf16", "half")} | _framework_kinds(view)
    casts = [e for e in view.of("module_cast") if e.out.const == "bf16"]
    if kinds != {"bf16"} and not (not regions and casts and not any(e.out.const == "fp16" for e in view.of("module_cast"))):
        return
    if not view.of("scaler.scale", "scaler.step"):
        return
    seen = [region_link(r, view.module.filename) for r in regions]
    seen += [link(e, "runs in bf16") for e in (*casts, *view.of("framework.new", "reduce_policy"))]
    first = seen[0]
    for event in view.of("scaler.new"):
        enabled = event.kwargs.get("enabled")
        if enabled is not None and (enabled.const is False or _asks_for_format(enabled)):
            continue
        if any(key.startswith("dtype:") for key, _ in event.at.guards):
            continue
        place = f"line {first.line}" if first.file == event.file else f"{first.file}:{first.line}"
        yield Hit(
            event.node,
            f"GradScaler with bf16: the code runs in bf16 ({place}), which has float32's range",
            "drop the scaler, or build it with enabled=(dtype == torch.float16)",
            chain=(first, link(event, "the scaler is made")),
        )


def _asks_for_format(enabled: Value) -> bool:
    """Whether what switches the scaler on asks for a dtype, or for a setting that names fp16 (`precision in {"fp16-mixed"}`)."""
    tests = [v for v in ancestors(enabled, 12) if v.op == "compare"]
    named = {str(v.const).lower().partition("-")[0] for test in tests for v in ancestors(test, 12) if isinstance(v.const, str)}
    return "dtype_test" in enabled.tags or not named.isdisjoint({"fp16", "float16", "half", "16"})


@rule("SCALER_WITH_BF16", Severity.WARNING, "scaler.new")
def scaler_on_for_bf16(event: Event, view: FileView) -> Iterator[Hit]:
    """The scaler is on exactly when bf16 is chosen: the test that switches it asks for the wrong format."""
    enabled = event.kwargs.get("enabled")
    if enabled is None or "dtype_test" not in enabled.tags or enabled.op != "compare":
        return
    test = enabled.node
    is_equal = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Eq, ast.Is))
    if is_equal and any(v.kind == "dtype" and v.const == "bf16" and v.op != "dtype" for v in enabled.inputs[1:]):
        yield Hit(
            event.node,
            "the scaler is switched on for bf16, which needs none, and off for fp16, which does",
            "enable it with (dtype == torch.float16)",
            chain=(link(event, "enabled= asks for bfloat16"),),
        )


@rule("SCALER_NOT_SHARDED", Severity.WARNING, "scaler.new")
def scaler_not_sharded(event: Event, view: FileView) -> Iterator[Hit]:
    """The plain GradScaler is used for a model that FullyShardedDataParallel shards.

    Why: every rank holds other gradients, and the plain scaler asks only its own whether they are finite: where one rank
    meets an inf, it skips the step and halves its scale, and the others go on. The shards no longer belong to one model.

    Example:
        model = FullyShardedDataParallel(model, mixed_precision=fp16_policy)
        scaler = torch.amp.GradScaler("cuda")

    Use instead:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        scaler = ShardedGradScaler()

    When not: FSDP2 (`fully_shard`), whose gradients are asked on all ranks; NO_SHARD; training in bf16, which needs no scaler.
    """
    enabled = event.kwargs.get("enabled")
    if (enabled is not None and enabled.const is False) or not view.of("scaler.step") or _framework_kinds(view) == {"bf16"}:
        return
    for wrap in view.of("call"):
        path = str(wrap.out.const)
        if not path.startswith("torch.distributed.fsdp.") or path.rpartition(".")[2] != "FullyShardedDataParallel":
            continue
        if any(e.out.last != "GradScaler" for e in view.of("scaler.new")):
            return
        if can_meet(wrap, event) and wrap.kwargs.get("sharding_strategy", UNKNOWN).last != "NO_SHARD":
            yield Hit(
                event.node,
                f"the plain GradScaler asks each rank alone for inf, and the model is sharded at {wrap.place_in(event.file)}: "
                "ranks skip different steps",
                "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
                chain=(link(wrap, "the model is sharded"), link(event, "a scaler of one rank is made")),
            )
            return


def _framework_kinds(view: FileView) -> set[str]:
    """Formats that a framework or an FSDP policy in this file runs in."""
    kinds = {str(e.out.const).removesuffix("-mixed") for e in view.of("framework.new")}
    kinds |= {str(e.kwargs["param_dtype"].const) for e in view.of("reduce_policy") if "param_dtype" in e.kwargs}
    return kinds & {"bf16", "fp16"}


def _argument_node(node: ast.AST, name: str) -> ast.expr | None:
    return next((k.value for k in getattr(node, "keywords", ()) if k.arg == name), None)


SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


@rule("SCALER_SETTINGS", Severity.WARNING, "scaler.new")
def scaler_settings(event: Event, view: FileView) -> Iterator[Hit]:
    """GradScaler is built with numbers that cannot work well.

    Why: a scale of 1 rescues nothing, one above 2**24 costs the first steps; a growth factor of 1 or less and a backoff
    factor of 1 or more raise; a growth interval of a few steps overflows all the time, one of millions never recovers.

    Example:
        scaler = torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=10_000_000)

    Use instead:
        scaler = torch.amp.GradScaler("cuda")  # 65536, 2.0, 0.5, 2000

    When not: a test that provokes overflow or underflow on purpose.
    """
    if any(e.args[1:] or e.kwargs for e in view.of("scaler.update")):  # the program sets the scale by hand
        return
    names = SETTINGS if event.out.path.startswith("torch.cuda.amp") else ("device", *SETTINGS)
    yield from bad_settings(event, {**dict(zip(names, event.args)), **event.kwargs})


def bad_settings(event: Event, given: dict[str, Value]) -> Iterator[Hit]:
    """A hit for each GradScaler setting that cannot work, on its own line."""
    for name in SETTINGS:
        value = given.get(name)
        if value is not None and name == "init_scale" and (isinstance(value.const, bool) or "switch" in value.tags):
            text = "a switch is given as init_scale, the first argument: the scale begins at 1 or 0"
            chain = (link(event, "init_scale gets a switch"),)
            yield Hit(event.node, text, "name it: GradScaler(enabled=...)", chain=chain, is_proven=True)
        if value is None or not value.is_number:
            continue
        problem = setting_problem(name, value.const)
        if problem:
            text, raises = problem
            node = _argument_node(event.node, name) or value.node or event.node
            chain = (node_link(node, event.file, f"{name}={value.const:g}"),)
            hint = "the defaults are 65536, 2.0, 0.5 and 2000"
            yield Hit(node, f"{name}={value.const:g}: {text}", hint, chain=chain, is_proven=raises)


def setting_problem(name: str, number: float) -> tuple[str, bool] | None:
    """What is wrong with a GradScaler setting, if anything, and whether torch refuses it."""
    if name == "init_scale":
        if number <= limits().init_scale_low:
            return "a scale this small rescues no small gradient", False
        if number > limits().init_scale_high:
            return "a scale this large overflows the first steps", False
    if name == "growth_factor":
        if number <= 1:
            return "must be above 1; GradScaler raises", True
        if number > limits().growth_factor_high:
            return "jumps past the working range at every growth", False
    if name == "backoff_factor":
        if number >= 1 or number <= 0:
            return "must lie between 0 and 1; GradScaler raises or never backs off", True
        if number < limits().backoff_factor_low or number > limits().backoff_factor_high:
            return "backs off far too much or too little at an overflow", False
    if name == "growth_interval":
        if number < limits().growth_interval_low:
            return "the scale grows every few steps and overflows all the time", False
        if number > limits().growth_interval_high:
            return "the scale practically never grows again after an overflow", False
    return None


@rule("SCALER_REBUILT", Severity.WARNING, "scaler.new")
def scaler_rebuilt(event: Event, view: FileView) -> Iterator[Hit]:
    """A GradScaler is constructed anew in every step or epoch.

    Why: the scale it has found is thrown away; each new scaler starts at 65536 and skips steps until it is back where it
    was.

    Example:
        for epoch in range(epochs):
            scaler = torch.amp.GradScaler("cuda")
            for batch in loader:
                ...

    Use instead:
        scaler = torch.amp.GradScaler("cuda")
        for epoch in range(epochs):
            ...

    When not: model and optimizer are built anew as well (folds, sweeps).
    """
    if event.kwargs.get("enabled") is not None and event.kwargs["enabled"].const is False:
        return
    if (AMP, False) in event.at.guards:  # `if self.scaler is None:` builds it once
        return
    loops = [loop for loop in event.at.loops if isinstance(loop, (ast.For, ast.While, ast.AsyncFor))]
    if not loops:
        return
    trace = view.trace_of(event)
    stepped = {id(e.arg(1).node) for e in view.of("scaler.step") if e.arg(1).node is not None}
    calls = trace.of("optimizer.new", "unknown_call") if trace is not None else []
    if any(loops[-1] in e.at.loops and (e.op == "optimizer.new" or id(e.node) in stepped) for e in calls):
        return  # its optimizer is new, too
    if not any(loops[-1] in e.at.loops for e in view.of("backward", "scaler.scale", "scaler.step")) or _is_built_once(event):
        return
    around = node_link(loops[-1], event.file, "the loop begins")
    place = f"line {around.line}" if around.file == event.file else f"{around.file}:{around.line}"
    yield Hit(
        event.node,
        f"GradScaler is built again in every pass of the loop at {place}",
        "build the scaler once, beside the optimizer, and pass it in",
        chain=(around, link(event, "a new scaler in every pass")),
    )


def _is_built_once(event: Event) -> bool:
    """Whether it is made only while something is missing that is filled in with it (`if x is None: build()`)."""
    missing = {key for key, arm in event.at.guards if not arm}
    assigned = {
        dotted_name(target) for function in event.at.stack for node in ast.walk(function.node) if isinstance(node, ast.Assign)
        for target in node.targets
    }  # fmt: skip
    return not missing.isdisjoint(assigned)


@rule("SCALER_NOT_SAVED", Severity.WARNING, "save")
def scaler_not_saved(event: Event, view: FileView) -> Iterator[Hit]:
    """A checkpoint holds the optimizer's state but not the scaler's.

    Why: after a restart the scale starts at 65536 again: steps are skipped and the run departs from the one that was saved.

    Example:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    Use instead:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)

    When not: the checkpoint is never used to go on training; where nothing in sight loads an optimizer's state, it is a remark.
    """
    used, made = view.of("scaler.scale", "scaler.step"), view.of("scaler.new")
    if not used:  # Accelerate keeps the scaler: its save_state would save it
        used = [e for e in view.of("framework.backward") if is_scaled(e) and e.arg(0).ref == "accelerate"]
    elif not is_given(view):
        return
    if not used or view.of("scaler.state_dict", "scaler.load_state_dict"):
        return
    if all(is_disabled(scaler_of(e), made) for e in used) or not _holds_optimizer(event.arg(0)):
        return
    if any(v.kind == "scaler" for e in view.of("save") for v in ancestors(e.arg(0), 100)):  # saved whole
        return
    if made and all(_ends_before(new, used, event) for new in made):
        return
    needless = {id(hit.node) for hit in scaler_with_bf16(view)}
    if made and all(id(new.node) in needless for new in made):
        return  # told as the mistake that it is: there is nothing to save
    first = used[0]
    node, held = event.node, event.arg(0)
    if event.file != first.file and held.node is not None:  # a helper saves what it is given: the dict is where to add it
        node = held.node
    yield Hit(
        node,
        f"the checkpoint holds the optimizer's state but not that of the scaler used at "
        f"{first.place_in(getattr(node, 'file', event.file))}: after a restart the scale begins at 65,536 again",
        'add "scaler": scaler.state_dict(), and load it when resuming'
        if used[0].op.startswith("scaler.")
        else "use accelerator.save_state and load_state, or save accelerator.scaler.state_dict() as well",
        None if _may_go_on(view, event) else Severity.INFO,
        chain=(link(first, "the scaler is used"), link(event, "the checkpoint is saved without its state")),
        mistake=("not saved", *_place(held.node if held.node is not None else event.node, event)),
    )


def _may_go_on(view: FileView, save: Event) -> bool:
    """Whether a run may go on from a checkpoint: something loads an optimizer's state, or is handed one with a model or with what
    was loaded. Otherwise the optimizer's state is used no more than the scaler's would be."""
    if view.of("optimizer.load_state_dict", "framework.load_state"):
        return True
    for uses in (view.module.uses, save.module.source.uses):  # beside it, for another program
        if any("load_state_dict" in uses.methods.get(path, ()) for path in uses.optimizers):
            return True
    calls = [[*e.args[1:], *e.kwargs.values()] for e in view.of("unknown_call", "external") if not e.at.loops]
    loaded = {id(e.out) for e in view.of("load")}
    for given in calls:
        beside = (v.kind in ("module", "instance") or any(id(part) in loaded for part in ancestors(v, 20)) for v in given)
        if any(v.kind == "optimizer" for v in given) and any(beside):
            return True
    return False


def _ends_before(new: Event, used: list[Event], save: Event) -> bool:
    """Whether a scaler is built anew in each pass that saves, and all its steps are in that pass: no state goes on."""
    around = new.at.loops
    inside = all(e.at.loops[: len(around)] == around for e in used)
    return bool(around) and save.at.loops == around and inside


def _place(node: ast.AST, event: Event) -> tuple[str, int]:
    """One dict that is saved in several places is one mistake."""
    return getattr(node, "file", event.file), getattr(node, "lineno", 0)


def _holds_optimizer(saved: Value) -> bool:
    stack, seen = [saved], 0
    while stack and seen < 200:
        seen += 1
        for value in ancestors(stack.pop(), 100):
            if value.op == "optimizer.state_dict":
                return True
            if value.kind == "dict" and isinstance(value.ref, dict):
                stack.extend(v for v in value.ref.values() if isinstance(v, Value))
    return False


@rule("SCALER_NOT_LOADED", Severity.WARNING, on="file")
def scaler_not_loaded(view: FileView) -> Iterator[Hit]:
    """The scaler's state is saved, and the optimizer's is loaded again, but the scaler's never is.

    Why: the scale that was found is on disk and not used: after a restart it begins at 65536, and steps are skipped.

    Example:
        torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)
        optimizer.load_state_dict(torch.load(path)["optimizer"])

    Use instead:
        state = torch.load(path)
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])

    When not: another program loads it.
    """
    saved, loaded = view.of("scaler.state_dict"), view.of("optimizer.load_state_dict")
    if not saved or not loaded or view.of("scaler.load_state_dict") or "scaler" in {e.arg(0).kind for e in view.of("save")}:
        return
    for event in view.of("unknown_call", "external"):
        if any(v.kind == "scaler" for v in (*event.args[1:], *event.kwargs.values())):
            return  # a helper that is not seen may load it
    event = loaded[0]
    is_proven = is_in_sight(view, scaler_of(saved[0]), event.arg(0))
    yield Hit(
        event.node,
        f"the optimizer's state is loaded here, that of the scaler (saved at {saved[0].place_in(event.file)}) never is: "
        "after a restart the scale begins at 65,536 again",
        'call scaler.load_state_dict(state["scaler"]) as well',
        chain=(link(saved[0], "the scaler's state is saved"), link(event, "only the optimizer's is loaded")),
        is_proven=is_proven,
    )


@rule("SCALER_FIXED", Severity.WARNING, "backward")
def fixed_scale(event: Event, view: FileView) -> Iterator[Hit]:
    """A loss is multiplied by a fixed scale that is too large for fp16 gradients, or that nothing takes out of them again.

    Why: fp16 ends at 65504. Under a fixed scale of 2**20 every gradient above 0.06 becomes infinite, and nothing lowers it.
    SGD takes gradients as large as they are: with the scale still in them, every step is as many times too large.

    Example:
        (loss * 2**20).backward()

    Use instead:
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()

    When not: the weights and their gradients are float32 or bf16 throughout.
    """
    for factor, node in _factors(event.arg(0)):
        if factor <= limits().fixed_scale_high or not _runs_in_fp16(view):
            continue
        yield Hit(
            event.node,
            f"the loss is multiplied by a fixed {factor:,.0f}: a gradient above {FP16.max / factor:.2g} is infinite in fp16",
            "use torch.amp.GradScaler, which finds a scale that fits",
            chain=(node_link(node or event.node, event.file, "the loss is multiplied"), link(event, "backward")),
        )
        return


@rule("SCALER_FIXED", Severity.WARNING, on="trace")
def fixed_scale_stays(trace: Trace, view: FileView) -> Iterator[Hit]:
    """A loss scaled by hand whose gradients nobody divides again, under an optimizer that takes them as large as they are."""
    if not _runs_in_fp16(view):
        return
    for index, event in trace.with_positions("backward"):
        factor = next((n for n, _ in _factors(event.arg(0)) if n >= limits().fixed_scale_low and math.frexp(n)[0] == 0.5), None)
        if factor is None or factor > limits().fixed_scale_high:
            continue
        for later in after(trace, index):
            if later.op == "optimizer.step" and later.at.loops == event.at.loops and _takes_as_it_is(later.arg(0), view):
                yield Hit(
                    later.node,
                    f"the loss of the backward at {event.place_in(later.file)} is multiplied by {factor:,.0f}, and nothing "
                    "divides its gradients again: this step is as many times too large",
                    "divide each .grad by the scale before the step, or use torch.amp.GradScaler, which does",
                    chain=(link(event, "backward of the scaled loss"), link(later, "the optimizer steps")),
                    is_proven=True,
                )
            if later.op in _TAKES_GRADIENTS:
                break


_TAKES_GRADIENTS = frozenset(
    ("optimizer.step", "backward", "grad_read", "set_grad", "clip_grad", "unknown_call", "external", "scaler.step")
)
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})


def _factors(loss: Value) -> Iterator[tuple[float, ast.AST | None]]:
    """The numbers that a loss is multiplied by, and where."""
    for value in ancestors(loss, 6):
        number = next((v.const for v in value.inputs if v.is_number), None) if value.op == "mul" else None
        if number is not None:
            yield number, value.node


def _takes_as_it_is(optimizer: Value, view: FileView) -> bool:
    """Whether a step is as large as the gradient, and the learning rate was not divided where it is given."""
    if optimizer.kind != "optimizer" or optimizer.ref != "SGD" or not view.module.uses.identifiers.isdisjoint(_HOOKS):
        return False
    made = next((e for e in view.of("optimizer.new") if e.out.thing is optimizer.thing), None)
    rate = _argument_node(made.node, "lr") if made is not None else None
    return made is not None and not isinstance(rate, ast.BinOp)


def _runs_in_fp16(view: FileView) -> bool:
    regions = [e.out.ref for e in view.of("autocast")]
    return any(r.dtype == "fp16" and r.enabled is not False for r in regions) or any(
        e.out.const == "fp16" for e in view.of("module_cast")
    )


@rule("SCALER_GRAD_PENALTY", Severity.ERROR, on="trace")
def grad_penalty(trace: Trace, view: FileView) -> Iterator[Hit]:
    """Gradients taken with `autograd.grad` from a scaled loss are used without dividing by the scale, or the loss is not scaled.

    Why: a penalty on their norm sees numbers that are 65536 times too large, and the penalty's own gradient drowns the
    loss. Taken of a plain fp16 score they are made in fp16, where those below 6e-8 become 0: a warning.

    Example:
        grads = torch.autograd.grad(scaler.scale(loss), inputs, create_graph=True)
        penalty = grads[0].norm()

    Use instead:
        grads = torch.autograd.grad(scaler.scale(loss), inputs, create_graph=True)
        penalty = (grads[0] / scaler.get_scale()).norm()

    When not: only the direction of the gradient is used.
    """
    for event in trace.of("autograd.grad"):
        if "scaled" not in event.out.tags:
            yield from _penalty_in_fp16(event, view)
            continue
        undone = any("unscaled" in e.out.tags and any(v is event.out for v in ancestors(e.out)) for e in trace.events)
        if undone:
            continue
        yield Hit(
            event.node,
            "gradients of a scaled loss are used as they are: a penalty on them is 65,536 times too large",
            "divide them by scaler.get_scale() before building the penalty, and compute it in float32",
            chain=(link(event, "gradients of the scaled loss, never divided by the scale"),),
        )


def _penalty_in_fp16(event: Event, view: FileView) -> Iterator[Hit]:
    """Gradients of an unscaled fp16 score that are trained on: they are made in fp16, where the small ones become 0."""
    kept, score = event.kwargs.get("create_graph"), event.arg(0)
    if kept is None or kept.const is not True or not view.of("scaler.scale"):
        return
    half = next((v for v in ancestors(score, 12) if v.dtype == "fp16" and "autocast" in v.tags), None)
    if half is None or not goes_backward(event.out, view.of("backward", "scaler.scale")):
        return
    yield Hit(
        event.node,
        f"gradients of a plain loss are made in fp16 and trained on ({half.why}): "
        "those below 6e-8 are 0 before the scaler sees them",
        "take them of scaler.scale(loss), and divide by scaler.get_scale() before building the penalty",
        Severity.WARNING,
        chain=(*half_links(half, event.file), link(event, "gradients of the plain loss")),
        unknown=unknown_link(half, event.file),
    )
