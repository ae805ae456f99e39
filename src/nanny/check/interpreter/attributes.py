"""Attributes and items of values: `t.dtype`, `torch.float16`, and what a loop or an unpacking binds."""

from __future__ import annotations

import ast

from ...core.formats import FORMATS
from ...core.ops import DTYPES, TENSOR_TYPES
from . import imports
from .source import OwnClass
from .trace import Frame, Walk
from .uses import LONGEST, dotted_name
from .values import NOTHING, UNKNOWN, Thing, Value, constant, copy_of, join, replace, tensor

SUBMODULES = ("call:children", "call:modules", "call:named_children", "call:named_modules")


_OBJECTS = ("tensor", "module", "optimizer", "scaler", "instance")
_APART = ("module", "optimizer", "scaler", "instance")
MOST_APART = 8


def external_attribute(path: str) -> Value:
    head, _, last = path.rpartition(".")
    if head == "torch" and last in DTYPES:
        return Value("dtype", const=DTYPES[last])
    if head in ("torch", "torch.cuda") and last in TENSOR_TYPES:
        return Value("dtype", const=TENSOR_TYPES[last], ref=path)
    if head in ("math", "numpy", "np", "torch") and last in ("inf", "pi", "e"):
        return constant({"inf": float("inf"), "pi": 3.141592653589793, "e": 2.718281828459045}[last])
    return Value("external", ref=path)


def finfo_attribute(base: Value, name: str) -> Value:
    known = FORMATS.get(base.const)
    numbers = {
        "min": lambda f: -f.max, "max": lambda f: f.max, "eps": lambda f: f.eps, "tiny": lambda f: f.min_normal,
        "smallest_normal": lambda f: f.min_normal,
    }  # fmt: skip
    if known is None or name not in numbers:
        return Value("const", tags=frozenset({"finfo"}))
    return Value("const", const=numbers[name](known), tags=frozenset({"finfo", f"finfo:{base.const}"}), ref=base)


def tensor_attribute(frame: Frame, base: Value, name: str, node: ast.AST) -> Value:
    if name in ("T", "mT", "H", "data", "real"):
        return replace(base, op="view", inputs=(base,), node=node)
    if name in ("device", "is_cuda"):
        return Value("device" if name == "device" else "")
    if name in ("values", "indices"):
        return replace(base, op="getitem", inputs=(base,)) if name == "values" else tensor("int")
    if base.op == "module_call" and name == "loss":
        return Value("tensor", op="model_loss", inputs=(base,), line=base.line)
    if base.op in ("module_call", "part"):
        return replace(base, op="part", inputs=(base,), node=node)
    return UNKNOWN


def field_of(instance: Value, name: str) -> Value | None:
    """What an instance of a class of the project has under a name: its own, else its class's."""
    own = instance.thing.attrs.get(name) if instance.thing is not None else None
    return own if own is not None else instance.ref.field_of(name)


def thing_attribute(frame: Frame, base: Value, name: str, node: ast.AST) -> Value:
    thing = base.thing
    assert thing is not None
    if base.op == "key" and name == "values":  # of a column of a table
        return base
    found = thing.attrs.get(name)
    if found is None and isinstance(base.ref, OwnClass):
        found = base.ref.field_of(name)
    if found is None:
        path = dotted_name(node)
        known = frame.lookup(path) if path else None
        full = f"{thing.name}.{name}" if thing.name and thing.name.count(".") < LONGEST else name
        found = known or Value(thing=Thing(full))
        thing.attrs[name] = found
    return found


def _one_of(source: Value) -> Value | None:
    """One of the values that a comprehension makes; each that is taken out is an object of its own."""
    if source.op != "comprehension" or not source.inputs or source.inputs[0].kind not in _OBJECTS:
        return None
    item = source.inputs[0]
    if item.kind == "tensor" or item.thing is None:
        return replace(item)
    return copy_of(item)


def objects_in(source: Value) -> tuple[Value, ...]:
    """The objects that a loop takes one after the other, each met by itself: callbacks, optimizers, the parts of a checkpoint."""
    items = source.inputs if source.kind in ("list", "tuple") and 1 < len(source.inputs) <= MOST_APART else ()
    held = [item.inputs if item.kind == "tuple" else (item,) for item in items]
    return items if all(any(v.kind in _APART for v in parts) for parts in held) else ()


def part_of(frame: Frame, value: Value, position: int, target: ast.AST) -> Value:
    """One item of a value that is unpacked."""
    if value.kind in ("tuple", "list") and position < len(value.inputs):
        return value.inputs[position]
    if value.kind == "tensor":
        return replace(value, op="part" if value.op in ("module_call", "part") else "getitem", inputs=(value,))
    shared = _one_of(value)
    if shared is not None:
        return shared
    dtype = "int" if value.dtype == "int" else ""
    return Value(thing=Thing(dotted_name(target)), op="part", inputs=(value,), dtype=dtype, tags=value.tags & {"scaled"})


