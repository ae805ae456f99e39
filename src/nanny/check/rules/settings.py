"""Mixed-precision settings given to frameworks in Python: Hugging Face, Accelerate, Lightning, DeepSpeed, FSDP."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...core.finding import Severity
from ..chains import link, node_link, region_link
from ..interpreter.regions import framework_dtype
from ..interpreter.torch_names import IN_FILE, TRAINERS, TRAINING_ARGUMENTS
from ..interpreter.trace import Event, FileView, Trace, can_meet
from ..interpreter.values import Value
from ..registry import Hit, rule
from .protocol import run_together
from .scaler_state import bad_settings


def _keyword(node: ast.AST, name: str) -> ast.AST:
    """The keyword or dict entry `name`, for its line; the whole node if it is not written out."""
    for keyword in getattr(node, "keywords", ()):
        if keyword.arg == name:
            return keyword
    for key in getattr(node, "keys", ()):
        if isinstance(key, ast.Constant) and key.value == name:
            return key
    return node


def _where_written(node: ast.AST, name: str, value: Value) -> ast.AST:
    """Where a setting is written: its keyword, or the entry of the dict that was passed with **."""
    found = _keyword(node, name)
    return found if found is not node or value.node is None else value.node


def _is_on(value: Value | None) -> bool:
    """Whether a setting switches something on: True, or a section with enabled: True."""
    if value is None:
        return False
    if value.kind == "dict" and isinstance(value.ref, dict):
        inner = value.ref.get("enabled")
        return isinstance(inner, Value) and inner.const is True
    return value.const is True


@rule("CONFIG_FP16_AND_BF16", Severity.ERROR, "external", "dict")
def both_precisions(event: Event, view: FileView) -> Iterator[Hit]:
    """fp16 and bf16 are both switched on.

    Why: they exclude each other; Hugging Face and DeepSpeed raise, others pick one silently.

    Example:
        TrainingArguments(output_dir="out", fp16=True, bf16=True)

    Use instead:
        TrainingArguments(output_dir="out", bf16=True)

    When not: never.
    """
    for first, second in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval"), ("float16", "bfloat16")):
        if _is_on(event.kwargs.get(first)) and _is_on(event.kwargs.get(second)):
            nodes = [_where_written(event.node, name, event.kwargs[name]) for name in (first, second)]
            later = max(nodes, key=lambda n: (getattr(n, "lineno", 0), getattr(n, "col_offset", 0)))
            yield Hit(
                later,
                f"{first} and {second} are both on",
                "keep one: bf16 where the GPU has it (Ampere or later), else fp16",
                chain=tuple(node_link(n, event.file, f"{name} is on") for n, name in zip(nodes, (first, second))),
                is_proven=True,
            )


_TRUE_HALF = {"16-true": "fp16", "bf16-true": "bf16"}


@rule("CONFIG_TRUE_HALF", Severity.WARNING, "external", "framework.new")
def true_half(event: Event, view: FileView) -> Iterator[Hit]:
    """Training runs with precision "16-true" or "bf16-true": everything in half, no float32 copy.

    Why: weights, optimizer state and normalisation are all half; updates below 1/2048 or 1/256 of a weight vanish.
    "16-mixed" keeps float32 weights.

    Example:
        Trainer(precision="16-true")

    Use instead:
        Trainer(precision="16-mixed")

    When not: the model is only evaluated or used for prediction.
    """
    precision = event.kwargs.get("precision")
    if precision is None and event.arg(0).last == "HalfPrecision":
        precision = event.arg(1)
    if precision is None or precision.const not in _TRUE_HALF:
        return
    if not _fits(view, event):
        return
    yield Hit(
        _where_written(event.node, "precision", precision),
        f'precision="{precision.const}" trains with all weights in {_TRUE_HALF[precision.const]}',
        'use "bf16-mixed" or "16-mixed" for training',
    )


def _fits(view: FileView, event: Event) -> bool:
    """Whether anything is trained in this file, as far as it shows: a lone settings object counts as training."""
    called = {path.rpartition(".")[2] for path in view.module.uses.called}
    if called & {"fit", "backward", "manual_backward", "training_step"}:
        return True
    return not called & {"predict", "test", "validate", "generate", "evaluate"}


@rule("CONFIG_LOSS_SCALE", Severity.WARNING, "dict", "external", "reduce_policy")
def loss_scale(event: Event, view: FileView) -> Iterator[Hit]:
    """A loss-scale setting makes no sense.

    Why: a static scale of 1 rescues no gradient; DeepSpeed's initial_scale_power is an exponent, so 65536 means 2**65536;
    bf16 takes no loss scale at all.

    Example:
        "fp16": {"enabled": True, "initial_scale_power": 65536}

    Use instead:
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}

    When not: a test that provokes overflow.
    """
    if event.op == "external":
        if event.arg(0).last == "GradScalerKwargs":
            yield from bad_settings(event, dict(event.kwargs))
        return
    if event.op == "reduce_policy":
        precision, scaler = event.kwargs.get("precision"), event.kwargs.get("scaler")
        if precision is not None and str(precision.const).startswith("bf16") and scaler is not None and not scaler.is_none:
            yield Hit(_keyword(event.node, "scaler"), "a scaler has no meaning for bf16; Lightning raises", "remove it")
        return
    if event.op == "dict":
        section = event.kwargs
        bf16 = section.get("bf16")
        if bf16 is not None and bf16.kind == "dict" and isinstance(bf16.ref, dict):
            for name in ("loss_scale", "initial_scale_power"):
                if name in bf16.ref and bf16.node is not None:
                    yield Hit(_keyword(bf16.node, name), f"{name} has no meaning for bf16", "remove it: bf16 needs no loss scale")
        if "enabled" not in section or section["enabled"].const is False:
            return
        from ..settings.rules import scale_values  # loaded where there is such a section

        for problem in scale_values((), {key: value.const for key, value in section.items() if value.is_number}):
            yield Hit(_keyword(event.node, problem.keys[-1]), problem.message, problem.hint)


_REDUCE_HOOKS = ("fp16_compress_hook", "bf16_compress_hook", "fp16_compress_wrapper", "bf16_compress_wrapper")


@rule("CONFIG_REDUCE_DTYPE", Severity.WARNING, "external", "reduce_policy", "unknown_call", "dict")
def reduce_dtype(event: Event, view: FileView) -> Iterator[Hit]:
    """Gradients are summed across devices in half.

    Why: the sum over many ranks is rounded at every addition and, in fp16, can overflow; float32 costs twice the traffic
    and keeps the gradient.

    Example:
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

    Use instead:
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    When not: few ranks and a measured need for the bandwidth.
    """
    hint = "reduce in float32"
    if event.op == "reduce_policy" and not event.at.stack and not view.is_training() and _is_used_here(event, view):
        return  # a script that makes no gradients
    if event.op == "reduce_policy":
        reduce, param = event.kwargs.get("reduce_dtype"), event.kwargs.get("param_dtype")
        if reduce is not None and not reduce.is_none:
            if reduce.const in ("fp16", "bf16"):
                yield Hit(
                    _keyword(event.node, "reduce_dtype"),
                    f"gradients are reduced in {reduce.const}",
                    "set reduce_dtype=torch.float32",
                )
        elif param is not None and param.const in ("fp16", "bf16"):
            yield Hit(
                event.node,
                f"without reduce_dtype gradients are reduced in param_dtype, {param.const}",
                "set reduce_dtype=torch.float32",
            )
    elif event.op == "dict":
        kind = event.kwargs.get("communication_data_type")
        if kind is not None and kind.const in ("fp16", "bf16", "bfp16", "float16", "bfloat16"):
            yield Hit(_keyword(event.node, "communication_data_type"), f"gradients are reduced in {kind.const}", 'use "fp32"')
    else:
        for value in (*event.args[1:], *event.kwargs.values()):
            if value.kind == "external" and value.path.rpartition(".")[2] in _REDUCE_HOOKS:
                text = f"{value.path.rpartition('.')[2]} sums gradients across ranks in half"
                yield Hit(event.node, text, hint, Severity.INFO if event.at.guards else None)  # a user who asks for it knows


def _is_used_here(policy: Event, view: FileView) -> bool:
    given = (v for e in view.of("call", "external", "unknown_call") for v in e.kwargs.values())
    return any(v.node is policy.node for v in given if v.op == "reduce_policy")


@rule("CONFIG_DOUBLE_SCALING", Severity.ERROR, on="file")
def double_scaling(view: FileView) -> Iterator[Hit]:
    """A plain backward, or a scaler of one's own, is used under a framework that scales the loss itself.

    Why: Accelerate, Lightning, Fabric and DeepSpeed own the loss scaler. A plain backward leaves gradients unscaled while
    the step unscales them, or refuses to, if nothing was scaled at all; a second scaler scales twice.

    Example:
        accelerator = Accelerator(mixed_precision="fp16")
        loss.backward()

    Use instead:
        accelerator.backward(loss)

    When not: the framework runs in bf16 or float32 and nothing is scaled.
    """
    framework = _framework(view)
    if framework is None:
        return
    name, call, kind, made = framework
    if kind not in ("fp16", ""):
        return
    for event in view.of("scaler.new"):
        enabled = event.kwargs.get("enabled")
        if (enabled is None or enabled.const is not False) and kind == "fp16" and can_meet(made, event):
            yield Hit(
                event.node,
                f"{name} ({made.place_in(event.file)}) has a loss scaler of its own: the loss is scaled twice",
                f"remove this one and use {call}",
                chain=(link(made, f"{name} scales the loss"), link(event, "a second scaler is made")),
                is_proven=run_together(made, event),
            )
    if view.of("scaler.new"):
        return
    is_asked = name == "DeepSpeed" or view.of("framework.backward")  # else torch's scaler has no scale yet
    harm = (
        "the step divides unscaled gradients by 65,536" if is_asked else "its step raises AssertionError, for nothing was scaled"
    )
    for trace in view.traces:
        for event in trace.of("backward"):
            if _owned(trace, event, name) and kind == "fp16" and can_meet(made, event):
                yield Hit(
                    event.node,
                    f"{name} ({made.place_in(event.file)}) scales the loss itself, this backward does not: {harm}",
                    f"use {call}",
                    chain=(link(made, f"{name} in fp16"), link(event, "backward without it")),
                    is_proven=run_together(made, event),
                )


def _owned(trace: Trace, event: Event, name: str) -> bool:
    """Whether the framework runs this code: a class of its kind holds it, or the function that it is reached through."""
    owners = [o for o in (trace.owner, *(function.owner for function in event.at.stack)) if o is not None]
    if name == "Trainer":
        return any(owner.derives_from(TRAINERS) for owner in owners)
    return name != "Lightning" or any(owner.is_lightning for owner in owners)


def _framework(view: FileView) -> tuple[str, str, str, Event] | None:
    """Name, the call to use, the precision (empty: not known) of the framework that owns the loss scale, and where it is made."""
    for event in view.of("framework.new"):
        if event.out.ref == "accelerate":
            return "Accelerator", "accelerator.backward(loss)", _precision(event.kwargs.get("mixed_precision")), event
        if event.out.ref == "fabric":
            return "Fabric", "fabric.backward(loss)", _precision(event.kwargs.get("precision")), event
        if event.out.ref == "deepspeed":
            config = event.kwargs.get("config") or event.kwargs.get("config_params")
            section = (
                config.ref.get("fp16") if config is not None and config.kind == "dict" and isinstance(config.ref, dict) else None
            )
            return "DeepSpeed", "engine.backward(loss)", "fp16" if _is_on(section) else "other", event
    for event in view.of("external"):
        path = event.arg(0).path
        if event.arg(0).last in TRAINING_ARGUMENTS and _is_on(event.kwargs.get("fp16")):
            return "Trainer", "self.accelerator.backward(loss)", "fp16", event
        if event.arg(0).last == "Trainer" and path.partition(".")[0] in ("lightning", "pytorch_lightning"):
            return "Lightning", "self.manual_backward(loss)", _precision(event.kwargs.get("precision")), event
    return None


def _precision(value: Value | None) -> str:
    """`fp16`, `other`, or empty if the code does not say."""
    if value is None:
        return ""
    text = str(value.const)
    if text in ("fp16", "16-mixed", "16"):
        return "fp16"
    return "other" if isinstance(value.const, (str, int)) else ""


@rule("CONFIG_CONFLICT", Severity.WARNING, on="file")
def conflicting_precision(view: FileView) -> Iterator[Hit]:
    """Two settings of one program ask for different half formats.

    Why: one of them loses without a word, or the run stops: Hugging Face refuses arguments that differ from the DeepSpeed
    file, a GradScaler cannot unscale bf16 weights, and a layer takes inputs in its own format only.

    Example:
        TrainingArguments(output_dir="out", bf16=True, deepspeed="ds_fp16.json")

    Use instead:
        TrainingArguments(output_dir="out", bf16=True, deepspeed="ds_bf16.json")

    When not: the two belong to different programs.
    """
    for event in view.of("external"):
        if event.arg(0).last not in TRAINING_ARGUMENTS:
            continue
        asked = next((kind for kind in ("fp16", "bf16") if _is_on(event.kwargs.get(kind))), "")
        file = event.kwargs.get("deepspeed")
        other = _deepspeed_kind(file)
        if asked and file is not None and other and other[0] != asked:
            place = node_link(other[1], event.file, f"DeepSpeed asks for {other[0]}")
            yield Hit(
                _keyword(event.node, asked),
                f"{asked}=True, but the DeepSpeed settings ({place.file}:{place.line}) ask for {other[0]}: the run stops",
                f"ask for {other[0]} in both, or for {asked}",
                Severity.ERROR,
                chain=(link(event, f"{asked} is on"), place),
            )
        if asked == "fp16":
            yield from _bf16_weights(view, event)
    for event in view.of("framework.new"):
        asked = framework_dtype(event.out.const)
        written = event.kwargs.get(IN_FILE)
        if asked and written is not None and written.node is not None and framework_dtype(written.const) not in ("", asked):
            place = node_link(written.node, event.file, f"the settings file asks for {written.const}")
            yield Hit(
                event.node,
                f"mixed_precision={event.out.const!r}, but {place.file}:{place.line} asks for {written.const}: the code wins",
                "ask for one format in one of the two places",
                chain=(place, link(event, f"the code asks for {event.out.const}")),
            )
        for region in (e.out.ref for e in view.of("autocast")):
            if asked and region.dtype in ("fp16", "bf16") and region.dtype != asked and region.enabled is True and region.node:
                yield Hit(
                    region.node,
                    f"autocast in {region.dtype}, but {event.out.ref} ({event.place_in(region.file)}) runs in {asked}",
                    f"open it in {asked}, or drop it: the framework opens one around each forward",
                    chain=(link(event, f"{event.out.ref} runs in {asked}"), region_link(region, event.file)),
                )


@rule("CONFIG_CONFLICT", Severity.WARNING, "framework.call")
def conflicting_inputs(event: Event, view: FileView) -> Iterator[Hit]:
    """Inputs that are cast to one half format for a model that DeepSpeed runs in the other."""
    engine, asked = event.arg(0), event.arg(0).const
    for value in (*event.args[1:], *event.kwargs.values()):
        if value.op != "cast" or value.node is None or not value.sure or {value.dtype, asked} != {"fp16", "bf16"}:
            continue
        place = node_link(engine.node or event.node, event.file, f"DeepSpeed asks for {asked}")
        cast = node_link(value.node, event.file, f"the input is cast to {value.dtype}")
        yield Hit(
            value.node,
            f"the input is cast to {value.dtype}, but the DeepSpeed settings ({place.file}:{place.line}) ask for {asked}: "
            "the first layer raises",
            f"cast it to {asked}, or to the dtype of the model's parameters",
            chain=(place, cast),
        )


def _bf16_weights(view: FileView, arguments: Event) -> Iterator[Hit]:
    """A model that is loaded in bf16 and trained with fp16=True: the scaler has no way to unscale its gradients."""
    for event in view.of("from_pretrained"):
        thing = event.out.thing
        if thing is not None and thing.dtype == "bf16" and thing.is_trained:
            yield Hit(
                event.node,
                f"weights loaded in bf16, trained with fp16=True ({arguments.place_in(event.file)}): "
                "unscaling their gradients raises",
                "train with bf16=True, or load the weights in float32",
                Severity.ERROR,
                chain=(link(event, "the weights are bf16"), link(arguments, "fp16 with its scaler")),
                mistake=("half weights", event.file, event.line),
            )


def _deepspeed_kind(config: Value | None) -> tuple[str, ast.AST] | None:
    """The half format that DeepSpeed settings switch on, and where."""
    sections = config.ref if config is not None and config.kind == "dict" and isinstance(config.ref, dict) else {}
    for kind in ("fp16", "bf16"):
        section = sections.get(kind)
        if section is not None and _is_on(section) and section.node is not None:
            return kind, section.ref["enabled"].node or section.node
    return None
