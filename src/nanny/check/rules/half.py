"""Manual casts: parameters, layers and whole models in half that are trained."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...core.finding import Link, Severity
from ...core.formats import BF16, FP16
from ...core.ops import (
    ACCUMULATING_FUNCTIONS,
    COUNTING_FUNCTIONS,
    CREATING_FUNCTIONS,
    LOSSES,
    NONLINEAR_FUNCTIONS,
    NORM_LAYERS,
    SAME_VALUES,
    TWO_TERMS,
)
from ..chains import link
from ..interpreter.guards import AMP
from ..interpreter.objects import parameter_owners, parts_of
from ..interpreter.source import OwnClass
from ..interpreter.trace import Event, FileView, Trace
from ..interpreter.uses import bound_in
from ..interpreter.values import HALF, Thing, Value, ancestors
from ..registry import Hit, rule
from .protocol import is_in_sight
from .training import MAKES_GRADIENTS, goes_backward, has_master_copy, is_trained, is_tried_once, losses_of, trains_after


@rule("HALF_CALL", Severity.WARNING, "module_cast")
def half_call_on_model(event: Event, view: FileView) -> Iterator[Hit]:
    """A model that is trained, or a tensor inside autocast, is cast to half by hand.

    Why: autocast keeps float32 weights and chooses per operation; a hand-made cast takes that away. Updates smaller than
    1/2048 (fp16) or 1/256 (bf16) of a weight are lost, and GradScaler refuses fp16 gradients.

    Example:
        model = Net().cuda().half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    Use instead:
        model = Net().cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            ...

    When not: the model is only evaluated, is frozen, or an optimizer with float32 master weights is used.
    """
    target, kind = event.arg(0), event.out.const
    if kind not in HALF or (target.kind == "module" and target.ref in NORM_LAYERS):
        return
    if target.thing is None or not is_trained(target.thing, view) or not trains_after(event, view):
        return
    if has_master_copy(view) or _is_cast_back(event, view) or _is_beside_adapters(target, event, view):
        return
    if is_tried_once(target, view):
        return
    text = f"`{target.thing.name or 'the model'}` is cast to {kind} here and then trained"
    step = _refused_by_scaler(target.thing, event, view) if kind == "fp16" else None
    if step is not None:
        text = f"{text}: scaler.step() at {step.place_in(event.file)} raises ValueError on fp16 gradients"
    kept = (link(step, "the scaler steps"),) if step is not None else _updated_as_they_are(target.thing, event, view)
    yield Hit(
        event.node,
        text,
        "keep the weights in float32 and use torch.autocast",
        chain=(link(event, f"the weights are made {kind}"), *kept),
        is_proven=bool(kept),
    )


def _always_before(cast: Event, later: Event) -> bool:
    """Whether the weights are half whenever the later event comes: whoever may choose the cast has not chosen it yet."""
    return {*cast.at.guards} <= {*later.at.guards}


def _updated_as_they_are(model: Thing, cast: Event, view: FileView) -> tuple[Link, ...]:
    """Where an optimizer gets these weights, if nothing between may keep float32 ones."""
    if view.of("framework.prepare", "framework.train"):
        return ()
    made = (e for e in view.of("optimizer.new") if _always_before(cast, e))
    given = (e for e in made if id(model) in parts_of(parameter_owners(e.arg(0))))
    return tuple(link(e, "an optimizer updates them as they are") for e in given)[:1]


def _refused_by_scaler(model: Thing, cast: Event, view: FileView) -> Event | None:
    """The scaler's step of an optimizer that holds this model and nothing else, with nothing between them left open."""
    for new in view.of("optimizer.new"):
        for step in view.of("scaler.step"):
            is_own = new.out.thing is step.arg(1).thing and set(parameter_owners(new.arg(0))) == {model}
            if is_own and _always_before(cast, step) and is_in_sight(view, step.arg(0), step.arg(1)):
                return step
    return None


