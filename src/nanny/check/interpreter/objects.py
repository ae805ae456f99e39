"""What an object is and what its methods do: scalers, optimizers, frameworks, models and tensors.

What an object is follows from its value, else from how the file uses it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ...core.ops import (
    ALIASES,
    DTYPES,
    IN_PLACE,
    NEEDS_FLOAT,
    NORM_LAYERS,
    PICKING_FUNCTIONS,
    SAME_DTYPE,
    TENSOR_TYPES,
    TO_BOOL,
    TO_INT,
)
from .dtypes import on_device, result
from .regions import Region, framework_dtype
from .source import OwnClass
from .torch_names import MODULE_METHODS, OPTIMIZERS
from .trace import Frame
from .uses import dotted_name
from .values import HALF, UNKNOWN, Args, Kwargs, Thing, Value, ancestors, constant, replace, tensor

SUPER = "super()"  # field with what a class gives to the __init__ of a base outside the project


def builds_optimizer(path: str, last: str) -> bool:
    return (path.startswith("torch.optim.") and "." not in path[12:]) or last in OPTIMIZERS


def optimizer_base(info: OwnClass) -> str:
    """`AdamW` for a class of the project that derives from torch.optim.AdamW; empty if it is no such class."""
    names = [base.rpartition(".")[2] for base in info.bases if builds_optimizer(base, base.rpartition(".")[2])]
    names += [b for parent in info.parents if parent is not info and (b := optimizer_base(parent))]
    return next((name for name in names if name != "Optimizer"), names[0] if names else "")


def new_optimizer(frame: Frame, node: ast.Call, last: str, args: Args, kwargs: Kwargs) -> Value:
    params = args[0] if args else kwargs.get("params", UNKNOWN)
    owners = parameter_owners(params)
    for owner in owners:
        owner.is_trained = True
    value = Value("optimizer", ref=last, inputs=(params,), thing=Thing("", "optimizer"), line=node.lineno, node=node)
    return frame.emit("optimizer.new", node, (params, *args[1:]), kwargs, value)


def parameter_owners(params: Value) -> list[Thing]:
    """The modules (or parameters) whose tensors are handed to an optimizer or a clip."""
    found: list[Thing] = []
    stack, seen = [params], {id(params)}
    while stack:
        for value in ancestors(stack.pop()):
            if (value.op in ("parameters", "named_parameters", "parameter") and value.thing is not None) or (
                value.kind in ("instance", "module") and value.thing is not None
            ):
                found.append(value.thing)
            if value.kind == "dict" and isinstance(value.ref, dict) and len(found) < 50:
                fresh = [v for v in value.ref.values() if isinstance(v, Value) and id(v) not in seen]  # a dict may hold itself
                seen.update(map(id, fresh))
                stack.extend(fresh)
    return found


def parts_of(things: Iterable[Thing]) -> set[int]:
    """The ids of modules, of all that is inside them, and of what they are some part of."""
    found: set[int] = set()
    waiting = [*things]
    while waiting:
        current = waiting.pop()
        if id(current) not in found:
            found.add(id(current))
            waiting += [v.thing for v in current.attrs.values() if v.thing is not None and v.kind in ("module", "instance", "")]
            waiting += [current.owner] if current.owner is not None else []
    return found


_READS_SCALE = frozenset({"get_scale", "_get_scale_async"})
_SCALER_METHODS = _READS_SCALE | {"scale", "unscale_", "step", "update", "state_dict", "load_state_dict", "is_enabled"}


CASTS = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64", "int": "int", "long": "int", "bool": "bool"}


_TENSOR_METHODS = (
    SAME_DTYPE | TO_BOOL | TO_INT | IN_PLACE | NEEDS_FLOAT | frozenset({"item", "tolist", "numpy", "type_as", "masked_fill"})
)


_OTHER = frozenset(
    {"backward", "step", "prepare", "autocast", "enter_context", "manual_backward", "from_pretrained", "to", "type", "no_sync",
     "register_hook", "register_post_accumulate_grad_hook", "to_numpy"}
)  # fmt: skip


def knows(name: str) -> bool:
    return name in CASTS or name in MODULE_METHODS or name in _TENSOR_METHODS or name in _OTHER or name in _SCALER_METHODS


def is_loss(args: Args, kwargs: Kwargs) -> bool:
    """Whether an unknown call compares the output of a model with something; whether it is trained on, its backward tells.
    Settings beside it (`rearrange(x, "b c h w -> b (c h w)")`) are nothing to compare with."""
    given = [v for v in (*args, *kwargs.values()) if v.kind != "const" or not isinstance(v.const, (str, int, bool))]
    return len(given) > 1 and any(v.op == "module_call" for value in given for v in ancestors(value, 12))


def emit_loss(frame: Frame, node: ast.Call, args: Args, kwargs: Kwargs) -> Value:
    out = Value("tensor", op="loss", inputs=(*args, *kwargs.values()), line=node.lineno, node=node)
    return frame.emit("loss", node, tuple(args), kwargs, out)


def is_scaler(frame: Frame, base: Value, name: str) -> bool:
    if base.kind == "scaler":
        return True
    if base.kind or name not in _SCALER_METHODS or base.thing is None or base.thing.name not in frame.module.uses.scalers:
        return False
    return not (isinstance(base.ref, str) and not base.ref.startswith("torch"))


def is_optimizer(frame: Frame, base: Value) -> bool:
    if base.kind == "optimizer":
        return True
    return base.kind == "" and base.thing is not None and base.thing.name in frame.module.uses.optimizers


def is_framework(frame: Frame, base: Value) -> bool:
    if base.kind == "framework":
        return True
    return base.kind == "" and base.thing is not None and base.thing.name in frame.module.uses.frameworks


def is_module(frame: Frame, base: Value) -> bool:
    if base.kind == "module" or (base.kind == "instance" and base.ref.is_module):
        return True
    if base.kind == "tensor" or base.thing is None:
        return False
    name = base.thing.name
    return base.thing.kind == "module" or frame.module.uses.is_module(name) or frame.module.uses.is_called(name)


def scaler_method(frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    if base.thing is not None:
        base.thing.kind = base.thing.kind or "scaler"
    if name == "scale" and args:
        source = args[0]
        is_one_of = base.op == "phi" and any(v.kind == "instance" for v in base.inputs)  # or what stands in for a scaler
        tags = source.tags | {"scaled", "maybe_scaled"} if is_one_of else source.tags | {"scaled"}
        out = replace(source, kind=source.kind or "tensor", op="scale", inputs=(source,), tags=tags, node=node)
    elif name in _READS_SCALE:
        out = Value(op="get_scale", tags=frozenset({"scale"}))
    else:
        out = Value(op=f"scaler.{name}", inputs=(base,))
    return frame.emit(f"scaler.{name}", node, (base, *args), kwargs, out)


def backward(frame: Frame, node: ast.Call, base: Value, args: Args, kwargs: Kwargs) -> Value:
    if base.kind == "framework" or (args and base.kind != "tensor"):
        return frame.emit("framework.backward", node, (base, *args), kwargs)
    return frame.emit("backward", node, (base, *args), kwargs)


def framework_method(frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    if name in ("prepare", "setup"):
        frame.emit("framework.prepare", node, (base, *args), kwargs)
        region = mixed_region(frame, node, base)
        for value in args:
            if value.kind == "optimizer" and value.thing is not None:
                value.thing.kind = "framework_optimizer"
            elif value.thing is not None and region is not None and is_module(frame, value):
                value.thing.region = region
        return args[0] if len(args) == 1 else Value("tuple", inputs=tuple(args))
    if name == "autocast":
        region = mixed_region(frame, node, base)
        return Value("context", ref=region) if region is not None else framework_region(frame, node)
    if name == "unwrap_model" and args:
        return args[0]
    if name in ("parameters", "named_parameters"):
        return Value(op=name, inputs=(base,), thing=base.thing)
    if name not in ("clip_grad_norm_", "clip_grad_value_", "step", "accumulate", "zero_grad", "train", "eval"):
        frame.emit("unknown_call", node, (base, *args), kwargs)
    return frame.emit(f"framework.{name}", node, (base, *args), kwargs, Value(inputs=tuple(args)))


def framework_region(frame: Frame, node: ast.Call) -> Value:
    """`accelerator.autocast()` and the like: whether it is on, and in which dtype, the framework knows."""
    kind, file = frame.options.amp_dtype or "half", frame.module.filename
    return Value("context", ref=Region("", kind, None, node.lineno, dotted_name(node.func), file=file, is_framework=True))


def mixed_region(frame: Frame, node: ast.Call, framework: Value) -> Region | None:
    """The region that Accelerator or Fabric opens around a forward; None where its precision is not known, or not mixed."""
    dtype = framework_dtype(framework.const)
    made = framework.node or node
    if not dtype:
        return None
    device = framework.thing.device if framework.thing is not None else ""
    where = Region(device, dtype, True, getattr(made, "lineno", 1), "", file=getattr(made, "file", frame.module.filename))
    return replace(where, is_framework=True)


def call_pretrained(frame: Frame, node: ast.Call, name: str, kwargs: Kwargs) -> Value | None:
    if name != "from_pretrained":
        return None
    asked = kwargs.get("torch_dtype", kwargs.get("dtype", UNKNOWN))
    thing = Thing("", "module")
    is_quantised = any(k in kwargs for k in ("quantization_config", "load_in_8bit", "load_in_4bit"))
    if asked.kind == "dtype" and asked.const in ("fp16", "bf16") and not is_quantised:
        thing.dtype, thing.cast, thing.cast_line = asked.const, node, node.lineno
    value = Value("module", ref=None, thing=thing, line=node.lineno, node=node)
    return frame.emit("from_pretrained", node, (), kwargs, value)


def _wanted_dtype(name: str, args: Args, kwargs: Kwargs) -> str | None:
    """The dtype a cast asks for; None if it is no cast, the empty string if it cannot be told."""
    if name in CASTS:
        return CASTS[name]
    for value in (*args, *(kwargs[k] for k in ("dtype", "other") if k in kwargs)):
        if value.kind == "dtype":
            return value.const if isinstance(value.const, str) else ""
        if value.kind == "tensor" and name == "to":
            return value.dtype
        if name == "type" and isinstance(value.const, str):
            last = value.const.rpartition(".")[2]
            return TENSOR_TYPES.get(last) or DTYPES.get(last, "")
    if "dtype" in kwargs:
        return ""
    return None


def cast(frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    wanted = _wanted_dtype(name, args, kwargs)
    names = (v.const for v in (*args, *kwargs.values()) if v.kind in ("const", "device") and v.sure and isinstance(v.const, str))
    device = next(names, "")
    if is_module(frame, base):
        return _cast_module(frame, node, base, wanted, device, kwargs)
    tags = on_device(base.tags, device.partition(":")[0]) if device and name == "to" else base.tags
    if wanted is None:
        if name == "to" and base.kind == "" and args and args[0].kind == "":
            return replace(base, op="moved", inputs=(base,))
        return replace(base, op="view", inputs=(base,), kind=base.kind or "tensor", tags=tags)
    text = f"`.{name}()` at line {node.lineno}" if name in CASTS else f"cast at line {node.lineno}"
    sure = all(v.sure for v in (*args, *kwargs.values()))
    out = tensor(
        wanted, text, node.lineno, sure=sure, op="cast", inputs=(base,), tags=tags - {"autocast"}, node=node, thing=base.thing
    )
    return frame.emit("cast", node, (base, *args), kwargs, out)


def _cast_module(frame: Frame, node: ast.Call, base: Value, wanted: str | None, device: str, kwargs: Kwargs) -> Value:
    thing = base.thing
    if thing is None:
        return base
    if device:
        put_on(frame, base, device.partition(":")[0])
    if wanted:
        for part in parts(base):
            part.dtype, part.cast_line = wanted, node.lineno
            for name, value in part.attrs.items():  # buffers, too
                if (value.op == "parameter" or "buffer" in value.tags) and value.dtype not in ("", "int", "bool"):
                    why = f"`{name}`, cast with its module at line {node.lineno}"
                    part.attrs[name] = replace(value, dtype=wanted, why=why, line=node.lineno)
        if wanted in ("fp16", "bf16", "half"):
            thing.cast = node
        else:
            thing.cast = None
        if thing.owner is not None and not (base.kind == "module" and base.ref in NORM_LAYERS):
            thing.owner.dtype, thing.owner.cast_line = wanted, node.lineno
        frame.emit("module_cast", node, (base,), kwargs, Value("dtype", const=wanted))
    return base


def put_on(frame: Frame, model: Value, device: str) -> None:
    """Takes note where a model is; not where another way through the code may leave it elsewhere."""
    for part in parts(model):
        part.device = "" if frame.at.guards else device


def run_in(model: Value, dtype: str) -> None:
    """Takes note that a framework casts the weights of a model for each forward, and keeps them in float32."""
    for part in parts(model):
        part.runs_in = dtype


def parts(value: Value, depth: int = 0) -> Iterator[Thing]:
    """A module and everything inside it that holds weights."""
    if value.thing is not None:
        yield value.thing
    if depth > 5:
        return
    inner = value.inputs if value.kind == "module" else value.thing.attrs.values() if value.thing is not None else ()
    for item in list(inner):
        if item.kind in ("module", "instance") and item.thing is not value.thing:
            yield from parts(item, depth + 1)


def module_call(frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs) -> Value:
    return emit_call(frame, node, target, args, kwargs, given_back(frame, node, target, args, kwargs))


def given_back(frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs) -> Value:
    """What a model whose inside is not known gives back: half under autocast by convention, or because the model was cast."""
    thing = target.thing
    region = frame.at.region
    inputs = (*args, *kwargs.values(), target)
    if thing is not None and thing.region is not None:
        why = f"output of `{_call_text(node)}`, which the framework gives back in float32"
        return tensor("fp32", why, node.lineno, op="module_call", inputs=inputs, node=node)
    if region is not None and not (region.is_framework and region.enabled is None):  # a model it has prepared gives float32 back
        why = f"output of `{_call_text(node)}` under {region.label_in(frame.module.filename)}"
        tags = frozenset({"autocast"})
        return tensor(region.dtype, why, node.lineno, sure=False, op="module_call", inputs=inputs, tags=tags, node=node)
    if thing is not None and thing.dtype in HALF:
        why = f"output of `{_call_text(node)}`, cast to half at line {thing.cast_line}"
        return tensor(thing.dtype, why, node.lineno, op="module_call", inputs=inputs, node=node)
    if frame.at.island is not None and any(v.dtype == "fp32" for v in args):  # it fits the weights, which nothing has cast
        why = f"output of `{_call_text(node)}` with autocast off"
        return tensor("fp32", why, node.lineno, sure=False, op="module_call", inputs=inputs, node=node)
    return Value("tensor", op="module_call", inputs=inputs, line=node.lineno, node=node)


def emit_call(frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs, out: Value) -> Value:
    """Records the call of a module, with the device that the module is on right now."""
    device = constant(target.thing.device if target.thing is not None else "")
    return frame.emit("module_call", node, (target, *args), {**kwargs, "": device}, out)


def _call_text(node: ast.Call) -> str:
    return f"{dotted_name(node.func) or 'model'}(...)"


def layer_half(frame: Frame, target: Value) -> str:
    owner = frame.env.get("self", UNKNOWN)
    for thing in (target.thing, owner.thing):
        for kind in (thing.dtype, thing.runs_in) if thing is not None else ():
            if kind in ("fp16", "bf16"):
                return kind
    return ""


def tensor_method(frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    if name == "type_as" and args:
        return frame.emit(
            "cast",
            node,
            (base, *args),
            kwargs,
            tensor(
                args[0].dtype,
                f"type_as at line {node.lineno}",
                node.lineno,
                op="cast",
                inputs=(base,),
                node=node,
                tags=frozenset({"follow"}),  # whoever made the other tensor has chosen
            ),
        )
    if name in ("item", "tolist", "numpy"):
        value = Value("", op="item", inputs=(base,), tags=base.tags & {"scaled", "grad"})
        return frame.emit(name, node, (base, *args), kwargs, value)
    if name in ("size", "numel", "dim"):
        return Value("const", dtype="int")
    is_in_place = base.kind == "tensor" and name.endswith("_") and not name.startswith("_")
    if name not in _TENSOR_METHODS and not is_in_place:
        frame.emit("unknown_call", node, (base, *args), kwargs)
        inputs = (base, *args)
        return Value("", op=f"call:{name}", inputs=inputs, thing=Thing(""), tags=base.tags & {"scaled", "grad"})
    op = ALIASES.get(name, name)
    out = result(frame, op, node, (base, *args), kwargs)
    if name in PICKING_FUNCTIONS and (args or "dim" in kwargs):
        out = replace(out, ref="values_and_indices")
    frame.emit(op, node, (base, *args), kwargs, out)
    return out
