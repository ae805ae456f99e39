"""Calls: followed into the project's own functions and classes, looked up for torch's, recorded as events."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from typing import Any

from . import attributes, expressions, managers, methods, statements, torchcalls
from .optimizers import new_optimizer, optimizer_base
from .source import ClassInfo, FunctionInfo, ModuleInfo, dotted
from .trace import MAX_DEPTH, Context, Event, Frame
from .values import NONE, UNKNOWN, Thing, Value, join

MODULE_NAME = re.compile(
    r"(?:^|_)(?:model|net|network|module|encoder|decoder|generator|discriminator|backbone|unet|vae|transformer|critic|actor|policy"
    r"|student|classifier|gen|disc|netg|netd|mlp|llm|lm|engine|ddp_model|resnet|vit|bert|gpt|g|d|proj|fc|head|layer|block|conv)s?\d*$",
    re.I,
)
LOSS_NAME = re.compile(r"criteri|loss(?!es_?list)(?:_?fn|_?func|_?function|_?fct)?\d*$|^lossf|objective", re.I)
SUPER = "super()"  # field with what a class gives to the __init__ of a base outside the project
_MODULE_METHODS = ("parameters", "named_parameters", "train", "eval", "state_dict", "load_state_dict", "zero_grad", "modules")
# what a cached call still has to tell: calls that change gradients, scalers and optimizers
_PROTOCOL = (
    "scaler.",
    "optimizer.",
    "framework.",
    "backward",
    "clip_grad",
    "grad_read",
    "grad_use",
    "autograd.grad",
    "module_call",
)


def call(frame: Frame, node: ast.Call) -> Value:
    args: list[Value] = []
    for argument in node.args:
        value = expressions.evaluate(frame, argument)
        if isinstance(argument, ast.Starred) and value.kind in ("tuple", "list"):
            args.extend(value.inputs)
        else:
            args.append(value)
    if isinstance(node.func, ast.Attribute):
        receiver = _receiver(frame, node.func)
    else:
        receiver = None
    kwargs = _keywords(frame, node)
    if receiver is not None and isinstance(node.func, ast.Attribute):
        return call_method(frame, node, receiver, node.func.attr, args, kwargs)
    return call_value(frame, node, expressions.evaluate(frame, node.func), args, kwargs)


def _receiver(frame: Frame, func: ast.Attribute) -> Value | None:
    if isinstance(func.value, ast.Call) and dotted(func.value.func) == "super" and frame.owner is not None:
        return Value("super", ref=frame.owner, inputs=(frame.env.get("self", UNKNOWN),))
    return expressions.evaluate(frame, func.value)


def _keywords(frame: Frame, node: ast.Call) -> dict[str, Value]:
    kwargs: dict[str, Value] = {}
    for keyword in node.keywords:
        value = expressions.evaluate(frame, keyword.value)
        if keyword.arg is not None:
            kwargs[keyword.arg] = value
        elif value.kind == "dict" and isinstance(value.ref, dict):
            kwargs.update({k: v for k, v in value.ref.items() if isinstance(k, str) and isinstance(v, Value)})
    return kwargs


def call_method(frame: Frame, node: ast.Call, base: Value, name: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if base.kind == "external":
        return torchcalls.call_external(frame, node, f"{base.ref}.{name}", args, kwargs)
    if base.kind == "project":
        return call_value(frame, node, attributes.attribute(frame, base, name, node.func), args, kwargs)
    if base.kind == "super":
        return _call_super(frame, node, base, name, args, kwargs)
    if base.kind == "instance":
        method = base.ref.find(name)
        field = base.ref.field_of(name)
        if field is not None and field.kind:
            return call_value(frame, node, field, args, kwargs)
        if method is not None:
            is_static = any(dotted(d) == "staticmethod" for d in getattr(method.node, "decorator_list", ()))
            return follow(frame, method, args if is_static else [base, *args], kwargs, node)
        if field is not None and not methods.knows(name):
            return call_value(frame, node, field, args, kwargs)
    if base.kind == "class" and isinstance(base.ref, ClassInfo):
        return _call_class_method(frame, node, base, name, args, kwargs)
    if base.kind == "dict" and isinstance(base.ref, dict) and name in ("get", "pop") and args:
        found = base.ref.get(args[0].const) if isinstance(args[0].const, str) else None
        return found if found is not None else UNKNOWN
    if base.kind == "list" and name in ("append", "extend") and args and isinstance(node.func, ast.Attribute):
        added = args[0].inputs if name == "extend" and args[0].kind in ("list", "tuple") else (args[0],)
        statements.assign(frame, node.func.value, replace(base, inputs=(*base.inputs, *added)))
        return NONE
    if base.kind in ("", "module") and not methods.knows(name):
        member = attributes.attribute(frame, base, name, node.func)
        return call_value(frame, node, member, args, kwargs)
    return methods.call_method(frame, node, base, name, args, kwargs)


def _call_super(frame: Frame, node: ast.Call, base: Value, name: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
    for parent in base.ref.parents:
        method = parent.find(name)
        if method is not None:
            return follow(frame, method, [base.inputs[0], *args], kwargs, node)
    if name == "__init__":
        if optimizer_base(base.ref):
            base.ref.fields[SUPER] = Value("dict", ref=kwargs, inputs=tuple(args))
        managers.remember_base(frame, base.ref, args, kwargs, node)
    return UNKNOWN


def _call_class_method(
    frame: Frame, node: ast.Call, base: Value, name: str, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    owner = base.ref
    if name == "apply" and owner.derives_from(("autograd.Function", ".Function")):
        forward = owner.find("forward")
        out = Value("tensor", op="custom_function", inputs=tuple(args), node=node)
        frame.emit("custom_function", node, (base, *args), kwargs, out)
        if forward is not None:
            follow(frame, forward, [UNKNOWN, *args], kwargs, node)
        return out
    method = owner.find(name)
    if method is None:
        made = methods.call_pretrained(frame, node, name, kwargs)
        return replace(made, kind="instance", ref=owner) if made is not None else UNKNOWN
    decorators = {dotted(d) for d in getattr(method.node, "decorator_list", ())}
    return follow(frame, method, [base, *args] if "classmethod" in decorators else args, kwargs, node)


def call_value(frame: Frame, node: ast.Call, target: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if target.kind == "external":
        return torchcalls.call_external(frame, node, target.ref, args, kwargs)
    if target.op == "class.apply" and isinstance(target.ref, ClassInfo):
        return _call_class_method(frame, node, Value("class", ref=target.ref), "apply", args, kwargs)
    if target.kind == "function" and isinstance(target.ref, FunctionInfo):
        return follow(frame, target.ref, [*target.inputs, *args], kwargs, node)
    if target.kind == "class" and isinstance(target.ref, ClassInfo):
        return construct(frame, target.ref, args, kwargs, node)
    if target.kind == "instance":
        return _call_instance(frame, node, target, args, kwargs)
    if target.kind == "partial":
        return call_value(frame, node, target.inputs[0], [*target.inputs[1:], *args], {**target.ref, **kwargs})
    if target.kind == "module":
        return methods.call_layer(frame, node, target, args, kwargs)
    return _call_unknown(frame, node, target, args, kwargs)


def _call_instance(frame: Frame, node: ast.Call, target: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
    method = target.ref.find("forward") if target.ref.is_module else None
    method = method or target.ref.find("__call__") or target.ref.find("forward")
    if method is None:
        return _call_unknown(frame, node, target, args, kwargs)
    if LOSS_NAME.search(target.ref.name) or LOSS_NAME.search(dotted(node.func).rpartition(".")[2]):
        frame.emit("loss_call", node, tuple(args), kwargs)
    if not target.ref.is_module:
        return follow(frame, method, [target, *args], kwargs, node)
    value = follow(frame, method, [target, *args], kwargs, node)
    made = methods.module_call(frame, node, target, args, kwargs)
    if value.kind == "tensor" and value.dtype:
        return replace(value, inputs=(*value.inputs, made), tags=value.tags | made.tags)
    if value.kind in ("tuple", "dict", "list"):
        return value
    return replace(made, inputs=(*made.inputs, value))


# a callable given as a parameter and called under autocast is a model, unless its name says what else it does
_NO_MODEL = re.compile(
    r"token|collat|^get|load|log|print|metric|sched|augment|transform|time|sampl|callback|hook|norm|fn$|func", re.I
)
_ANY_MODEL = re.compile(r"^(?:model|net|network|module|self)$", re.I)


def guess_class(frame: Frame, target: Value, name: str) -> Value | None:
    """The file's own model behind a parameter such as `model`: a class that the file defines but does not instantiate.

    Its name must match the parameter's, or it must be the only such class and the parameter be called `model` or `net`.
    """
    if target.thing is None or target.kind:
        return None
    if "class" in target.thing.attrs:
        return target.thing.attrs["class"]
    loose = [c for c in frame.module.classes if c.is_module and "forward" in c.methods and c.name not in frame.module.called]
    found = [
        c for c in loose if len(name) > 2 and (name.lower().replace("_", "") in c.name.lower() or c.name.lower() in name.lower())
    ]
    if not found and len(loose) == 1 and _ANY_MODEL.match(name):
        found = loose
    if len(found) != 1 or frame.owner is found[0]:
        return None
    value = Value("instance", ref=found[0], thing=target.thing)
    target.thing.attrs["class"] = value
    build(frame, found[0], value, [], {}, found[0].node)
    return value


@cache
def _is_model_name(name: str) -> bool:
    return MODULE_NAME.search(name) is not None


def is_module_like(frame: Frame, path: str) -> bool:
    """Whether something is a model, as far as its name and its use in the file tell."""
    if not path:
        return False
    return _is_model_name(path.rpartition(".")[2]) or frame.module.has_method_call(path, _MODULE_METHODS)


def _call_unknown(frame: Frame, node: ast.Call, target: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
    path = dotted(node.func) or (target.thing.name if target.thing else "")
    last = path.rpartition(".")[2]
    if LOSS_NAME.search(last):
        out = Value("tensor", op="loss", inputs=(*args, *kwargs.values()), line=node.lineno, node=node)
        return frame.emit("loss", node, tuple(args), kwargs, out)
    in_module = frame.owner is not None and frame.owner.is_module and path.startswith("self.")
    is_given = bool(frame.at.region and isinstance(node.func, ast.Name) and args and not _NO_MODEL.search(last))
    guessed = guess_class(frame, target, last)
    if guessed is not None:
        return _call_instance(frame, node, guessed, args, kwargs)
    if is_module_like(frame, path) or (in_module and target.thing is not None and "." not in path[5:]) or is_given:
        return methods.module_call(frame, node, target, args, kwargs)
    frame.emit("unknown_call", node, (target, *args), kwargs)
    inputs = (*args, *kwargs.values())
    tags = frozenset(t for v in inputs for t in v.tags if t == "scaled")
    return Value(op=f"call:{last}", inputs=inputs, thing=frame.fresh(node), node=node, tags=tags)


def construct(frame: Frame, info: ClassInfo, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
    """An instance of a class of the project; its __init__ is run the first time."""
    value = Value("instance", ref=info, thing=Thing("", kind="module" if info.is_module else ""), node=node)
    build(frame, info, value, args, kwargs, node)
    base = optimizer_base(info)
    if base and isinstance(node, ast.Call) and info.find("step") is None:
        passed = info.fields.get(SUPER, Value("dict", ref=kwargs, inputs=tuple(args)))
        return new_optimizer(frame, node, base, list(passed.inputs) or args, passed.ref)
    for item in (*args, *kwargs.values()):
        if item.kind in ("scaler", "optimizer"):
            frame.emit(f"{item.kind}.passed", node, (item,))
    return value


def build(frame: Frame, info: ClassInfo, value: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> None:
    if info.is_built:
        return
    info.is_built = True
    init = info.find("__init__")
    if init is not None:
        follow(frame, init, [value, *args], kwargs, node)
    for statement in info.node.body:  # dataclass fields
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.target.id in kwargs:
            info.fields.setdefault(statement.target.id, kwargs[statement.target.id])


def resolve_lazy(frame: Frame, value: Value, name: str) -> Value:
    """The definition behind a name imported from another file of the project."""
    filename, attribute, path = value.ref
    target = frame.run.project.module(filename)
    if target is None or target is frame.module:
        return Value("external", ref=path)
    load(frame, target)
    found = target.env.get(attribute) if attribute else Value("project", ref=target)
    if found is not None and found.kind == "lazy":
        found = resolve_lazy(frame, found, attribute) if found is not value else None
    resolved = found if found is not None else Value("external", ref=path)
    frame.env[name] = resolved
    return resolved


def load(frame: Frame, module: ModuleInfo) -> None:
    """Runs a module's body once, so that its functions, classes and constants are known."""
    if module.is_loaded:
        return
    module.is_loaded = True
    inner = Frame(frame.run, module, type(frame.trace)(f"<import {module.name}>", module), module.env)
    statements.run_block(inner, module.tree.body)


