"""Which precision each operation runs in: the device's own autocast, the CUDA lists on a CPU, or a plain cast of the model.

On a CPU, `policy="cuda"` replaces the CPU's autocast kernels by ones that follow the CUDA lists (`optable`) while the
context is open; they sit where autocast sits, so composed functions, losses and backward behave as on a GPU. What a GPU's
kernels compute inside one operation is not imitated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..core import ops as optable
from ..core.finding import NannyError
from ..watch.tensors import map_leaves
from ..watch.twins import Twins
from .settings import DiffSettings

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def precision(settings: DiffSettings) -> AbstractContextManager[Any]:
    """The autocast context of a policy on a device."""
    policy, dtype, device = settings.policy, settings.dtype, settings.device
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
    return map_floats(value, lambda t: t if t.dtype == torch.float64 else t.to(dtype))


def map_floats(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with every floating-point tensor changed."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf)


@contextmanager
def apply_policy(settings: DiffSettings, shadows: Twins | None) -> Iterator[Any]:
    """The model as its policy wants it before autocast, and the batch that it then takes; at the end all is as before."""
    with ExitStack() as stack:
        batch = settings.batch
        if settings.policy == "full":
            stack.enter_context(_cast_model(settings, shadows))
            batch = _cast_inputs(batch, settings.dtype, shadows)
        for handle in _wide_hooks(settings):
            stack.callback(handle.remove)
        yield batch


def _wide_hooks(settings: DiffSettings) -> Iterator[Any]:
    """The modules of `wide` run outside autocast, on inputs cast to FP32; "" is the model's own code, without its layers: they
    open autocast again, and what they return is cast to FP32.

    Under the policy "full" their weights are wide already (`_cast_model`), and what they return is cast back for the layers
    that follow.
    """
    model, device, low = settings.model, settings.device, settings.dtype if settings.policy == "full" else None
    for site in settings.wide:
        outside = torch.autocast(device, enabled=False)
        yield from _hooks([model.get_submodule(site)], outside, torch.float32, low if site else None)
        if not site:
            again = nullcontext() if low else torch.autocast(device, settings.dtype, cache_enabled=False)
            yield from _hooks([m for m in model.modules() if m is not model], again, low, torch.float32)


def _hooks(
    modules: Sequence[nn.Module], region: AbstractContextManager[Any], into: torch.dtype | None, out_of: torch.dtype | None
) -> list[Any]:
    """Opens a region around each outermost call of these modules, on inputs of one type and with outputs of another."""
    depth = 0

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        if depth > 1:
            return None
        region.__enter__()
        return (_cast(args, into), _cast(kwargs, into)) if into else None

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        nonlocal depth
        depth -= 1
        if depth:
            return None
        region.__exit__(None, None, None)
        return _cast(output, out_of) if out_of else None

    return [
        handle
        for module in modules
        for handle in (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        )
    ]


@contextmanager
def _cast_model(settings: DiffSettings, shadows: Twins | None) -> Iterator[None]:
    """The model's wide floating-point weights and buffers in the low format, with their former values as reference.

    Those of the modules in `wide` stay; "" stands for the model's own, without its layers'.
    """
    model, dtype = settings.model, settings.dtype
    kept = [m for site in settings.wide for m in (model.get_submodule(site).modules() if site else [model])]
    stay = {id(p) for m in kept for p in m._parameters.values()}
    owners = [p for p in model.parameters() if p.dtype in (torch.float32, torch.float64) and id(p) not in stay]
    buffers = [
        (m, n, b)
        for m in model.modules()
        for n, b in m._buffers.items()
        if b is not None and b.is_floating_point() and m not in kept
    ]
    before = [p.data for p in owners]
    try:
        for parameter, value in zip(owners, before):
            parameter.data = value.to(dtype)
            if shadows is not None:
                shadows.adopt(parameter, value)
        for module, name, buffer in buffers:
            low = module._buffers[name] = buffer.to(dtype)
            if shadows is not None:
                shadows.adopt(low, buffer)
        yield
    finally:
        for parameter, value in zip(owners, before):
            parameter.grad = None
            parameter.data = value
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _cast_inputs(value: Any, dtype: torch.dtype, shadows: Twins | None) -> Any:
    def low_copy(wide: Tensor) -> Tensor:
        if wide.dtype not in (torch.float32, torch.float64):
            return wide
        low = wide.to(dtype)
        if shadows is not None:
            shadows.adopt(low, wide)
        return low

    return map_floats(value, low_copy)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Torch's own kernels: oneDNN refuses some layers (LSTM) in bf16 and fp16 on processors without those types."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
