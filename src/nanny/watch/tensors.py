"""Tensors of a program: found in whatever holds them, asked what they are, and computed with outside the program.

Three questions are asked of a tensor, and they differ:

    is_plain      strided values on a device and no class with a dispatch of its own: an operation may be run again on it
    has_storage   plain, and its memory is not empty: something can be kept beside its storage
    is_readable   floating-point and not empty, at the edge of a module: here a class such as DTensor may answer for itself
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

LOW = frozenset(
    {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_MOST_LEAVES = 64
_MANY = 100_000
_STRIDED = torch.strided
_PLAIN_DISPATCH = Tensor.__torch_dispatch__
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_GRAD: Any = Tensor.grad
_IS_LEAF: Any = Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_HOLD_NOTHING = frozenset(
    {int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def tensors_in(value: Any) -> list[Tensor]:
    """In order, in tuples, lists, dataclasses and whatever behaves like a mapping (ModelOutput)."""
    if type(value) is tuple and len(value) == 1:  # what most modules are called with
        value = value[0]
    kind = type(value)
    if kind is Tensor:
        return [value]
    found: list[Tensor] = []
    if kind is tuple or kind is list:  # what most operations are called with
        for item in value:
            kind = type(item)
            if kind in _PLAIN_TYPES:
                found.append(item)
            elif kind not in _HOLD_NOTHING:
                break
        else:
            return found
        found = []
    stack, looked, seen = [value], 0, set()
    while stack:
        item = stack.pop()
        kind = type(item)  # what it is, not what it says it is: a mock of a tensor is none
        looked += 1
        if looked > _MANY and kind not in _HOLD_NOTHING and not issubclass(kind, Tensor):  # it may hold itself
            if id(item) in seen:
                continue
            seen.add(id(item))
        if issubclass(kind, Tensor):
            found.append(item)
        elif kind in _HOLD_NOTHING:
            continue
        elif issubclass(kind, (tuple, list, dict)):
            stack.extend(reversed(_items(item)))
        elif issubclass(kind, Mapping):
            stack.extend(reversed(list(item.values())))
        elif dataclasses.is_dataclass(kind):
            stack.extend(getattr(item, f.name) for f in reversed(dataclasses.fields(item)))
    return found


def tensors_besides(tensors: Iterable[Tensor], known: Iterable[Tensor]) -> list[Tensor]:
    """Those that are not among the known ones; a fused optimizer hands over thousands."""
    ids = set(map(id, known))
    return [t for t in tensors if id(t) not in ids]


def _items(container: Any) -> list[Any]:
    """As Python keeps them: a class of the program's may load, count or draw when it is asked itself."""
    if isinstance(container, dict):
        return list(dict.values(container))
    return list((list if isinstance(container, list) else tuple).__iter__(container))


def float_leaves(value: Any) -> Iterator[Tensor]:
    """The first readable tensors in what a module takes or returns."""
    return islice(filter(is_readable, tensors_in(value)), _MOST_LEAVES)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with every leaf changed; a container of another class is a leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_leaves(item, change) for item in value])
    if kind is dict:
        return {key: map_leaves(item, change) for key, item in value.items()}
    return change(value)


def is_plain(tensor: Tensor) -> bool:
    if type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH or tensor.layout is not _STRIDED:
        return False
    return not (tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor())


def has_storage(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.untyped_storage().nbytes() > 0


def is_readable(tensor: Tensor) -> bool:
    """Not a stand-in of a tracer, a batch of vmap, a lazy, nested or masked one (which warns of what it cannot do)."""
    if type(tensor) in _PLAIN_TYPES and not torch._C._len_torch_function_stack():
        return _is_readable(tensor)
    with torch._C.DisableTorchFunction():  # a subclass, or a mode, is not to see that we ask
        return _is_readable(tensor)


def answers_itself(tensor: Tensor) -> bool:
    """Of a class with a dispatch of its own that is not torch's: it may count, remember or compute what is asked."""
    kind = type(tensor)
    return kind.__torch_dispatch__ is not _PLAIN_DISPATCH and kind.__module__.partition(".")[0] != "torch"


def bits_of(tensor: Tensor) -> Tensor:
    """Its values as whole numbers: what is the same bit by bit is equal, NaN too."""
    values = tensor.detach().contiguous()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(values.element_size(), torch.int8))


