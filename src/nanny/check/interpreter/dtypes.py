"""The dtype that an operation's result has: autocast's lists first, then torch's promotion."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from ...core.ops import ARITHMETIC, CREATES, LIKE_FUNCTIONS, SAME_DTYPE, SEVERAL_OPERANDS, TO_BOOL, TO_INT, autocast_list
from .trace import Frame
from .values import HALF, UNKNOWN, Value, widest

DEFAULT_DTYPE = "(default dtype)"  # what torch.set_default_dtype has set in a module
CARRIED = frozenset({"scaled", "maybe_scaled", "grad", "scale"})  # marks that a result takes over from its operands


def result(frame: Frame, op: str, node: ast.AST, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> Value:
    """The value of `op(*args)` here and now."""
    dtype, why, source = result_dtype(frame, op, node, args, kwargs)
    sure = kwargs.get("dtype", UNKNOWN).sure if source is None else source.sure
    line = getattr(node, "lineno", 0) if source is None else source.line
    tags = _tags(op, args)
    if source is not None:
        tags |= source.tags & {"autocast"}
    elif dtype in HALF and "dtype" not in kwargs:
        tags |= {"autocast"}  # made half by the region, not by hand
    device = device_name(kwargs.get("device", UNKNOWN))
    if device or op in ("cuda", "cpu"):
        tags = on_device(tags, device or op)
    return Value("tensor", dtype, why, line, sure, op, args, tags=tags, node=node)


def device_name(value: Value) -> str:
    """`cuda` for "cuda:0" or torch.device("cuda"), if the code says."""
    return value.const.partition(":")[0] if value.kind in ("const", "device") and isinstance(value.const, str) else ""


def on_device(tags: frozenset[str], device: str) -> frozenset[str]:
    return frozenset(tag for tag in tags if not tag.startswith("device:")) | {f"device:{device}"}


def result_dtype(
    frame: Frame, op: str, node: ast.AST, args: tuple[Value, ...], kwargs: Mapping[str, Value]
) -> tuple[str, str, Value | None]:
    """Dtype, the reason in words, and the operand it was taken over from (None if made here)."""
    asked = kwargs.get("dtype")
    line = getattr(node, "lineno", 0)
    if asked is not None and not asked.is_none:
        return (asked.const if asked.kind == "dtype" and isinstance(asked.const, str) else ""), f"dtype= at line {line}", None
    if op == "view" and any(v.kind in ("dtype", "external") for v in args[1:]):  # the same bits read as another format
        seen_as = next(v for v in args[1:] if v.kind in ("dtype", "external"))
        return (seen_as.const if isinstance(seen_as.const, str) else ""), f"view at line {line}", None
    region = frame.at.region
    if _runs_in_float32(frame, op):
        return "fp32", f"{op} under autocast to float32 at line {frame.at.regions[-1].line}", None
    if region is not None:
        change = autocast_list(op, region.device)
        if change == "lower":
            if any(a.dtype == "fp64" for a in args):
                return "fp64", "float64 is left alone by autocast", None
            return region.dtype, f"{op} under {region.label_in(frame.module.filename)}", None
        if change == "float32":
            return "fp32", f"{op} is run in float32 by {region.label_in(frame.module.filename)}", None
        if change == "unknown":
            return "", "", None
    if op in TO_BOOL:
        return "bool", op, None
    if op in TO_INT:
        return "int", op, None
    if op in CREATES:
        default = frame.lookup(DEFAULT_DTYPE)
        if default is not None and default.const in HALF:
            return default.const, f"set_default_dtype at line {default.line}", None
        return "fp32", f"{op} without dtype", None
    if op in LIKE_FUNCTIONS or op in ("masked_fill", "clamp", "getitem") or op.endswith("_"):
        first = args[0] if args else UNKNOWN
        return first.dtype, first.why, first
    if op in ("where",):
        first = widest(args[1:3])
        return first.dtype, first.why, first
    if op not in SAME_DTYPE and op != "rsub":
        return "", "", None
    operands = _operands(frame, args if op in SEVERAL_OPERANDS else args[:1])
    if not operands:
        return "", "", None
    best = widest(operands)
    if op == "div" and best.dtype == "int":
        return "fp32", "division of whole numbers", None
    return best.dtype, best.why, best


def _runs_in_float32(frame: Frame, op: str) -> bool:
    """CUDA takes dtype=torch.float32 and then runs its listed operations in that; other devices switch autocast off."""
    if not frame.at.regions:
        return False
    inner = frame.at.regions[-1]
    if inner.dtype != "fp32" or inner.enabled is False or inner.device == "cpu":
        return False
    return autocast_list(op, "cuda") in ("lower", "float32")


def _operands(frame: Frame, args: tuple[Value, ...]) -> tuple[Value, ...]:
    """The tensors among the arguments: numbers, sizes and dims do not take part in promotion."""
    out: list[Value] = []
    for position, value in enumerate(args):
        if value.kind in ("tuple", "list"):
            out.extend(v for v in value.inputs if v.kind == "tensor" or v.dtype in ("fp16", "bf16", "half", "fp32", "fp64"))
        elif value.kind == "tensor" or position == 0 or (value.kind == "" and not is_scalar(frame, value)):
            out.append(value)
    return tuple(out)


def is_scalar(frame: Frame, value: Value, depth: int = 0) -> bool:
    """Whether a value is a Python number, as far as its making or its use tells."""
    if value.kind == "const" or value.dtype == "int":
        return True
    if value.kind:
        return False
    if value.op in ARITHMETIC and value.inputs and depth < 5:
        return all(is_scalar(frame, v, depth + 1) for v in value.inputs)
    return value.thing is not None and value.thing.name in frame.module.uses.numbers


def _tags(op: str, args: tuple[Value, ...]) -> frozenset[str]:
    tags: frozenset[str] = frozenset()
    if args:
        tags |= {tag for tag in args[0].tags if tag.startswith("device:")}
    for value in args:
        tags |= value.tags & CARRIED
        if value.kind in ("tuple", "list"):
            for item in value.inputs:
                tags |= item.tags & CARRIED
    if op.endswith("_like"):
        return frozenset()
    if op == "mul" and len(args) == 2 and any("scale" in a.tags for a in args):
        return (tags - {"scale"}) | {"scaled"}
    if op == "div" and len(args) == 2 and "scale" in args[1].tags:
        if "scaled" in tags or "grad" in tags:
            return tags - {"scaled", "scale", "grad"} | {"unscaled"}
        return (tags - {"scale"}) | {"inverse_scale"}
    if op == "mul" and any("inverse_scale" in a.tags for a in args):
        return tags - {"scaled", "grad"} | {"unscaled"}
    return tags
