"""Names as the user wrote them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .tensors import is_readable

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """`module._orig_mod.blocks.0.fc` as `blocks.0.fc`: what torch.compile, DDP, FSDP and checkpointing put around is left out."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside the wrappers. `module` counts as a wrapper only on torch's own parallel classes."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "_checkpoint_wrapped_module", None)
        if inner is None and type(model).__module__.startswith(("torch.nn.parallel", "torch.distributed", "deepspeed")):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


@dataclasses.dataclass(frozen=True)
class Parts:
    """Everything of some models that has a name, by identity; parameters and buffers are held weakly."""

    modules: Mapping[int, str]
    parameters: Mapping[int, str]
    owners: Mapping[int, weakref.ref[Tensor]]
    buffers: Mapping[str, weakref.ref[Tensor]]
    compiled: frozenset[int]


def parts_of(models: Sequence[tuple[nn.Module, str]]) -> Parts:
    """Names of modules, parameters and buffers of models with their prefixes; what is shared keeps its first name."""
    modules: dict[int, str] = {}
    parameters: dict[int, str] = {}
    owners: dict[int, weakref.ref[Tensor]] = {}
    buffers: dict[str, weakref.ref[Tensor]] = {}
    compiled: set[int] = set()
    for model, prefix in models:
        inner = unwrapped(model)
        for name, module in inner.named_modules():
            modules.setdefault(id(module), prefix + plain_name(name) if name else root_name(model, prefix))
            if is_compiled(module):
                compiled.update(id(m) for m in module.modules())
        if is_compiled(model):
            compiled.update(id(m) for m in inner.modules())
        for name, p in inner.named_parameters():
            if p.is_floating_point() and not is_lazy(p):
                parameters.setdefault(id(p), prefix + plain_name(name))
                owners[id(p)] = weakref.ref(p)
        for name, buffer in inner.named_buffers():
            if is_readable(buffer):
                buffers[prefix + plain_name(name)] = weakref.ref(buffer)
    return Parts(modules, parameters, owners, buffers, frozenset(compiled))


def root_name(model: nn.Module, prefix: str = "") -> str:
    return prefix.rstrip(".") or type(unwrapped(model)).__name__
