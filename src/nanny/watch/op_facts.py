"""What is known of an operation before it runs: its name, what it reads and writes, whether it computes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..core.ops import CONSTANTS, EFFECTS, OTHER_GRADIENT, bare_op
from .tensors import tensors_in

# Run again in any program without doing anything else than computing. A custom operation may communicate or draw numbers.
SAFE_NAMESPACES = frozenset({"aten", "prims", "torchvision", "quantized"})
_PURE_TAGS = frozenset(tag for name in ("pointwise", "reduction") if (tag := getattr(torch.Tag, name, None)) is not None)
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"})
# The schemas of these do not say that running statistics (arguments 3 and 4) are written.
_WRITES_SILENTLY = dict.fromkeys(("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"), (3, 4))
_WORKSPACES = frozenset(["workspace", "reserve", "reserveSpace", "reservedSpace"])  # as schemas call them
# What a kernel raises when it has no implementation for a type or a shape.
KERNEL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


def is_out_of_memory(error: BaseException) -> bool:
    known = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, known) or "allocate memory" in str(error) or "not enough memory" in str(error)


def bare_name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def long_name(func: Any) -> str:
    """`torch.ops.aten.addmm`, as the log has it."""
    return f"torch.ops.{func.namespace}.{func.overloadpacket.__name__}"


@cache
def is_view_op(func: Any) -> bool:
    """It only gives another look at memory that an argument holds."""
    returns = func._schema.returns
    if func._schema.name in ("aten::_unsafe_view", "aten::detach"):  # the schema of the first does not say so
        return True
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_collective(func: Any) -> bool:
    return func.namespace in _COLLECTIVES


@cache
def is_pure(func: Any) -> bool:
    """It computes, and does nothing else: it may be run again. An operator of the program's own is, if its tags say so."""
    if func.namespace in SAFE_NAMESPACES:
        return bare_name(func) not in EFFECTS
    return bool(_PURE_TAGS.intersection(func.tags))


def other_gradient(func: Any, args: Sequence[Any]) -> bool:
    """Will torch compute its gradient by another formula while a dispatch mode is on?"""
    places = _other_gradient_places(func)
    if not places or not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in tensors_in([args[i] for i in places if i < len(args)]))


@cache
def _other_gradient_places(func: Any) -> tuple[int, ...]:
    return OTHER_GRADIENT.get(bare_op(bare_name(func)), ()) if func.namespace == "aten" else ()


def puts_constants(func: Any) -> bool:
    return bare_name(func) in CONSTANTS


def puts_nonfinite(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Writes NaN, an infinity or a number near the end of the type on purpose: a mark or a mask."""
    if not puts_constants(func):
        return False
    end = torch.finfo(dtype).max / 2
    return any(isinstance(v, (int, float)) and (v != v or abs(v) >= end) for v in (*args, *kwargs.values()))


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into."""
    places = _written_places(func)
    if not places:
        return []
    return tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in places])


@cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    schema = func._schema
    silent = _WRITES_SILENTLY.get(schema.name, ())
    arguments = [(i, a.name, a.alias_info) for i, a in enumerate(schema.arguments)]
    return tuple((i, name) for i, name, alias in arguments if i in silent or (alias is not None and alias.is_write))


def workspace_of(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Memory that a forward kernel laid out for its backward and for its own type (recurrent layers of oneDNN and cuDNN).

    With another type a kernel reads and writes beyond it, and the process dies.
    """
    for i, name in _workspace_places(func):
        value = args[i] if i < len(args) else kwargs.get(name)
        if isinstance(value, Tensor) and value.numel() and is_bytes(value):
            return value
    return None


@cache
def _workspace_places(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple((i, a.name) for i, a in enumerate(func._schema.arguments) if a.name in _WORKSPACES)


def is_bytes(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8