def _is_beside_adapters(model: Value, event: Event, view: FileView) -> bool:
    """Whether adapters are trained in place of this: it is given to peft wherever it is made half, which freezes it, or is one
    module out of such a model, of which most are frozen."""
    given = [e for e in view.of("external") if e.arg(0).path.startswith("peft.")]
    if model.op == "element":
        return bool(given)
    return any(
        e.arg(0).last == "get_peft_model" and {*e.at.guards} <= {*event.at.guards}
        and any(v.thing is model.thing for v in (*e.args[1:], *e.kwargs.values()))
        for e in given
    )  # fmt: skip


def _is_cast_back(event: Event, view: FileView) -> bool:
    """Whether the model is float32 again before it is trained."""
    for trace in view.traces:
        later = False
        for other in trace.events:
            if later and other.op in ("backward", "framework.backward"):
                break
            if later and other.op == "module_cast" and other.arg(0).thing is event.arg(0).thing and other.out.const not in HALF:
                return True
            later = later or other is event
    return False


@rule("HALF_CALL", Severity.WARNING, on="trace")
def half_call_in_region(trace: Trace, view: FileView) -> Iterator[Hit]:
    if not trace.of("cast") or not _trains(trace):
        return
    fed = {id(v) for e in trace.of(*LOSSES) for a in e.args for v in _through_shapes(a)}
    for event in trace.of("cast"):
        region = event.at.region
        if region is None or not event.at.has_grad or region.is_framework:
            continue
        if any(key.startswith("dtype:") or (key, arm) == (AMP, True) for key, arm in event.at.guards):  # whoever asks knows
            continue
        if event.out.dtype not in ("fp16", "bf16") or not _is_literal(event) or id(event.out) in fed or is_position(event.arg(0)):
            continue
        yield Hit(
            event.node,
            f"a tensor is cast to {event.out.dtype} by hand inside {region.label_in(event.file)}",
            "drop the cast: autocast picks the dtype for each operation",
            Severity.INFO,  # rounded once more, where a matrix product would round it anyway
        )


def _trains(trace: Trace) -> bool:
    return bool(trace.of(*MAKES_GRADIENTS))


def _is_literal(event: Event) -> bool:
    """Whether the cast names a half format itself (`.half()`, `.to(torch.float16)`), rather than following another tensor."""
    func = getattr(event.node, "func", None)
    name = getattr(func, "attr", "")
    if name in ("half", "bfloat16"):
        return True
    given = [*event.args[1:], *event.kwargs.values()]
    return any(v.kind == "dtype" and v.const in ("fp16", "bf16") and v.op != "dtype" for v in given)


def _through_shapes(value: Value) -> Iterator[Value]:
    current: Value | None = value
    for _ in range(6):
        if current is None:
            return
        yield current
        current = current.inputs[0] if current.op in SAME_VALUES and current.inputs else None


def is_position(value: Value) -> bool:
    """Whether a value counts something: positions, time steps, ids."""
    return value.dtype == "int" and any(v.op in COUNTING_FUNCTIONS for v in ancestors(value, 10))


def stored_key(value: Value) -> str:
    """The key that a value was taken from a table by: `user_id` for `torch.as_tensor(table["user_id"].values)`."""
    return next((v.ref for v in origins_of(value) if v.op == "key" and isinstance(v.ref, str)), "")


_HOLDERS = SAME_VALUES | {"moved", "tensor", "as_tensor", "from_numpy", "call:to_numpy"}


def origins_of(value: Value) -> Iterator[Value]:
    """The value and what it was taken from unchanged: `torch.from_numpy(table["user_id"].to_numpy())`."""
    current = value
    for _ in range(6):
        yield current
        if not current.inputs or (current.op not in _HOLDERS and current.kind not in ("list", "tuple")):
            return
        current = current.inputs[0]