def signature(values: list[Value], kwargs: dict[str, Value]) -> tuple[object, ...]:
    def key(v: Value) -> tuple[object, ...]:
        const = v.const if isinstance(v.const, (int, float, str, bool, type(None))) else None
        return (v.kind, v.dtype, v.op, const, v.thing.serial if v.thing else 0, v.tags, id(v.ref) if v.ref else 0)

    return (*map(key, values), *((k, key(v)) for k, v in kwargs.items()))


def follow(frame: Frame, info: FunctionInfo, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
    """Runs a function of the project with these arguments; its events go into the caller's trace."""
    if info in frame.at.stack or len(frame.at.stack) >= MAX_DEPTH:
        return UNKNOWN
    memory = (info, frame.at.regions, frame.at.has_grad, bool(frame.at.loops), signature(args, kwargs))
    known = frame.run.cache.get(memory)
    if known is not None:
        value, events = known
        for event in events:
            frame.trace.events.append(replace(event, at=_moved(event.at, frame.at)))
        return value
    start = len(frame.trace.events)
    before = frame.at
    at = frame.inside(stack=(*frame.at.stack, info))
    value = run_function(frame, info, args, kwargs, at)
    kept = tuple(_rebased(e, before) for e in frame.trace.events[start:] if e.op.startswith(_PROTOCOL))
    frame.run.cache[memory] = (value, kept)
    return value


def _rebased(event: Event, base: Context) -> Event:
    at = event.at
    return replace(event, at=replace(at, guards=at.guards[len(base.guards) :], loops=at.loops[len(base.loops) :]))


def _moved(inner: Context, outer: Context) -> Context:
    return replace(inner, guards=outer.guards + inner.guards, loops=outer.loops + inner.loops)


def run_function(
    frame: Frame, info: FunctionInfo, args: list[Value], kwargs: dict[str, Value], at: Context, is_entry: bool = False
) -> Value:
    info.runs += 1
    inner = Frame(frame.run, info.module, frame.trace, {}, at, info.closure, info.owner)
    bind(inner, info, args, kwargs, is_entry)
    if isinstance(info.node, ast.Lambda):
        return expressions.evaluate(inner, info.node.body)
    for decorator in info.node.decorator_list:
        context = torchcalls.decorator_context(inner, decorator)
        statements.enter(inner, context)
        if "casts_inputs" in context.tags:
            for name, value in inner.env.items():
                if value.is_half:
                    inner.env[name] = replace(value, dtype="fp32", why=f"cast by custom_fwd at line {decorator.lineno}")
    statements.run_block(inner, info.node.body)
    entered = managers.made_context(inner, info, at)
    if entered is not None:
        return entered
    if not inner.returns:
        return NONE
    value = inner.returns[0]
    for other in inner.returns[1:]:
        value = join(value, other)
    return value


def bind(frame: Frame, info: FunctionInfo, args: list[Value], kwargs: dict[str, Value], is_entry: bool) -> None:
    spec: Any = info.node.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
    defaults = dict(zip(reversed(names), reversed(spec.defaults)))
    for keyword, default in zip(spec.kwonlyargs, spec.kw_defaults):
        if default is not None:
            defaults[keyword.arg] = default
    given = {**dict(zip(names, args)), **kwargs}
    for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
        name = argument.arg
        if name in given:
            frame.env[name] = given[name]
        else:
            frame.env[name] = _default(frame, name, defaults.get(name), argument.annotation, is_entry)
    if spec.vararg:
        frame.env[spec.vararg.arg] = Value("list", inputs=tuple(args[len(names) :]))
    if spec.kwarg:
        named = {a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
        rest = {key: value for key, value in kwargs.items() if key not in named}
        frame.env[spec.kwarg.arg] = Value("dict", ref=rest) if rest else Value(thing=Thing(spec.kwarg.arg))


def _default(frame: Frame, name: str, default: ast.expr | None, annotation: ast.expr | None, is_entry: bool) -> Value:
    known = expressions.evaluate(frame, default) if default is not None else UNKNOWN
    if default is not None and not is_entry:
        return known  # the caller did not give it: the default holds
    if known.is_number or known.kind == "dtype":
        return known
    kind = torchcalls.kind_of_annotation(frame, annotation)
    tags = frozenset({"default_off"}) if known.const is False else frozenset()
    return Value(kind, thing=Thing(name, kind=kind), tags=tags)
