"""Autocast regions: what is inside that should not be, and what is outside that should be inside."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...core.finding import Severity
from ...core.ops import CLASS_LOSSES, LIKE_FUNCTIONS, LINEAR_ALGEBRA, LOSSES, PROMOTING, SHAPE
from ..chains import link, region_link
from ..interpreter.guards import AMP
from ..interpreter.regions import Region
from ..interpreter.source import OwnFunction
from ..interpreter.torch_names import DEVICE_TYPES
from ..interpreter.trace import Event, FileView, Trace
from ..interpreter.values import HALF, Value
from ..registry import Hit, rule
from .training import MAKES_GRADIENTS, goes_backward, is_stepped

_ONE_HALF_INPUT = CLASS_LOSSES | {"loss"}
_CARRIES = SHAPE | LIKE_FUNCTIONS | {
    "cast", "getitem", "dtype", "grad_read", "set_grad", "item", "size", "numel", "unknown_call", "external", "module_call",
    "setitem", "call", "decorator", "dict", "isnan", "isinf", "isfinite", "any", "all", "argmax", "argmin", "argsort", "loss",
    "augassign", "autocast", "new_zeros", "new_ones", "new_tensor", "tensor", "as_tensor", "compare", "custom_function",
    "layer", "save",
}  # fmt: skip


@rule("REGION_LOSS_OUTSIDE", Severity.WARNING, on="trace")
def loss_outside(trace: Trace, view: FileView) -> Iterator[Hit]:
    """A loss is computed on a half output after leaving the autocast region.

    Why: outside, nothing promotes the loss to float32: log-softmax, squares and means run in fp16 or bf16 and lose or
    overflow.

    Example:
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits, target)

    Use instead:
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits, target)

    When not: the output is cast with .float() first, or only evaluated.
    """
    trained = trace.of(*MAKES_GRADIENTS)
    if not trained:
        return
    for event in trace.of(*LOSSES):
        if event.at.region is not None or event.at.island or not event.at.has_grad:
            continue
        output = event.arg(0, "input")
        target = event.arg(1, "target")
        if not _is_region_output(output):
            continue
        if event.op not in _ONE_HALF_INPUT and not target.is_half:
            continue
        if event.op == "loss" and (target.dtype in ("fp32", "fp64") or not goes_backward(event.out, trained)):
            continue
        yield Hit(
            event.node,
            f"loss outside autocast on a half tensor: {output.why or output.dtype}, no upcast before line {event.line}",
            "move the loss into the autocast block, or cast the output with .float()",
        )


def _is_region_output(value: Value) -> bool:
    return value.is_half and "autocast" in value.tags


@rule("REGION_BACKWARD_INSIDE", Severity.WARNING, "backward", "optimizer.step", "scaler.step")
def backward_inside(event: Event, view: FileView) -> Iterator[Hit]:
    """backward or an optimizer step runs inside the autocast region.

    Why: backward already uses the dtypes that forward chose; under autocast its own operations are cast once more, which
    torch advises against. Matrix products that forward ran in float32 (a block with autocast off, a function of its own) lose
    their precision in backward; without them the gradients are the same bits.
    autocast keeps its copies of the weights until the block ends: where a loop steps inside it, no pass sees a new weight.

    Example:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
            scaler.scale(loss).backward()

    Use instead:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()

    When not: never for speed or accuracy; it is only tolerated.
    """
    region = event.at.region
    if region is None or region.is_framework:  # Lightning itself steps inside its region
        return
    what = "backward" if event.op == "backward" else "the optimizer step"
    if _is_other_way(event) or (event.op == "backward" and not is_stepped(event, view)):
        return  # autocast is off here; or a measurement of time or memory
    stale = event.op != "backward" and _keeps_old_weights(event, region, view)
    text = f"{what} runs inside {region.label_in(event.file)}"
    if stale:
        text = f"{text}, which stays open for all passes of the loop: each sees the weights of the first, cast once"
    yield Hit(
        event.node,
        text,
        "end the autocast block before this line",
        chain=(region_link(region, event.file), link(event, f"{what} inside it")),
        is_proven=stale,
        mistake=("inside", region.file or event.file, region.line),
    )


def _keeps_old_weights(step: Event, region: Region, view: FileView) -> bool:
    """Whether passes that call a model and step run inside one opening of a region: its copies of the weights stay until it
    is left."""
    if not region.has_cache or view.of("clear_autocast_cache"):
        return False
    calls = [e for e in view.of("module_call") if e.at.region is region and e.at.has_grad]
    for opened in view.of("enter"):
        around = opened.at.loops
        inner = step.at.loops[len(around) :] if opened.arg(0).ref is region and step.at.loops[: len(around)] == around else ()
        if inner and any(inner[0] in e.at.loops for e in calls):
            return True
    return False


@rule("REGION_BCE", Severity.ERROR, "binary_cross_entropy")
def bce_under_autocast(event: Event, view: FileView) -> Iterator[Hit]:
    """`binary_cross_entropy` or `BCELoss` is called under CUDA autocast.

    Why: torch raises RuntimeError there, because sigmoid output in half cannot be kept away from 0 and 1. On CPU it is
    promoted.

    Example:
        with torch.autocast("cuda"):
            loss = F.binary_cross_entropy(torch.sigmoid(logits), target)

    Use instead:
        with torch.autocast("cuda"):
            loss = F.binary_cross_entropy_with_logits(logits, target)

    When not: inside a nested region with enabled=False and float32 inputs.
    """
    region = event.at.region
    if region is None or region.device == "cpu" or region.is_off_by_default or _is_other_way(event):
        return
    yield Hit(
        event.node,
        f"binary_cross_entropy raises RuntimeError under {'CUDA ' if not region.device else ''}{region.label_in(event.file)}",
        "use binary_cross_entropy_with_logits on the logits",
        chain=(region_link(region, event.file), link(event, "binary_cross_entropy under it")),
        unknown=_island_test(event, view) if region.device else "the device",
        is_proven=region.device == "cuda" and region.enabled is True and all(key != AMP for key, _ in event.at.guards),
    )


def _is_other_way(event: Event) -> bool:
    """Whether the call runs only when the switch that opens the region is off."""
    guards = {*event.at.guards}
    return (AMP, False) in guards and ((AMP, True) in guards or getattr(event.at.region, "enabled", True) is None)


def _island_test(event: Event, view: FileView) -> str:
    """What decides between this call and the same one with autocast off: the code knows of autocast, and asks."""
    for other in view.of("binary_cross_entropy"):
        is_off = other.at.regions and other.at.regions[-1].enabled is False
        if is_off and any((key, not arm) in other.at.guards for key, arm in event.at.guards):
            return "whether the branch that leaves autocast is taken instead"
    return ""


@rule("REGION_DEVICE", Severity.ERROR, on="trace")
def region_device(trace: Trace, view: FileView) -> Iterator[Hit]:
    """autocast is opened for another device type than the one that the code runs on.

    Why: autocast for "cpu" does nothing to CUDA tensors and the other way round: the model silently runs in float32. A name
    that is no device type, or a torch.device object, raises.

    Example:
        model.cuda()
        with torch.autocast("cpu"):
            model(x.cuda())

    Use instead:
        with torch.autocast(device.type):
            model(x)

    When not: the region also holds work of the other device on purpose.
    """
    for event in trace.of("autocast"):
        given = event.kwargs.get("device_type") or (
            event.arg(0) if not str(event.kwargs[""].const).startswith(("torch.cuda", "torch.cpu")) else None
        )
        if given is None:
            continue
        if given.kind == "device":
            text = "device_type is a torch.device object; autocast wants its name and raises"
            chain = (link(event, "autocast gets a torch.device"),)
            yield Hit(event.node, text, "pass device.type", chain=chain, is_proven=True)
        elif isinstance(given.const, str) and given.const.partition(":")[0] not in DEVICE_TYPES:
            chain = (link(event, f"autocast gets {given.const!r}"),)
            text = f"{given.const!r} is no device type; autocast raises"
            yield Hit(event.node, text, 'use "cuda" or "cpu"', chain=chain, is_proven=True)
    for region, calls in _calls_by_region(trace).items():
        devices = {str(e.kwargs[""].const) for e in calls}
        if len(devices) == 1 and devices < DEVICE_TYPES and region.device not in devices and region.node is not None:
            event, found = calls[0], devices.pop()
            yield Hit(
                region.node,
                f"autocast is opened for {region.device}, but what runs at {event.place_in(region.file)} is on {found}",
                f'use torch.autocast("{found}", ...)',
                Severity.WARNING,
                chain=(region_link(region, event.file), link(event, f"runs on {found}")),
            )


def _calls_by_region(trace: Trace) -> dict[Region, list[Event]]:
    """The calls of modules whose device is known, by the region that they run in, where that is opened for a known one."""
    found: dict[Region, list[Event]] = {}
    for event in trace.of("module_call"):
        region = event.at.region
        if region is not None and region.device and event.kwargs[""].const:
            found.setdefault(region, []).append(event)
    return found


_NEED_A_DEVICE = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")


@rule("REGION_NO_DEVICE", Severity.ERROR, "autocast")
def region_no_device(event: Event, view: FileView) -> Iterator[Hit]:
    """`torch.autocast` is called without its device type.

    Why: `torch.cuda.amp.autocast()` knew its device, `torch.autocast` and `torch.amp.autocast` must be told: the call raises
    TypeError.

    Example:
        from torch.amp import autocast

        with autocast(enabled=use_amp):
            ...

    Use instead:
        with autocast("cuda", enabled=use_amp):
            ...

    When not: never.
    """
    node = event.node
    if event.args or "device_type" in event.kwargs or event.kwargs[""].const not in _NEED_A_DEVICE:
        return
    if isinstance(node, ast.Call) and not node.args and all(keyword.arg is not None for keyword in node.keywords):
        text = "autocast is called without its device type: raises TypeError"
        yield Hit(node, text, 'give it first: autocast("cuda", ...)', chain=(link(event, "device_type is missing"),))


@rule("REGION_ISLAND_STILL_HALF", Severity.WARNING, on="trace")
def island_still_half(trace: Trace, view: FileView) -> Iterator[Hit]:
    """A block with autocast switched off still computes on half tensors.

    Why: enabled=False stops the casting, it does not undo it: tensors made outside stay half, and now nothing promotes
    softmax, sums or losses to float32.

    Example:
        with torch.autocast("cuda", enabled=False):
            loss = F.cross_entropy(logits, target)

    Use instead:
        with torch.autocast("cuda", enabled=False):
            loss = F.cross_entropy(logits.float(), target)

    When not: the operation inside is exact in half, such as a reshape or a comparison.
    """
    done: set[tuple[int, int]] = set()
    for event in trace.events:
        island = event.at.island
        if island is None or event.op in _CARRIES:
            continue
        key = (island.line, len(event.at.stack))
        half = next((v for v in event.args if v.kind == "tensor" and v.is_half and "autocast" in v.tags), None)
        if half is None or key in done or _may_be_promoted(event):
            continue
        done.add(key)
        yield Hit(
            event.node,
            f"autocast is off (line {island.line}), but this still computes in {half.dtype}: {half.why}",
            "cast with .float() when entering the block",
        )


def _may_be_promoted(event: Event) -> bool:
    """Whether the other operand of an elementwise operation is, or may be, a tensor in float32."""
    others = (v for v in event.args[:2] if v.dtype not in (*HALF, "int", "bool") and not v.is_number and v.kind != "const")
    return event.op in PROMOTING and next(others, None) is not None


@rule("REGION_CUSTOM_FUNCTION", Severity.WARNING, "custom_function")
def custom_function(event: Event, view: FileView) -> Iterator[Hit]:
    """An `autograd.Function` runs under autocast without `custom_fwd` and `custom_bwd`.

    Why: its forward sees whatever dtypes autocast left, and its backward runs without autocast: mixed dtypes raise, or the
    two passes disagree.

    Example:
        class MyLinear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w): ...

    Use instead:
        class MyLinear(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx, x, w): ...

    When not: the function has one tensor input and only elementwise operations.
    """
    region = event.at.region
    owner = event.arg(0).ref
    forward, backward = owner.find("forward"), owner.find("backward")
    if region is None or forward is None:
        return
    if _is_decorated(forward, "custom_fwd"):
        if backward is not None and not _is_decorated(backward, "custom_bwd"):
            text = f"{owner.name}.forward has custom_fwd, but its backward has no custom_bwd: the two run in different dtypes"
            yield Hit(forward.node, text, "decorate backward with torch.amp.custom_bwd")
        return
    tensors = [v for v in event.args[1:] if v.kind == "tensor" or (not v.kind and v.dtype != "int" and v.thing is not None)]
    multiplies = any(_uses_matrices(f.node) for f in (forward, backward) if f is not None)
    if len(tensors) < 2 and not multiplies:
        return
    place = event.place_in(getattr(forward.node, "file", event.file))
    yield Hit(
        forward.node,
        f"{owner.name} is applied under {region.label_in(event.file)} ({place}) without custom_fwd/custom_bwd",
        "decorate forward with torch.amp.custom_fwd and backward with torch.amp.custom_bwd",
        None if multiplies else Severity.INFO,  # what it computes with is in a kernel that is not seen
        chain=(region_link(region, event.file), link(event, "the function is applied")),
    )


def _is_decorated(function: OwnFunction, name: str) -> bool:
    return any(decorator.rpartition(".")[2] == name for decorator in function.decorators)


def _uses_matrices(node: ast.AST) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.MatMult):
            return True
        if isinstance(inner, ast.Attribute) and inner.attr in LINEAR_ALGEBRA:
            return True
    return False