@rule("HALF_PARAMETERS", Severity.WARNING, "parameter", "layer", "from_pretrained")
def half_parameters_trained(event: Event, view: FileView) -> Iterator[Hit]:
    """Parameters are created or loaded in half and then trained, with no float32 copy.

    Why: an update smaller than 1/2048 (fp16) or 1/256 (bf16) of the weight rounds away, and training stalls silently.

    Example:
        model = AutoModel.from_pretrained(name, torch_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    Use instead:
        model = AutoModel.from_pretrained(name, torch_dtype=torch.float32)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            ...

    When not: the parameters are frozen, or the optimizer keeps float32 master weights (or rounds stochastically).
    """
    value = event.out
    if event.op == "layer":
        kind = value.thing.dtype if value.thing is not None and value.thing.cast is event.node else ""
        if value.ref in NORM_LAYERS:
            return
    elif event.op == "parameter":
        frozen = event.kwargs.get("requires_grad") or event.arg(1)
        kind = "" if frozen.const is False else value.dtype
    else:
        kind = value.thing.dtype if value.thing is not None and value.thing.cast is event.node else ""
    if (
        kind not in HALF
        or has_master_copy(view)
        or not view.is_training()
        or not view.of("optimizer.step", "scaler.step", "framework.train")
    ):
        return
    if value.thing is None or value.thing.is_frozen or _is_beside_adapters(value, event, view):
        return
    if event.op == "from_pretrained" and not is_trained(value.thing, view):
        return
    if event.op != "from_pretrained" and _is_of_another_model(event, view):
        return
    kept = _updated_as_they_are(value.thing, event, view)
    yield Hit(
        event.node,
        f"these parameters are {kind} and are trained in this file; no float32 copy is kept",
        "create or load them in float32 and let autocast run the forward pass in half",
        chain=(link(event, f"the parameters are {kind}"), *kept),
        is_proven=bool(kept),
        mistake=("half weights", event.file, event.line),
    )


def _is_of_another_model(event: Event, view: FileView) -> bool:
    """Whether a class makes the parameters that no model is built of: only methods which building one does not come to name it
    (`layer.packed()`), so it is what a trained layer is exported to."""
    maker = event.at.stack[-1] if event.at.stack else None
    owner = maker.owner if maker is not None and maker.name == "__init__" else None
    if owner is None or owner.node.decorator_list or owner.module is not view.module:
        return False
    late = [m.node for info in view.module.classes for m in info.methods.values() if m.name not in _reached_by_init(info)]
    inside = {id(n) for node in late for n in ast.walk(node)}
    named = [n for n in ast.walk(view.module.tree) if isinstance(n, ast.Name) and n.id == owner.name]
    return bool(named) and all(id(n) in inside for n in named)


def _reached_by_init(info: OwnClass) -> set[str]:
    """The methods that building an instance may run."""
    found, waiting = {"__init__"}, ["__init__"]
    while waiting:
        method = info.find(waiting.pop())
        called = {n.attr for n in ast.walk(method.node) if isinstance(n, ast.Attribute)} if method is not None else set()
        fresh = {name for name in called if info.find(name) is not None} - found
        found |= fresh
        waiting += fresh
    return found


@rule("HALF_NORM", Severity.WARNING, "module_cast", "layer")
def half_norm(event: Event, view: FileView) -> Iterator[Hit]:
    """A normalisation layer is cast to, or created in, half.

    Why: its statistics and its small scale and shift need float32: running variances lose their small updates, and sums of
    squares leave the fp16 range.

    Example:
        self.norm = nn.LayerNorm(dim, dtype=torch.float16)

    Use instead:
        self.norm = nn.LayerNorm(dim)

    When not: the model is only evaluated.
    """
    target = event.arg(0) if event.op == "module_cast" else event.out
    kind = event.out.const if event.op == "module_cast" else (target.thing.dtype if target.thing else "")
    if target.kind != "module" or target.ref not in NORM_LAYERS or kind not in HALF:
        return
    if event.op == "layer" and not (target.thing and target.thing.cast is event.node):
        return
    steps = view.of("optimizer.step", "scaler.step", "framework.step", "framework.train")
    if not any(e.at.loops or e.at.stack or e.op == "framework.train" for e in steps) or has_master_copy(view):
        return  # gradients alone, or one step of a script, as a test compares them, train nothing
    yield Hit(event.node, f"{target.ref} is put into {kind}", "leave normalisation layers in float32")


