"""Names as the user wrote them, and the tensors inside whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_MOST_LEAVES = 64


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


def float_leaves(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors in tuples, lists, dicts, dataclasses and whatever behaves like a mapping (ModelOutput)."""
    found = 0
    stack = [value]
    while stack and found < _MOST_LEAVES:
        item = stack.pop()
        if isinstance(item, Tensor):
            if item.is_floating_point() and item.layout == torch.strided and item.device.type != "meta" and item.numel():
                found += 1
                yield item
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (tuple, list)):
            stack.extend(reversed(item))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            stack.extend(getattr(item, f.name) for f in reversed(dataclasses.fields(item)))


def short_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
