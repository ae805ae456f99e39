"""Which precision each operation runs in: the device's own autocast, the CUDA lists on a CPU, or a plain cast of the model.

On a CPU, `policy="cuda"` replaces the CPU's autocast kernels by ones that follow the CUDA lists (`optable`) while the
context is open; they sit where autocast sits, so composed functions, losses and backward behave as on a GPU. What a GPU's
kernels compute inside one operation is not imitated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import optable
from ..records import NannyError
from .shadow import CarriedShadows

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def precision(policy: str, dtype: torch.dtype, device: str) -> AbstractContextManager[Any]:
    """The autocast context of a policy on a device."""
    if policy == "full":
        return nullcontext()
    if policy == "cuda" and device == "cpu":
        return _cuda_lists_on_cpu(dtype)
    if policy in ("cpu", "cuda") and policy != device:
        raise NannyError(f"policy {policy!r} cannot be imitated on {device}; move the model to the CPU, or leave --policy out")
    return torch.autocast(device, dtype, cache_enabled=False)


@contextmanager
def _cuda_lists_on_cpu(dtype: torch.dtype) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced, which is meant
            for name in sorted(optable.CUDA_LOWER | optable.CUDA_FLOAT32 | optable.CUDA_WIDEST | optable.CPU_FLOAT32):
                wanted = optable.autocast_list(name, "cuda")
                if wanted != optable.autocast_list(name, "cpu"):
                    for overload in _overloads(name.replace(".", "_")):
                        library.impl(overload, _kernel(overload, wanted, dtype), "AutocastCPU")
        with torch.autocast("cpu", dtype, cache_enabled=False):
            yield
    finally:
        library._destroy()


def _overloads(name: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return
    for overload in packet.overloads():
        function = getattr(packet, overload)
        if not function._schema.is_mutable and "Dimname" not in overload:
            yield function


def _kernel(function: Any, wanted: str, low: torch.dtype) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            dtype = {"lower": low, "float32": torch.float32, "widest": _widest(args)}.get(wanted)
            return function(*_cast(args, dtype), **_cast(kwargs, dtype)) if dtype else function(*args, **kwargs)

    return run


def _widest(value: Any) -> torch.dtype | None:
    """fp32 if any operand has it; nothing to do otherwise."""
    items = value if isinstance(value, (tuple, list)) else [value]
    tensors = [t for item in items for t in (item if isinstance(item, (tuple, list)) else [item])]
    return torch.float32 if any(isinstance(t, Tensor) and t.dtype == torch.float32 for t in tensors) else None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        eligible = value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible else value
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    return {key: _cast(item, dtype) for key, item in value.items()} if isinstance(value, dict) else value


@contextmanager
def kept_wide(model: nn.Module, sites: Collection[str], device: str) -> Iterator[None]:
    """These modules run outside autocast, on inputs cast to FP32."""
    handles: list[Any] = []
    opened: list[AbstractContextManager[Any]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        opened.append(torch.autocast(device, enabled=False))
        opened[-1].__enter__()
        return _cast(args, torch.float32), _cast(kwargs, torch.float32)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    try:
        for site in sites:
            module = model.get_submodule(site)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def cast_model(model: nn.Module, dtype: torch.dtype, shadows: CarriedShadows | None) -> Iterator[None]:
    """The model's wide floating-point weights and buffers in `dtype`, each with its former value as reference; then as before."""
    owners = [p for p in model.parameters() if p.dtype in (torch.float32, torch.float64)]
    buffers = [(m, n, b) for m in model.modules() for n, b in m._buffers.items() if b is not None and b.is_floating_point()]
    before = [p.data for p in owners]
    try:
        for parameter, wide in zip(owners, before):
            parameter.data = wide.to(dtype)
            if shadows is not None:
                shadows.adopt(parameter, wide)
        for module, name, buffer in buffers:
            low = module._buffers[name] = buffer.to(dtype)
            if shadows is not None:
                shadows.adopt(low, buffer)
        yield
    finally:
        for parameter, wide in zip(owners, before):
            parameter.grad = None
            parameter.data = wide
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def cast_inputs(value: Any, dtype: torch.dtype, shadows: CarriedShadows | None) -> Any:
    if isinstance(value, Tensor):
        if value.dtype not in (torch.float32, torch.float64):
            return value
        low = value.to(dtype)
        if shadows is not None:
            shadows.adopt(low, value)
        return low
    if isinstance(value, (tuple, list)):
        return type(value)(cast_inputs(item, dtype, shadows) for item in value)
    if isinstance(value, dict):
        return {key: cast_inputs(item, dtype, shadows) for key, item in value.items()}
    return value


@contextmanager
def without_onednn() -> Iterator[None]:
    """Torch's own kernels: oneDNN refuses some layers (LSTM) in bf16 and fp16 on processors without those types."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