@rule("HALF_DEFAULT_DTYPE", Severity.WARNING, "set_default_dtype")
def half_default_dtype(event: Event, view: FileView) -> Iterator[Hit]:
    """The default dtype is set to half in code that trains.

    Why: every parameter, buffer, optimizer state and constant created afterwards is half, with no float32 copy anywhere.

    Example:
        torch.set_default_dtype(torch.float16)

    Use instead:
        with torch.autocast("cuda", dtype=torch.float16):
            ...

    When not: it is set back after loading a model for inference.
    """
    kind = event.arg(0).const
    if kind not in HALF or not view.is_training():
        return
    here = event.at.stack[-1:]
    others = [e for e in view.of("set_default_dtype") if e.node is not event.node and e.at.stack[-1:] == here]
    if any(e.arg(0).const not in HALF for e in others):
        return
    text = f"the default dtype becomes {kind}: all parameters created from here on are half"
    yield Hit(event.node, text, "keep float32 as the default and use autocast")


@rule("HALF_LOSS_INPUT", Severity.WARNING, *sorted(LOSSES), "loss_call")
def half_loss_input(event: Event, view: FileView) -> Iterator[Hit]:
    """A loss gets inputs that were cast to half by hand.

    Why: the loss is where small differences matter; cast before it, logits keep 3 digits (fp16) or 2 (bf16), whatever the
    loss does inside.

    Example:
        loss = F.cross_entropy(logits.half(), target)

    Use instead:
        loss = F.cross_entropy(logits.float(), target)

    When not: in evaluation.
    """
    if not event.at.has_grad or not view.is_training():
        return
    is_known = event.op not in ("loss", "loss_call")
    if not is_known and not goes_backward(event.out, view.of(*MAKES_GRADIENTS)):
        return
    if event.op == "loss_call" and (_feeds_a_loss(event, view) or not _is_summed_up(event.out, view)):
        return
    for value in event.args[:2]:
        for made in _through_shapes(value):
            if made.inputs and made.inputs[0].dtype == "bool":
                break  # 0 and 1 are exact in every format
            if made.op == "cast" and made.dtype in ("fp16", "bf16") and made.node is not None and "follow" not in made.tags:
                yield Hit(
                    event.node, f"an input of this loss was cast to {made.dtype} ({made.why})", "give the loss float32 inputs"
                )
                return


def _feeds_a_loss(event: Event, view: FileView) -> bool:
    """Whether a known loss is computed of what a module of the program gives back: then the module itself is none."""
    fed = view.once("fed to a loss", lambda: {id(v) for e in view.of(*LOSSES) for a in e.args[:1] for v in ancestors(a)})
    return id(event.out) in fed


def _is_summed_up(value: Value, view: FileView) -> bool:
    """Whether what goes backward is made of a value by weighting, adding and averaging alone: what is squared is no loss yet."""
    stack, seen = losses_of(view.of(*MAKES_GRADIENTS)), set[int]()
    while stack:
        current = stack.pop()
        if current is value:
            return True
        if id(current) not in seen and current.op not in _BENDS:
            seen.add(id(current))
            stack.extend(current.inputs)
    return False


_BENDS = NONLINEAR_FUNCTIONS - {"sum", "mean", "max", "min"} | LOSSES | {"module_call"}


@rule("HALF_ACCUMULATOR", Severity.WARNING, "augassign", "add_", "lerp_", "accumulate", "addcmul_", "copy_")
def half_accumulator(event: Event, view: FileView) -> Iterator[Hit]:
    """A running sum, moving average or metric is kept in half.

    Why: once the sum is 2048 (fp16) or 256 (bf16) times an addend, adding it changes nothing: averages freeze and counts
    stop.

    Example:
        total = torch.zeros((), dtype=torch.bfloat16)
        for batch in loader:
            total += loss.detach()

    Use instead:
        total = torch.zeros((), dtype=torch.float32)

    When not: only a handful of values is added.
    """
    target = event.arg(0)
    if target.op == "getitem" and len(target.inputs) > 1 and not target.inputs[1].is_number:
        return  # each element gets few addends: tiles, scatter
    if event.op == "augassign" and event.arg(2).const not in ("Add", "Sub"):
        return
    if event.op == "copy_" and not _is_added_to(target, event.arg(1)):
        return
    if target.dtype not in HALF or "grad" in target.tags:
        return
    origin = _store(target)
    is_local = event.op in ("accumulate", "augassign") and isinstance(_target(event.node), ast.Name)
    if origin is None or not (event.at.loops or (event.at.stack and not is_local)) or _is_made_in_pass(origin, event, view):
        return
    if not _gets_many(origin, event, view, is_local):
        return
    made = event.out.node if event.out.node is not None else event.node  # a function may add, and its caller keep the sum
    yield Hit(
        event.node,
        f"values are added up in {target.dtype} ({origin.why or 'kept in half'})",
        "keep accumulators in float32",
        mistake=("added up", getattr(made, "file", event.file), getattr(made, "lineno", event.line)),
    )


