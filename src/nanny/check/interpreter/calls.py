"""Calls: of a value, of a method, of the project's classes and layers; what calls back into the project is followed."""

from __future__ import annotations

import ast
from typing import Any

from ...core.ops import LAYERS
from . import attributes, contexts, objects, settings_files, torch_calls, trainers
from .dtypes import result
from .regions import AUTOCAST
from .source import OwnClass, OwnFunction
from .torch_names import FRAMEWORK_REGIONS, MODULE_METHODS
from .trace import MAX_DEPTH, Frame, Walk
from .uses import dotted_name
from .values import NONE, UNKNOWN, Args, Kwargs, Thing, Value, constant, replace


def call_method(walk: Walk, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    if base.is_none and isinstance(node.func, ast.Attribute):  # None has no methods: by now it is something else
        base = Value(thing=Thing(dotted_name(node.func.value)))
    if base.kind == "external":
        return call_external(walk, frame, node, f"{base.ref}.{name}", args, kwargs)
    if base.kind == "parser":
        return torch_calls.parser_method(frame, node, base, name, args, kwargs)
    if base.kind == "project":
        return call_value(walk, frame, node, attributes.attribute(walk, frame, base, name, node.func), args, kwargs)
    if base.kind == "super":
        return _call_super(walk, frame, node, base, name, args, kwargs)
    if base.kind == "instance":
        method = base.ref.find(name)
        field = attributes.field_of(base, name)
        if field is not None and field.kind:
            return call_value(walk, frame, node, field, args, kwargs)
        if method is not None:
            is_static = any(dotted_name(d) == "staticmethod" for d in getattr(method.node, "decorator_list", ()))
            return walk.follow(frame, method, args if is_static else [base, *args], kwargs, node)
        if field is not None and not objects.knows(name):
            return call_value(walk, frame, node, field, args, kwargs)
    if base.kind == "class" and isinstance(base.ref, OwnClass):
        return _call_class_method(walk, frame, node, base, name, args, kwargs)
    if base.kind == "dict" and isinstance(base.ref, dict) and name in ("get", "pop") and args:
        found = base.ref.get(args[0].const) if isinstance(args[0].const, str) else None
        return found if found is not None else UNKNOWN
    if base.kind == "dict" and isinstance(base.ref, dict) and name in ("items", "values") and not base.ref.keys() & {"*", "**"}:
        pairs = [(constant(key), item) for key, item in base.ref.items()]
        return Value("list", inputs=tuple(Value("tuple", inputs=pair) if name == "items" else pair[1] for pair in pairs))
    if base.kind == "dict" and isinstance(base.ref, dict) and name == "update" and not frame.at.guards:
        given = args[0].ref if args and isinstance(args[0].ref, dict) else {}
        if args and (not given or "*" in given or "**" in given):  # which keys it changes is not known
            base.ref.clear()
        base.ref.update({**{key: item for key, item in given.items() if key != "*"}, **kwargs})
        return NONE
    if not base.kind and name in ("read_text", "read_bytes", "open"):  # of a path: the text of the file that it names
        frame.emit("unknown_call", node, (base, *args), kwargs)
        return Value(op=f"call:{name}", inputs=(base, *args), node=node)
    if base.kind == "list" and name in ("append", "extend") and args and isinstance(node.func, ast.Attribute):
        added = args[0].inputs if name == "extend" and args[0].kind in ("list", "tuple") else (args[0],)
        walk.assign(frame, node.func.value, replace(base, inputs=(*base.inputs, *added)))
        return NONE
    if base.kind in ("", "module") and not objects.knows(name):
        member = attributes.attribute(walk, frame, base, name, node.func)
        return call_value(walk, frame, node, member, args, kwargs)
    return _known_method(walk, frame, node, base, name, args, kwargs)


def _call_super(walk: Walk, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    for parent in base.ref.parents:
        method = parent.find(name)
        if method is not None:
            return walk.follow(frame, method, [base.inputs[0], *args], kwargs, node)
    this = base.inputs[0].thing
    if name == "__init__" and this is not None:
        if objects.optimizer_base(base.ref):
            this.attrs[objects.SUPER] = Value("dict", ref=kwargs, inputs=tuple(args))
        remember_base(walk, frame, base.ref, this, args, kwargs, node)
    return UNKNOWN


def remember_base(walk: Walk, frame: Frame, owner: OwnClass, this: Thing, args: Args, kwargs: Kwargs, node: ast.Call) -> None:
    """`super().__init__("cuda", dtype=...)` in a class derived from autocast."""
    path = next((base for base in owner.bases if base in AUTOCAST), "")
    if path:
        this.attrs[contexts.INNER] = call_external(walk, frame, node, path, args, kwargs)


def _call_class_method(walk: Walk, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    owner = base.ref
    if name == "apply" and owner.derives_from(("Function",)):
        forward = owner.find("forward")
        out = Value("tensor", op="custom_function", inputs=tuple(args), node=node)
        frame.emit("custom_function", node, (base, *args), kwargs, out)
        if forward is not None:
            walk.follow(frame, forward, [UNKNOWN, *args], kwargs, node)
        return out
    method = owner.find(name)
    if method is None:
        made = objects.call_pretrained(frame, node, name, kwargs)
        return replace(made, kind="instance", ref=owner) if made is not None else UNKNOWN
    return walk.follow(frame, method, [base, *args] if "classmethod" in method.decorators else args, kwargs, node)


def call_value(walk: Walk, frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs) -> Value:
    if target.kind == "external":
        return call_external(walk, frame, node, target.ref, args, kwargs)
    if target.op == "class.apply" and isinstance(target.ref, OwnClass):
        return _call_class_method(walk, frame, node, Value("class", ref=target.ref), "apply", args, kwargs)
    if target.kind == "function" and isinstance(target.ref, OwnFunction):
        return walk.follow(frame, target.ref, [*target.inputs, *args], kwargs, node)
    if target.kind == "class" and isinstance(target.ref, OwnClass):
        return walk.construct(frame, target.ref, args, kwargs, node)
    if target.kind == "instance":
        return _call_instance(walk, frame, node, target, args, kwargs)
    if target.kind == "partial":
        return call_value(walk, frame, node, target.inputs[0], [*target.inputs[1:], *args], {**target.ref, **kwargs})
    if target.kind == "module":
        return call_layer(walk, frame, node, target, args, kwargs)
    if target.kind == "framework" and target.inputs:  # a DeepSpeed engine runs its model
        frame.emit("framework.call", node, (target, *args), kwargs)
        return call_value(walk, frame, node, target.inputs[0], args, kwargs)
    return _call_unknown(walk, frame, node, target, args, kwargs)


def _call_instance(walk: Walk, frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs) -> Value:
    method = target.ref.find("forward") if target.ref.is_module else None
    method = method or target.ref.find("__call__") or target.ref.find("forward")
    if method is None:
        return _call_unknown(walk, frame, node, target, args, kwargs)
    region, saved = target.thing.region if target.thing is not None else None, frame.at
    if region is not None:
        frame.at = frame.inside(regions=(*saved.regions, region))
    value = walk.follow(frame, method, [target, *args], kwargs, node)
    frame.at = saved
    if region is not None:
        return objects.module_call(frame, node, target, args, kwargs)
    if target.ref.is_module:
        made = objects.given_back(frame, node, target, args, kwargs)
        if value.kind == "tensor" and (value.dtype or "island" in value.tags):
            tags = made.tags if value.is_half else frozenset[str]()
            made = replace(made, dtype=value.dtype, why=value.why, sure=value.sure, tags=tags)
        objects.emit_call(frame, node, target, args, kwargs, made)
        if method in frame.at.stack or len(frame.at.stack) >= MAX_DEPTH:  # its forward was not read, but could be
            return replace(made, dtype="", why="")
        if value.kind == "tensor" and value.dtype:
            value = replace(value, inputs=(*value.inputs, made))
        elif value.kind not in ("tuple", "dict", "list"):
            value = replace(made, inputs=(*made.inputs, value))
    if len(args) + len(kwargs) > 1:
        frame.emit("loss_call", node, tuple(args), kwargs, value)
    return value


def _accepts(function: OwnFunction, given: int, kwargs: Kwargs) -> bool:
    """Whether a method can be called with so many arguments, and with these by name."""
    spec: Any = function.node.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args)][1:]
    needed = len(names) - len(spec.defaults)
    known = {*names, *(a.arg for a in spec.kwonlyargs)}
    if not spec.kwarg and not known.issuperset(kwargs):
        return False
    return given + len(kwargs) >= needed and (given <= len(names) or spec.vararg is not None)


def guess_class(walk: Walk, frame: Frame, target: Value, args: Args, kwargs: Kwargs) -> Value | None:
    """The file's own model behind a parameter: the only class whose forward takes such a call and that is instantiated
    nowhere in the file."""
    if target.thing is None or target.kind:
        return None
    if "class" in target.thing.attrs:
        return target.thing.attrs["class"]
    loose = [c for c in frame.module.classes if c.is_module and "forward" in c.methods and c.name not in frame.module.uses.called]
    found = [c for c in loose if _accepts(c.methods["forward"], len(args), kwargs)]
    if len(found) != 1 or frame.owner is found[0]:
        return None
    value = Value("instance", ref=found[0], thing=target.thing)
    target.thing.attrs["class"] = value
    walk.build(frame, found[0], value, [], {}, found[0].node)
    return value


def _call_unknown(walk: Walk, frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs) -> Value:
    path = dotted_name(node.func) or (target.thing.name if target.thing else "")
    uses = frame.module.uses
    is_part = frame.owner is not None and frame.owner.is_module and path.startswith("self.") and "." not in path[5:]
    is_model = uses.is_module(path) or (is_part and target.thing is not None)
    if not is_model and objects.is_loss(args, kwargs):
        return objects.emit_loss(frame, node, args, kwargs)
    is_piece = any(uses.is_module(path[:at]) for at in range(len(path)) if path[at] == ".")  # `model.head(x)`
    is_held = path.startswith("self.") and "." not in path[5:] and target.thing is not None and not target.op
    is_given = (isinstance(node.func, ast.Name) or is_piece or is_held) and bool(args)
    guessed = guess_class(walk, frame, target, args, kwargs) if is_model or (is_given and frame.at.region) else None
    if guessed is not None:
        return _call_instance(walk, frame, node, guessed, args, kwargs)
    if is_model or (is_given and frame.at.region):
        return objects.module_call(frame, node, target, args, kwargs)
    frame.emit("unknown_call", node, (target, *args), kwargs)
    inputs = (*args, *kwargs.values())
    tags = frozenset(t for v in inputs for t in v.tags if t == "scaled")
    return Value(op=f"call:{path.rpartition('.')[2]}", inputs=inputs, thing=frame.fresh(node), node=node, tags=tags)


def call_layer(walk: Walk, frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs) -> Value:
    """A call of a torch.nn layer, or of a Sequential of them."""
    if target.ref == "Sequential" and target.inputs and args:
        value = args[0]
        for layer in target.inputs:
            value = call_value(walk, frame, node, layer, [value], {})
        objects.emit_call(frame, node, target, args, kwargs, value)
        return replace(value, inputs=(*value.inputs, target))
    op = LAYERS.get(target.ref) if isinstance(target.ref, str) else None
    if op is None:
        return objects.module_call(frame, node, target, args, kwargs)
    out = result(frame, op, node, tuple(args), {})
    half = objects.layer_half(frame, target)
    if op == "embedding" and frame.at.region is not None and not half:  # a lookup keeps the dtype of the weights
        out = replace(out, dtype="fp32", why=f"{target.ref} keeps float32 weights", line=node.lineno)
    if half and frame.at.region is None and op not in ("cross_entropy", "mse_loss"):
        tags = out.tags - {"autocast"}
        out = replace(out, dtype=half, why=f"{target.ref} holds {half} weights", line=node.lineno, tags=tags)
    objects.emit_call(frame, node, target, args, kwargs, out)
    frame.emit(op, node, tuple(args), {**kwargs, "": target}, out)
    if op in ("lstm", "gru", "multi_head_attention"):
        return Value("tuple", inputs=(out, replace(out, op="part")))
    return out


def _known_method(walk: Walk, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    if name == "backward":
        return objects.backward(frame, node, base, args, kwargs)
    if name == "manual_backward":
        return trainers.manual_backward(frame, node, base, args, kwargs)
    if name == "clip_gradients" and base.kind == "instance" and base.ref.derives_from(("LightningModule",)):
        return frame.emit("clip_grad", node, (Value(op="parameters", thing=base.thing), *args), kwargs)
    if base.kind == "trainer":
        return trainers.run_trainer(walk, frame, node, base, name)
    if base.kind == "framework" and base.ref == "lightning":
        return trainers.run_lightning(walk, frame, node, base, name, args, kwargs)
    if objects.is_framework(frame, base):
        return objects.framework_method(frame, node, base, name, args, kwargs)
    if objects.is_scaler(frame, base, name):
        return objects.scaler_method(frame, node, base, name, args, kwargs)
    if name == "enter_context" and args:
        contexts.enter(walk, frame, args[0])
        return contexts.enter_by_hand(frame, args[0])
    if base.kind == "context" and name == "__enter__":
        contexts.enter(walk, frame, base)
        return contexts.enter_by_hand(frame, base)
    if base.kind == "context" and name == "__exit__":
        return contexts.leave_by_hand(frame, base)
    if name in ("register_hook", "register_post_accumulate_grad_hook") and args and isinstance(args[0].ref, OwnFunction):
        return _gradient_hook(walk, frame, node, base, name, args[0])
    if (
        name == "step" and objects.is_optimizer(frame, base) and args and args[0].kind == "function"
    ):  # LBFGS calls the closure itself
        walk.follow(frame, args[0].ref, list(args[0].inputs), {}, node)
    if name in ("step", "zero_grad", "state_dict", "load_state_dict") and objects.is_optimizer(frame, base):
        if base.thing is not None:
            base.thing.kind = base.thing.kind or "optimizer"
        return frame.emit(f"optimizer.{name}", node, (base, *args), kwargs, Value(op=f"optimizer.{name}", inputs=(base,)))
    if name in FRAMEWORK_REGIONS and base.kind in ("", "instance"):
        return objects.framework_region(frame, node)
    if name == "from_pretrained":
        return objects.call_pretrained(frame, node, name, kwargs) or UNKNOWN
    if name in ("to", "type") or name in objects.CASTS:
        return objects.cast(frame, node, base, name, args, kwargs)
    if objects.is_module(frame, base) and (name in MODULE_METHODS or name in ("cuda", "cpu")):
        return _module_method(walk, frame, node, base, name, args, kwargs)
    return objects.tensor_method(frame, node, base, name, args, kwargs)


def _gradient_hook(walk: Walk, frame: Frame, node: ast.Call, base: Value, name: str, hook: Value) -> Value:
    """Runs a hook on the gradient it will get: it fires inside backward, so the gradient is scaled if the loss is."""
    gradient = Value("tensor", op="grad", inputs=(base,), tags=frozenset({"grad", "hook"}), line=node.lineno, node=node)
    given = gradient if name == "register_hook" else Value("tensor", op="param", thing=Thing("p"))
    walk.follow(frame, hook.ref, [*hook.inputs, given], {}, node)
    return UNKNOWN


def _module_method(walk: Walk, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    thing = base.thing
    if thing is not None:
        if name == "requires_grad_":
            thing.is_fixed = bool(args) and args[0].const is False
            thing.is_frozen = thing.is_frozen or thing.is_fixed
        elif name == "eval":
            thing.is_frozen = True
        elif name == "train" and not (args and args[0].const is False):
            thing.is_set_to_train = True
        elif name in ("cuda", "cpu"):
            objects.put_on(frame, base, name)
    if name in ("parameters", "named_parameters"):
        return Value(op=name, inputs=(base,), thing=thing, node=node)
    if name == "clip_grad_norm_":
        return frame.emit("clip_grad", node, (Value(op="parameters", thing=thing), *args), kwargs)
    if name == "register_buffer" and len(args) > 1:
        if base.kind == "instance" and thing is not None and isinstance(args[0].const, str):
            thing.attrs[args[0].const] = replace(args[1], tags=args[1].tags | {"buffer"})
        return frame.emit("register_buffer", node, (base, *args), kwargs)
    if name == "state_dict":
        return Value(op="module.state_dict", inputs=(base,))
    frame.emit(f"module.{name}", node, (base, *args), kwargs)
    if name == "apply" and thing is not None and args and isinstance(args[0].ref, OwnFunction):
        walk.follow(frame, args[0].ref, [*args[0].inputs, attributes.child_of(base)], {}, node)
    return (
        base if name in ("train", "eval", "requires_grad_", "cuda", "cpu", "apply") else Value(op=f"call:{name}", inputs=(base,))
    )


def call_external(walk: Walk, frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    """A call of something that is not the project's; the three that call back into it are followed here."""
    if path in settings_files.LOADERS:
        loaded = settings_files.loaded_value(walk, frame, args)
        if loaded is not None:
            return loaded
    if path == "hydra.main":
        return settings_files.composed(walk, frame, kwargs) or UNKNOWN
    if path in settings_files.WRAPPERS:
        held = settings_files.wrapped(args, kwargs)
        if held is not None:
            return held
    for name in ("config", "config_params", "deepspeed"):  # a path where a dict may stand
        if name in kwargs and isinstance(kwargs[name].const, str) and (name == "deepspeed" or path.startswith("deepspeed.")):
            kwargs = {**kwargs, name: settings_files.named_file(walk, frame, kwargs[name].const) or kwargs[name]}
    if path in settings_files.BY_FILE:
        kwargs = {**kwargs, **settings_files.from_near_file(walk, frame, path)}
    if path.rpartition(".")[2] == "LightningCLI" and args and isinstance(args[0].ref, OwnClass):
        return trainers.run_cli(walk, frame, node, path, args, kwargs)
    if path == "builtins.map":
        return _call_map(walk, frame, node, args)
    if path == "builtins.getattr":
        return _getattr(walk, frame, node, args)
    if path == "torch.utils.checkpoint.checkpoint":
        return _checkpoint(walk, frame, node, args, kwargs)
    return torch_calls.call_external(frame, node, path, args, kwargs)


def _call_map(walk: Walk, frame: Frame, node: ast.Call, args: list[Value]) -> Value:
    """`map(f, xs)`: f is called once, on an element of xs."""
    if len(args) < 2 or len(node.args) != len(args):
        return Value("", op="call:map", inputs=tuple(args))
    saved = frame.at
    frame.at = frame.inside(loops=(*saved.loops, node))
    made = ast.copy_location(ast.Call(func=node.args[0], args=node.args[1:], keywords=[]), node)
    elements = [attributes.element_of(frame, source, name) for source, name in zip(args[1:], node.args[1:])]
    item = call_value(walk, frame, made, args[0], elements, {})
    frame.at = saved
    return attributes.comprehension_of(item)


def _getattr(walk: Walk, frame: Frame, node: ast.Call, args: list[Value]) -> Value:
    if len(args) >= 2 and isinstance(args[1].const, str):
        found = attributes.attribute(walk, frame, args[0], args[1].const, node)
        return found if args[1].sure else replace(found, sure=False)
    if args and args[0].kind == "external" and args[0].ref == "torch":
        return Value("dtype", const="half" if len(args) > 2 else "")
    return Value(thing=Thing(""))


def _checkpoint(walk: Walk, frame: Frame, node: ast.Call, args: Args, kwargs: Kwargs) -> Value:
    if not args:
        return UNKNOWN
    inner = {k: v for k, v in kwargs.items() if k not in ("use_reentrant", "preserve_rng_state", "context_fn", "debug")}
    return call_value(walk, frame, node, args[0], args[1:], inner)