def child_of(module: Value) -> Value:
    """Any one of the modules inside a module."""
    owner = module.thing
    assert owner is not None
    thing = Thing(owner.name, "module", owner.dtype, device=owner.device, owner=owner)
    return Value(op="element", inputs=(module,), thing=thing)


def element_of(frame: Frame, source: Value, target: ast.AST) -> Value:
    """What a loop over `source` binds."""
    if source.op == "range":
        return Value("", dtype="int", op="loop_index")
    if source.op == "enumerate" and source.inputs:
        inner = element_of(
            frame, source.inputs[0], target.elts[1] if isinstance(target, ast.Tuple) and len(target.elts) == 2 else target
        )
        return Value("tuple", inputs=(Value("", dtype="int", op="loop_index"), inner))
    if source.op == "zip":
        names = target.elts if isinstance(target, ast.Tuple) else []
        return Value("tuple", inputs=tuple(
            element_of(frame, s, names[i] if i < len(names) else target) for i, s in enumerate(source.inputs)
        ))  # fmt: skip
    if source.op in ("parameters", "named_parameters"):
        thing = source.thing
        param = Value("tensor", dtype=thing.dtype if thing else "", op="param", inputs=(source,), thing=Thing("p"), sure=True)
        return Value("tuple", inputs=(UNKNOWN, param)) if source.op == "named_parameters" else param
    if (source.kind in ("list", "tuple") and source.inputs) or (
        source.kind == "module" and source.ref == "ModuleList" and source.inputs
    ):
        value = source.inputs[0]
        for other in source.inputs[1:]:
            value = join(value, other)
        return value
    if source.kind == "tensor" and source.op != "module_call":
        return replace(source, op="getitem", inputs=(source,))
    shared = _one_of(source)
    if shared is not None:
        return shared
    if source.op in SUBMODULES and source.inputs and source.inputs[0].thing is not None:
        child = child_of(source.inputs[0])
        return Value("tuple", inputs=(UNKNOWN, child)) if source.op.startswith("call:named") else child
    return Value(thing=Thing(dotted_name(target)), op="element", inputs=(source,), tags=source.tags & {"scaled", "grad"})


def attribute(walk: Walk, frame: Frame, base: Value, name: str, node: ast.AST) -> Value:
    if base.kind == "external":
        return external_attribute(f"{base.ref}.{name}")
    if base.kind == "project":
        found = base.ref.env.get(name)
        if found is not None and found.kind == "lazy":
            found = imports.resolve_lazy(walk, frame, found, name)
        return found if found is not None else Value(thing=Thing(name))
    if base.kind == "finfo":
        return finfo_attribute(base, name)
    if base.kind == "instance":
        return _instance_attribute(walk, frame, base, name, node)
    if base.thing is not None and base.thing.kind == "options" and name in base.thing.attrs:
        return base.thing.attrs[name]
    if base.kind == "dict" and isinstance(base.ref, dict) and name in base.ref:  # settings: `cfg.model.dtype`
        return base.ref[name]
    if base.kind == "class" and isinstance(base.ref, OwnClass):
        if name == "__name__":
            return constant(base.ref.name)
        method = base.ref.find(name)
        found = base.ref.field_of(name)
        return (
            Value("function", ref=method, tags=frozenset({"unbound"}))
            if method
            else found or Value(op=f"class.{name}", ref=base.ref)
        )
    if name == "grad" and base.kind in ("tensor", "", "instance", "module"):
        value = Value("tensor", op="grad", inputs=(base,), line=getattr(node, "lineno", 0), node=node, tags=frozenset({"grad"}))
        return frame.emit("grad_read", node, (base,), out=value)
    if name == "dtype":
        kind = base.dtype or (base.thing.dtype if base.thing else "")
        return Value("dtype", const=kind, op="dtype", inputs=(base,), sure=base.sure)
    if name in ("shape", "ndim"):
        return Value("const" if name == "ndim" else "", dtype="int")
    if name == "type" and base.kind == "device":
        return replace(constant(base.const), sure=base.sure) if base.const is not NOTHING else UNKNOWN
    if base.kind == "tensor":
        return tensor_attribute(frame, base, name, node)
    if base.thing is not None:
        return thing_attribute(frame, base, name, node)
    path = dotted_name(node)
    return frame.unknown(path) if path else Value(thing=Thing(name))


def _instance_attribute(walk: Walk, frame: Frame, base: Value, name: str, node: ast.AST) -> Value:
    owner = base.ref
    method = owner.find(name)
    found = field_of(base, name)
    if found is not None:
        return found
    if method is not None:
        if method.decorators & {"property", "cached_property", "functools.cached_property"}:
            return walk.follow(frame, method, [base], {}, node)
        return Value("function", ref=method, inputs=(base,))
    value = Value(thing=Thing(dotted_name(node) or f"self.{name}"))
    if base.thing is not None:
        base.thing.attrs[name] = value
    return value


def comprehension_of(item: Value) -> Value:
    return Value(
        "", item.dtype, item.why, item.line, op="comprehension", inputs=(item,), tags=item.tags, thing=item.thing
    )  # fmt: skip