def _is_added_to(target: Value, written: Value) -> bool:
    """Whether what is written back is the target with something added: `average.copy_(decay * average + share * weight)`."""
    waiting = [written] if written.op in TWO_TERMS else []
    while waiting:
        current = waiting.pop()
        if current is target:
            return True
        if current.op in TWO_TERMS or current.op == "mul":
            waiting += current.inputs
    return False


def _is_made_in_pass(store: Value, event: Event, view: FileView) -> bool:
    """Whether the tensor that is added to is made anew each time it is added to: a bias is added once, nothing runs on."""
    made = next((e for e in view.of(store.op) if e.out is store), None) if store.op in CREATING_FUNCTIONS else None
    if made is None:
        return False
    around, inside = event.at, made.at
    return inside.stack[: len(around.stack)] == around.stack and inside.loops[: len(around.loops)] == around.loops


def _gets_many(store: Value, event: Event, view: FileView, is_local: bool) -> bool:
    """Whether many values are added: the store outlives the call that adds to it, or batches or a long count run through the
    loop. A loop over the parts of a model, its masks or its folds adds a handful, also where a function is called for each."""
    made = next((e for e in view.of(store.op) if e.out is store), None) if store.op in CREATING_FUNCTIONS else None
    if made is None or (made.at.stack != event.at.stack and not is_local):
        return True
    most = 1 / (FP16 if store.dtype == "fp16" else BF16).eps
    return any(_count(loop) >= most or _runs_batches(loop, event, view) for loop in event.at.loops[len(made.at.loops) :])


def _count(loop: ast.AST) -> int:
    """The number that a loop counts to, if it is written there."""
    source = getattr(loop, "iter", None)
    if not (isinstance(source, ast.Call) and isinstance(source.func, ast.Name) and source.func.id == "range"):
        return 0
    return max((a.value for a in source.args if isinstance(a, ast.Constant) and isinstance(a.value, int)), default=0)


def _runs_batches(loop: ast.AST, event: Event, view: FileView) -> bool:
    """Whether a loop trains, or calls a model on what it binds."""
    if any(loop in e.at.loops for e in view.of("backward", "framework.backward", "optimizer.step", "scaler.step")):
        return True
    bound = bound_in(loop)
    calls = (e.node for e in view.of("module_call") if loop in e.at.loops and e.at.stack == event.at.stack)
    given = (n for node in calls if isinstance(node, ast.Call) for a in node.args for n in ast.walk(a))
    return any(isinstance(n, ast.Name) and n.id in bound for n in given)


def _target(node: ast.AST) -> ast.AST | None:
    """What an assignment writes to."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return targets[0]


def _store(value: Value) -> Value | None:
    """What a running value was created as: a tensor made in half on purpose, or a parameter of a half copy of a model."""
    current = value
    for _ in range(12):
        if current.dtype in HALF and current.op in (*CREATING_FUNCTIONS, "param"):
            return current
        if current.dtype in HALF and current.op == "cast" and current.inputs:
            return current if current.inputs[0].op in (*CREATING_FUNCTIONS, "param", "clone", "detach") else None
        if current.op not in ACCUMULATING_FUNCTIONS or not current.inputs:
            return None
        current = next((v for v in current.inputs if v.kind == "tensor"), current.inputs[0])
    return None
