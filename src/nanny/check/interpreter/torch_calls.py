"""Calls of torch's own functions and constructors, and of the few others that matter (contextlib, accelerate, builtins)."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

from ...core.ops import ALIASES, CONTAINERS, CREATES
from . import objects
from .dtypes import DEFAULT_DTYPE, result
from .regions import AUTOCAST, CHOSEN_LATER, NO_GRAD, Region, region_of
from .torch_names import CLIPS, GRAD_SCALERS, TRAINERS, TRAINING_ARGUMENTS, WRAPPERS
from .trace import Frame
from .uses import dotted_name
from .values import NOTHING, UNKNOWN, Args, Kwargs, Thing, Value, as_default, constant, copy_of, replace, tensor

_FRAMEWORK = {
    **dict.fromkeys(("accelerate.Accelerator", "accelerate.accelerator.Accelerator"), "accelerate"),
    **dict.fromkeys(("lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric"), "fabric"),
    **dict.fromkeys(("lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer"), "lightning"),
}


_ADOPTED = {"torch.compile", "torch.jit.script", "torch.jit.trace", "copy.deepcopy", "copy.copy", "deepcopy", "builtins.list",
            "builtins.tuple", "builtins.iter", "builtins.sorted", "builtins.reversed", "builtins.filter",
            "builtins.next"}  # fmt: skip


_PREFIXES = ("torch.nn.functional.", "torch.Tensor.", "torch.")


def call_external(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    last = path.rpartition(".")[2]
    handler = _EXACT.get(path)
    if handler is not None:
        return handler(frame, node, path, args, kwargs)
    if path in AUTOCAST:
        return _autocast(frame, node, path, args, kwargs)
    if last in GRAD_SCALERS and not path.startswith("sklearn"):
        value = Value("scaler", ref=path, thing=Thing("", "scaler"), line=node.lineno, node=node)
        return frame.emit("scaler.new", node, tuple(args), kwargs, value)
    if objects.builds_optimizer(path, last):
        return objects.new_optimizer(frame, node, last, args, kwargs)
    if path.startswith("torch.nn.") and last[:1].isupper() and last not in WRAPPERS:
        return _layer(frame, node, last, args, kwargs)
    if path in _FRAMEWORK:
        asked = kwargs.get("mixed_precision", kwargs.get("precision", UNKNOWN))
        name = _FRAMEWORK[path]
        thing = Thing("", "framework", device=_runs_on(name, asked, kwargs))
        value = Value("framework", ref=name, thing=thing, const=asked.const, node=node)
        if name == "lightning":
            return frame.emit("external", node, (Value("external", ref=path), *args), kwargs, value)
        return frame.emit("framework.new", node, tuple(args), kwargs, value)
    if path in _ADOPTED or last in WRAPPERS:
        frame.emit("call", node, tuple(args), kwargs, constant(path))
        policy = kwargs.get("mixed_precision", kwargs.get("mp_policy", UNKNOWN))
        if policy.op == "reduce_policy" and args and policy.const in ("fp16", "bf16"):
            objects.run_in(args[0], policy.const)
        source = args[-1] if path == "builtins.filter" and args else args[0] if args else UNKNOWN
        return _copy_of(frame, source) if last in ("copy", "deepcopy") and source.thing else source
    if last in CLIPS:
        return frame.emit("clip_grad", node, tuple(args), kwargs, Value("tensor", tags=frozenset({"grad_norm"})))
    if last == "from_pretrained" and not path.startswith("peft."):  # which loads adapters, and keeps those in float32
        return objects.call_pretrained(frame, node, last, kwargs) or UNKNOWN
    if last in ("MixedPrecision", "MixedPrecisionPolicy"):
        named = _by_name(("param_dtype", "reduce_dtype"), args, kwargs)
        policy = Value(op="reduce_policy", const=named.get("param_dtype", UNKNOWN).const, node=node)
        return frame.emit("reduce_policy", node, tuple(args), named, policy)
    if path.startswith("torch."):
        return _torch_op(frame, node, path, args, kwargs)
    return _other(frame, node, path, args, kwargs)


def _runs_on(framework: str, precision: Value, kwargs: Kwargs) -> str:
    """The device type that a framework is told to run on; accelerate refuses fp16 on a CPU."""
    asked = kwargs.get("accelerator", UNKNOWN)
    if asked.sure and asked.const in ("gpu", "cuda", "cpu"):
        return "cpu" if asked.const == "cpu" else "cuda"
    return "cuda" if framework == "accelerate" and precision.const == "fp16" else ""


def _copy_of(frame: Frame, source: Value) -> Value:
    made = copy_of(source)
    if made.thing is not None and objects.is_module(frame, source):
        made.thing.kind = "module"
    return made


def _by_name(names: tuple[str, ...], args: Args, kwargs: Kwargs) -> dict[str, Value]:
    return {**dict(zip(names, args)), **kwargs}


def _torch_op(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    op = next(path.removeprefix(p) for p in _PREFIXES if path.startswith(p))
    op = ALIASES.get(op, op)
    if not args and kwargs:
        args = [kwargs[k] for k in ("input", "query", "self", "tensors") if k in kwargs]
    out = result(frame, op, node, tuple(args), kwargs)
    if op in CREATES:
        out = _create(op, out, args, kwargs)
    return frame.emit(op, node, tuple(args), kwargs, out)


def _rearranged(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    """einops changes the shape alone; its pattern and the sizes beside it are no tensors."""
    out = result(frame, "reshape", node, tuple(args[:1]), {})
    return frame.emit("reshape", node, tuple(args[:1]), {}, out)


def _create(op: str, out: Value, args: Args, kwargs: Kwargs) -> Value:
    if "dtype" in kwargs and not kwargs["dtype"].is_none:
        return out
    filled = {"full": 1, "tensor": 0, "as_tensor": 0}.get(op)
    if filled is None:
        return out
    content = args[filled] if len(args) > filled else kwargs.get("fill_value", kwargs.get("data", UNKNOWN))
    if content.kind in ("list", "tuple") and content.inputs:
        content = content.inputs[0]
    if content.kind == "tensor" and content.dtype:
        return replace(out, dtype=content.dtype)
    if isinstance(content.const, bool) or content.const is NOTHING:
        return replace(out, dtype="bool" if isinstance(content.const, bool) else "")
    return replace(out, dtype="int" if isinstance(content.const, int) else "fp32")


def _autocast(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    options = frame.options
    if len(args) == 1 and args[0].kind == "function":  # autocast used as a plain decorator call: autocast(fn)
        return args[0]
    region = region_of(path, args, kwargs, node, frame.module.filename, options.device, options.amp_dtype)
    value = Value("context", ref=region, line=node.lineno, node=node)
    return frame.emit("autocast", node, tuple(args), {**kwargs, "": constant(path)}, value)


def _layer(frame: Frame, node: ast.Call, last: str, args: Args, kwargs: Kwargs) -> Value:
    dtype = kwargs.get("dtype", UNKNOWN)
    thing = Thing("", "module")
    if dtype.kind == "dtype" and dtype.const in ("fp16", "bf16"):
        thing.dtype, thing.cast, thing.cast_line = dtype.const, node, node.lineno
    if last == "Parameter":
        source = args[0] if args else kwargs.get("data", UNKNOWN)
        value = Value("tensor", source.dtype, source.why, source.line, op="parameter", inputs=(source,), thing=thing, node=node)
        return frame.emit("parameter", node, tuple(args), kwargs, value)
    inputs = tuple(args)
    if last in CONTAINERS and len(args) == 1 and (args[0].kind in ("list", "tuple") or args[0].op == "comprehension"):
        inputs = args[0].inputs
    value = Value("module", ref=last, inputs=inputs, thing=thing, line=node.lineno, node=node)
    return frame.emit("layer", node, tuple(args), kwargs, value)


def _no_grad(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    if args and args[0].kind == "function":
        return args[0]
    return Value("context", tags=frozenset({"no_grad"}))


def _set_grad(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    if path.endswith("enable_grad") or (args and args[0].const is True):
        return Value("context", tags=frozenset({"enable_grad"}))
    if args and args[0].const is False:
        return Value("context", tags=frozenset({"no_grad"}))
    return Value("context")


def _nullcontext(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    return Value("context")


def _finfo(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    kind = args[0] if args else UNKNOWN
    return Value("finfo", const=kind.const if isinstance(kind.const, str) else "", inputs=tuple(args))


def _device(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    name = args[0].const if args else NOTHING
    is_sure = all(v.sure for v in args[:1])
    return Value("device", const=name.partition(":")[0] if isinstance(name, str) else NOTHING, sure=is_sure)


def _autograd_grad(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    outputs = args[0] if args else kwargs.get("outputs", UNKNOWN)
    tags = frozenset({"scaled", "autograd"}) if _is_scaled(outputs) else frozenset({"autograd"})
    value = Value("tensor", op="autograd.grad", inputs=tuple(args) or (outputs,), tags=tags, line=node.lineno, node=node)
    return frame.emit("autograd.grad", node, (outputs, *args[1:]), kwargs, value)


def _is_scaled(value: Value) -> bool:
    return "scaled" in value.tags or any("scaled" in v.tags for v in value.inputs if value.kind in ("list", "tuple"))


def _autograd_backward(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    loss = args[0] if args else kwargs.get("tensors", UNKNOWN)
    if _is_scaled(loss):
        loss = replace(loss, tags=loss.tags | {"scaled"})
    return frame.emit("backward", node, (loss,), kwargs)


def _arange(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    op = path.rpartition(".")[2]
    asked = kwargs.get("dtype")
    if asked is not None and not asked.is_none:
        dtype = asked.const if isinstance(asked.const, str) else ""
    else:
        dtype = "fp32" if any(isinstance(a.const, float) for a in args) else "int"
    why = f"dtype= at line {node.lineno}" if asked is not None else ""
    sure = asked is None or asked.sure
    out = tensor(dtype, why, node.lineno, sure=sure, op=op, inputs=tuple(args), node=node)
    return frame.emit(op, node, tuple(args), kwargs, out)


def _float(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    if args and isinstance(args[0].const, (str, int, float)):
        try:
            return constant(float(args[0].const) if path.endswith("float") else int(float(args[0].const)))
        except (ValueError, OverflowError):
            return Value("const")
    value = Value("const", inputs=tuple(args), op="item", dtype="int" if path.endswith("int") else "")
    if args and "grad" in args[0].tags:
        frame.emit("item", node, tuple(args), kwargs, value)
    return value


def _builtin(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    name = path.partition(".")[2]
    if name in ("range", "enumerate", "zip"):
        return Value("", op=name, inputs=tuple(args))
    if name == "dict":
        items = {**(args[0].ref if args and args[0].kind == "dict" else {}), **kwargs}
        return frame.emit("dict", node, (), items, Value("dict", ref=items, node=node))
    if name in ("len", "int", "round"):
        return Value("const", dtype="int")
    if name in ("abs", "min", "max", "pow") and args and all(a.is_number for a in args):
        folds: dict[str, Callable[..., object]] = {"abs": abs, "min": min, "max": max, "pow": pow}
        try:
            return constant(folds[name](*(a.const for a in args)))
        except (ArithmeticError, TypeError, ValueError):
            return Value("const")
    if name in ("abs", "sum", "pow") and args and args[0].kind == "tensor":
        return frame.emit(name, node, tuple(args), kwargs, result(frame, name, node, tuple(args), {}))
    if name == "sum" and args:  # Python's sum adds one by one
        item = args[0].inputs[0] if args[0].inputs else args[0]
        return Value(item.kind, item.dtype, item.why, item.line, item.sure, "python_sum", tuple(args), tags=args[0].tags)
    if name in ("print", "isinstance", "hasattr", "type", "str"):
        frame.emit("unknown_call", node, (UNKNOWN, *args), kwargs)
        return Value("const" if name == "str" else "")
    return Value("", op=f"call:{name}", inputs=tuple(args))


def _math(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    function = getattr(math, path.rpartition(".")[2], None)
    if function is not None and args and all(a.is_number for a in args):
        try:
            return constant(function(*(a.const for a in args)))
        except (ArithmeticError, TypeError, ValueError):
            return Value("const")
    return Value("const")


def _partial(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    return Value("partial", inputs=tuple(args), ref=dict(kwargs)) if args else UNKNOWN


def _parser(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    return Value("parser", thing=Thing("", "parser"), node=node)


def parser_method(frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    """argparse: what an option is if nobody gives it. The user may, so a default decides no branch."""
    thing = base.thing
    assert thing is not None
    if name == "add_argument":
        names = [a.const for a in args if isinstance(a.const, str)]
        flag = kwargs.get("dest", UNKNOWN).const
        long = next((n for n in names if n.startswith("--")), names[0] if names else "")
        dest = flag if isinstance(flag, str) else long.lstrip("-").replace("-", "_")
        default = kwargs.get("default", UNKNOWN)
        action = kwargs.get("action", UNKNOWN).const
        tags = {"switch"} if action in ("store_true", "store_false") else set()
        tags |= {"default_off"} if action == "store_true" else set()
        thing.attrs[dest] = as_default(default, dest, frozenset(tags))
        return UNKNOWN
    if name in ("parse_args", "parse_known_args"):
        options = Thing("", "options")
        options.attrs = {key: replace(v, thing=Thing(key)) for key, v in thing.attrs.items()}
        value = Value(thing=options)
        return value if name == "parse_args" else Value("tuple", inputs=(value, UNKNOWN))
    return base if name == "add_argument_group" else UNKNOWN


def _plain(op: str) -> Callable[..., Value]:
    def handler(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
        return frame.emit(op, node, tuple(args), kwargs)

    return handler


def _default_dtype(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    asked = args[0] if args else UNKNOWN
    known = isinstance(asked.const, str) and not frame.at.guards
    env = frame.env if frame.at.stack else frame.module.env
    env[DEFAULT_DTYPE] = Value("dtype", const=asked.const if known else "", line=node.lineno)
    return frame.emit("set_default_dtype", node, tuple(args), kwargs)


def _autocast_dtype(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    region = frame.at.region
    return Value("dtype", const=region.dtype if region else "half")


def _deepspeed(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    model, config = kwargs.get("model", UNKNOWN), kwargs.get("config", kwargs.get("config_params", UNKNOWN))
    sections = config.ref if config.kind == "dict" and isinstance(config.ref, dict) else {}
    runs_in, asked = "", node
    for kind in ("fp16", "bf16"):
        section = sections.get(kind, UNKNOWN)
        inner = section.ref.get("enabled") if isinstance(section.ref, dict) else None
        if inner is not None and inner.const is True and model.thing is not None:
            objects.run_in(model, kind)
            runs_in, asked = "" if "auto_cast" in section.ref else kind, inner.node or node
    inputs = (model,) if model.thing is not None else ()
    engine = Value("framework", ref="deepspeed", const=runs_in, thing=Thing("", "framework"), inputs=inputs, node=asked)
    frame.emit("framework.new", node, tuple(args), {**kwargs, "": constant("deepspeed")}, engine)
    return Value("tuple", inputs=(engine, Value("optimizer", thing=Thing("", "framework_optimizer")), UNKNOWN, UNKNOWN))


def _other(frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    if path.startswith("math."):
        return _math(frame, node, path, args, kwargs)
    if path.startswith("builtins."):
        return _builtin(frame, node, path, args, kwargs)
    frame.emit("external", node, (Value("external", ref=path), *args), kwargs)
    name = path.rpartition(".")[2]
    if objects.is_loss(args, kwargs):
        return objects.emit_loss(frame, node, args, kwargs)
    inputs = (*args, *kwargs.values())
    tags = frozenset(t for v in inputs for t in v.tags if t == "scaled")
    thing = frame.fresh(node)
    if name in TRAINING_ARGUMENTS:
        given = {k: kwargs[k].const for k in ("fp16", "bf16") if k in kwargs}
        is_open = NOTHING in given.values() or (not given and any(k.arg is None for k in node.keywords))
        kind = next((k for k, v in given.items() if v is True), CHOSEN_LATER if is_open else "")
        return Value("", op=f"call:{path}", inputs=inputs, ref=path, thing=thing, node=node, const=kind or NOTHING)
    if name in TRAINERS:
        asked = kwargs.get("args", args[1] if len(args) > 1 else UNKNOWN)
        model = kwargs.get("model", args[0] if args else UNKNOWN)
        if model.thing is not None and "peft_config" not in kwargs:
            model.thing.is_trained = True
            frame.emit("framework.train", node, (model,), kwargs)
        return Value("trainer", const=asked.const, inputs=(model,), thing=thing, node=asked.node or node)
    return Value("", op=f"call:{path}", inputs=inputs, ref=path, thing=thing, node=node, tags=tags)


def custom_fwd(decorator: ast.expr, path: str) -> Value:
    if isinstance(decorator, ast.Call) and any(k.arg == "cast_inputs" for k in decorator.keywords):
        return Value("context", ref=Region("", "fp32", False, decorator.lineno, path), tags=frozenset({"casts_inputs"}))
    return UNKNOWN


def kind_of_annotation(annotation: ast.expr | None) -> str:
    """`scaler`, `optimizer` or `tensor`, if a parameter's annotation says so."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        name = annotation.value
    elif isinstance(annotation, ast.Subscript) and dotted_name(annotation.value).rpartition(".")[2] == "Optional":
        return kind_of_annotation(annotation.slice)
    elif isinstance(annotation, ast.BinOp):
        return kind_of_annotation(annotation.left) or kind_of_annotation(annotation.right)
    else:
        name = dotted_name(annotation) if annotation is not None else ""
    last = name.rpartition(".")[2]
    if last in GRAD_SCALERS:
        return "scaler"
    if last == "Optimizer" or (name.rpartition(".")[0] in ("torch.optim", "optim") and last != "lr_scheduler"):
        return "optimizer"
    if name in ("torch.nn.Module", "nn.Module"):
        return "module"
    return "tensor" if last in ("Tensor", "FloatTensor", "LongTensor") else ""


