"""Names as the user wrote them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.numbers import plain_name
from .tensors import is_readable

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside the wrappers. `module` counts as a wrapper only on torch's own parallel classes."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def held_by(module: nn.Module, name: str) -> Any:
    """An attribute or a part of its own, or None. A `__getattr__` of the program's is not asked: it may do anything."""
    attributes = object.__getattribute__(module, "__dict__")
    parts = attributes.get("_modules", {})
    return attributes[name] if name in attributes else parts[name] if name in parts else None  # noqa: SIM401 - a ScriptModule's


def _inside(model: nn.Module) -> nn.Module | None:
    inner = next((m for name in _WRAPPED if (m := held_by(model, name)) is not None), None)
    if inner is None and type(model).__module__.startswith(("torch.nn.parallel", "torch.distributed", "deepspeed")):
        inner = getattr(model, "module", None)  # of FSDP a property
    return inner if isinstance(inner, nn.Module) else None


def called_part(model: nn.Module) -> nn.Module:
    """The module whose calls can be seen from outside: the user's own, or the wrapper of torch.compile around it."""
    while held_by(model, "_orig_mod") is None and (inner := _inside(model)) is not None:
        model = inner
    return model


def is_compiled(module: nn.Module) -> bool:
    return held_by(module, "_orig_mod") is not None or getattr(module, "_compiled_call_impl", None) is not None


class Held:
    """A parameter or buffer, as long as its module has it.

    Not a weak reference to the tensor itself: torch.utils.swap_tensors, and with it `model.to`, refuses one that has any.
    """

    __slots__ = ("_key", "_kind", "_module", "_name")

    def __init__(self, module: weakref.ref[nn.Module], kind: str, name: str, tensor: Tensor) -> None:
        self._module, self._kind, self._name, self._key = module, kind, name, id(tensor)

    def __call__(self) -> Tensor | None:
        module = self._module()
        held = {} if module is None else getattr(module, self._kind)
        tensor: Tensor | None = held[self._name] if self._name in held else None  # noqa: SIM401 - a ScriptModule's has no `get`
        return tensor if id(tensor) == self._key else None


@dataclasses.dataclass(frozen=True)
class Parts:
    """Everything of some models that has a name, by identity; nothing is kept alive."""

    modules: Mapping[int, str]
    parameters: Mapping[int, str]
    owners: Mapping[int, Held]
    buffers: Mapping[str, Held]
    compiled: frozenset[int]


def parts_of(models: Sequence[tuple[nn.Module, str]]) -> Parts:
    """Names of modules, parameters and buffers of models with their prefixes; what is shared keeps its first name."""
    modules: dict[int, str] = {}
    parameters: dict[int, str] = {}
    owners: dict[int, Held] = {}
    buffers: dict[str, Held] = {}
    compiled: set[int] = set()
    met: set[int] = set()
    for model, prefix in models:
        inner = unwrap(model)
        for name, module in inner.named_modules():
            modules.setdefault(id(module), prefix + plain_name(name) if name else root_name(model, prefix))
            if is_compiled(module):
                compiled.update(id(m) for m in module.modules())
            start, reference = prefix + (f"{plain_name(name)}." if plain_name(name) else ""), weakref.ref(module)
            for key, p in module._parameters.items():
                if p is not None and id(p) not in owners and p.is_floating_point() and not is_lazy(p):
                    parameters[id(p)] = start + key
                    owners[id(p)] = Held(reference, "_parameters", key, p)
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in met and is_readable(buffer):
                    met.add(id(buffer))
                    buffers[start + key] = Held(reference, "_buffers", key, buffer)
        if is_compiled(model):
            compiled.update(id(m) for m in inner.modules())
    return Parts(modules, parameters, owners, buffers, frozenset(compiled))


def signature_of(models: Sequence[tuple[nn.Module, str]]) -> list[Any]:
    """All that `parts_of` goes by: while it is the same, so are the parts. A tenth of the time that finding them takes."""
    stack = [unwrap(model) for model, _ in models]
    found: list[Any] = [*map(id, stack), *(prefix for _, prefix in models), *(is_compiled(model) for model, _ in models)]
    met: set[int] = set()
    while stack:
        module = stack.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        parameters, parts = list(module._parameters.values()), list(module._modules.values())
        found += [id(module), getattr(module, "_compiled_call_impl", None) is not None, *module._modules.keys()]
        found += [*map(id, parts), *map(id, parameters), *map(type, parameters), *module._parameters.keys()]
        found += [(name, id(buffer), buffer is not None and is_readable(buffer)) for name, buffer in module._buffers.items()]
        stack += [part for part in parts if part is not None]
    return found


def root_name(model: nn.Module, prefix: str = "") -> str:
    return prefix.rstrip(".") or type(unwrap(model)).__name__