def is_finite(tensor: Tensor) -> bool:
    """Neither NaN nor an infinity in it: one pass, one wait."""
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _is_readable(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.layout is not _STRIDED or tensor.is_meta or tensor.is_nested:
        return False
    if type(tensor) in _PLAIN_TYPES:
        return tensor.numel() > 0 and not _is_functorch_wrapped(tensor) and tensor.untyped_storage().nbytes() > 0
    if is_lazy(tensor) or type(tensor).__name__ in ("FakeTensor", "MaskedTensor") or _is_functorch_wrapped(tensor):
        return False
    if tensor.numel() == 0 or answers_itself(tensor):
        return False
    if type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH:
        return True
    return tensor.untyped_storage().nbytes() > 0  # weights that are gathered when needed have none in between


def is_low(dtype: torch.dtype) -> bool:
    return dtype in LOW


def widen(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """The type of a reference: `wide` for 16 bits and less; with float64, single precision becomes double."""
    if dtype in LOW:
        return wide
    return WIDER.get(dtype, dtype) if wide == torch.float64 else dtype


@functools.lru_cache(maxsize=64)
def short_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def gradient_of(parameter: Tensor) -> Tensor | None:
    """As torch keeps it: a class of the program's may compute something when it is asked itself."""
    if not parameter.is_leaf and not parameter.retains_grad:  # torch warns of the question
        return None
    found: Tensor | None = _GRAD.__get__(parameter)
    return found


def with_gradient(parameters: list[Tensor]) -> list[Tensor]:
    """Those that have one."""
    if not all(map(_IS_LEAF, parameters)):
        return [p for p in parameters if gradient_of(p) is not None]
    return [p for p, grad in zip(parameters, map(_GRAD.__get__, parameters)) if grad is not None]


def kept_by(node: Any, name: str) -> Any:
    """What an operation keeps for backward as `_saved_...`. Not what hooks of the program's own have packed: they may give it
    back only once, or compute it again."""
    raw = getattr(node, f"_raw{name}", None)  # one of torch's, or some of them; numbers are kept as they are
    packed = [getattr(one, "unpack_hook", None) for one in (raw if isinstance(raw, (tuple, list)) else (raw,))]
    if any(hook is not None for hook in packed):
        return None
    try:
        return getattr(node, name, None)
    except RuntimeError:  # overwritten in place since: backward will say so itself
        return None


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def in_custom_forward() -> bool:
    """In the forward of an `autograd.Function`: gradients are off in there, and what it gives has one."""
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None


_mode_of = torch._C._get_dispatch_mode
_functorch_level = getattr(torch._C._functorch, "maybe_current_level", None)
RECORDING_MODES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)


def is_recorded() -> bool:
    """Does torch's compiler, or jit.trace, write down what this code does, to do it later without Python?"""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def being_traced() -> bool:
    """Is somebody recording the model's operations (jit, export, vmap), or trying shapes? Ours must not get into his graph."""
    if is_recorded() or _is_trying_shapes():
        return True
    for key in RECORDING_MODES:
        if _mode_of(key) is not None:
            return True
    return _functorch_level is not None and _functorch_level() is not None


def _is_trying_shapes() -> bool:
    """The first step of a pipeline runs each stage on memory that nobody has written, to learn the shapes of its outputs."""
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    trial = getattr(stage, "_forward_metadata_inference", None)  # private; tests/distributed fails if it goes
    frame = None if trial is None else sys._getframe(1)
    while frame is not None and frame.f_code is not trial.__code__:  # type: ignore[union-attr]
        frame = frame.f_back
    return frame is not None


# Tensors whose values differ from their memory: inside a dispatch handler torch computes with the memory.
_LAZY_VALUES = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


class outside_program:
    """Outside the modes, subclasses, graph and autocast of the program, which neither see nor change what is computed here.

    For plain tensors. Entered once per operation, so it is not made of torch's own context managers: those take ten times as
    long.
    """

    __slots__ = ("_autocast", "_dispatch", "_functions", "_grad", "_lazy")

    def __enter__(self) -> None:
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._dispatch = torch._C._DisableTorchDispatch()  # from its making on
        self._autocast = torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else None
        if self._autocast is not None:
            self._autocast.__enter__()
        self._lazy = [key for key in _LAZY_VALUES if _is_excluded(key)]
        for key in self._lazy:
            _set_excluded(key, False)

    def __exit__(self, *_: object) -> None:
        for key in self._lazy:
            _set_excluded(key, True)
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
        del self._dispatch
        torch._C._set_grad_enabled(self._grad)
        self._functions.__exit__(None, None, None)