_EXACT: dict[str, Callable[..., Value]] = {
    **dict.fromkeys(NO_GRAD, _no_grad),
    "torch.enable_grad": _set_grad, "torch.set_grad_enabled": _set_grad, "contextlib.nullcontext": _nullcontext,
    "torch.finfo": _finfo, "torch.device": _device, "torch.autograd.grad": _autograd_grad,
    "torch.autograd.backward": _autograd_backward, "torch.arange": _arange, "torch.range": _arange,
    "builtins.float": _float, "builtins.int": _float, "functools.partial": _partial, "argparse.ArgumentParser": _parser, 
    "torch.load": _plain("load"), "torch.save": _plain("save"), "pickle.dump": _plain("save"), "joblib.dump": _plain("save"),
    "torch.distributed.checkpoint.save": _plain("save"), "safetensors.torch.save_file": _plain("save"),
    "torch.set_default_dtype": _default_dtype,
    "torch.set_default_tensor_type": _default_dtype, "torch.clear_autocast_cache": _plain("clear_autocast_cache"),
    "torch.get_autocast_dtype": _autocast_dtype, "torch.get_autocast_gpu_dtype": _autocast_dtype,
    "torch.get_autocast_cpu_dtype": _autocast_dtype, "deepspeed.initialize": _deepspeed,
    "einops.rearrange": _rearranged, "einops.repeat": _rearranged,
}  # fmt: skip
