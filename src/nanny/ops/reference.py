"""The reference of one operation: the same call on wider copies of its inputs, on the CPU, outside the program.

A call is taken down before it runs, because it may write into what it reads. Random numbers are never drawn, the program's own
tensors are never written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.finding import NannyError
from ..watch.op_facts import adds_up_wide, is_low, is_sum, moves_values, unit_roundoff
from ..watch.twins import written_by

REFERENCES = ("wide", "cpu_same_dtype")
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_HALF_TO_FLOAT = {torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default}
_FP32_ONLY = {torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default, torch.ops.aten._amp_update_scale_.default}
# What a kernel raises when it has no implementation for the wide type.
KERNEL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
_CPU = torch.device("cpu")
_compiler_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
_STRIDED = torch.strided
_PLAIN_DISPATCH = Tensor.__torch_dispatch__


@dataclass(frozen=True)
class Call:
    """An operation with its arguments as they were before it ran."""

    func: Any  # OpOverload or OpOverloadPacket
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    written: tuple[Tensor, ...]  # the program's own tensors that it writes
    kept: tuple[Tensor, ...]  # their values before

    def before(self, value: Any) -> Any:
        """An argument as it was before the call."""
        for own, kept in zip(self.written, self.kept):
            if value is own:
                return kept
        return value

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.written:
            return self.args, dict(self.kwargs)
        args, kwargs = mapped((self.args, dict(self.kwargs)), self.before)
        return args, kwargs

    def tensors(self) -> list[Tensor]:
        """Its tensor arguments as they were before the call."""
        found = tensors_in(self.args)
        if self.kwargs:
            found += tensors_in(self.kwargs)
        return [self.before(t) for t in found] if self.written else found


def taken_down(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    written = tuple(written_by(func, args, kwargs)) if hasattr(func, "_schema") else ()
    return Call(func, args, kwargs, written, tuple(_copy(t) for t in written))


@dataclass(frozen=True)
class Reference:
    """What the wide run made: one tensor per tensor that the call returned or wrote, in the order of `results_of`."""

    results: tuple[Tensor, ...]
    widened: bool  # some input got a wider type: integers may then legitimately differ


def results_of(call: Call, out: Any) -> list[Tensor]:
    """Every tensor that the call made or changed, once."""
    results = list(call.written)
    results += [t for t in tensors_in(out) if not any(t is r for r in results)]
    return results


def reference_of(call: Call, kind: str = "wide") -> Reference | None:
    """None if there is nothing wider to compare with."""
    if kind == "cpu_same_dtype":
        return Reference(tuple(run_wide(call, {})), False)
    as_it_is = moves_values(call.func) or call.func in _FP32_ONLY
    to = {} if as_it_is else _widths(call)
    if not to and not as_it_is and all(t.device == _CPU for t in call.tensors()):
        return None
    try:
        return Reference(tuple(run_wide(call, to)), bool(to))
    except KERNEL_ERRORS:
        if torch.float64 not in to.values() or not any(is_low(d) for d in to):
            raise
        return Reference(tuple(run_wide(call, {d: torch.float32 for d in to if is_low(d)})), True)


def _widths(call: Call) -> dict[torch.dtype, torch.dtype]:
    """fp16, bf16 and fp8 are checked in fp32, fp32 in fp64; where they meet, all in fp64."""
    dtypes = {t.dtype for t in call.tensors() if t.is_floating_point() or t.is_complex()}
    dtypes |= {v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.dtype) and v.is_floating_point}
    wide = torch.float64 if torch.float32 in dtypes or torch.float64 in dtypes else torch.float32
    to = {d: wide for d in dtypes if is_low(d)}
    return to | {d: _WIDER[d] for d in dtypes if d in _WIDER}


def run_wide(call: Call, to: Mapping[torch.dtype, torch.dtype], change: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The call on copies in other types; `change` may alter each floating input."""
    copies: dict[int, Tensor] = {}
    args, kwargs = call.inputs

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = _widened(value, to, change, fresh=any(value is k for k in call.kept))
            return copies[id(value)]
        if isinstance(value, torch.dtype):
            return to.get(value, value)
        return _CPU if isinstance(value, torch.device) else value

    with apart():
        wide_args, wide_kwargs = mapped((args, kwargs), replaced)
        if call.func in _HALF_TO_FLOAT:
            wide_args = (*wide_args[:2], False)
        out = call.func(*wide_args, **wide_kwargs)
    written = [copies[id(kept)] for kept in call.kept]
    return written + [t for t in tensors_in(out) if not any(t is w for w in written)]


def _widened(
    value: Tensor, to: Mapping[torch.dtype, torch.dtype], change: Callable[[Tensor], Tensor] | None, fresh: bool
) -> Tensor:
    wide = value.detach().to(_CPU, to.get(value.dtype, value.dtype))
    if change is not None and wide.is_floating_point():
        wide = change(wide)
    return wide.clone() if fresh and wide.untyped_storage()._cdata == value.untyped_storage()._cdata else wide


def shaken(call: Call, reference: Reference, draws: int) -> list[Tensor]:
    """How far each result moves when every input moves by one roundoff of its type: what rounding alone may explain.

    For sums that is known. For others signs are drawn at random; where a result mixes many inputs, roundoffs that are drawn
    cancel while a kernel's need not, and neighbours in the last dimension share what they move by: one may happen not to move.
    """
    generator = torch.Generator().manual_seed(0)
    to = _widths(call)
    floats = [t for t in call.tensors() if t.is_floating_point()]
    lowest = max((unit_roundoff(t.dtype) for t in floats), default=0.0)
    if adds_up_wide(call.func):
        lowest = min(lowest, unit_roundoff(torch.float32))
    if is_sum(call.func):
        return [m.double() * lowest if m.is_floating_point() else m for m in run_wide(call, to, Tensor.abs)]

    def shake(wide: Tensor) -> Tensor:
        signs = torch.randint(0, 2, wide.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        return wide + wide * (signs * lowest)

    moved = [torch.zeros_like(r, dtype=torch.float64) if r.is_floating_point() else r for r in reference.results]
    for _ in range(draws):
        for at, result in enumerate(run_wide(call, to, shake)):
            if result.is_floating_point():
                gap = (result.double() - reference.results[at].double()).abs().nan_to_num_(0.0, 0.0, 0.0)
                torch.maximum(moved[at], gap, out=moved[at])
    if torch.Tag.pointwise in getattr(call.func, "tags", ()):
        return moved
    most = max(t.numel() for t in floats)
    return [_shared(m) * max(1.0, most / max(1, m.numel())) ** 0.5 if m.is_floating_point() else m for m in moved]


def _shared(moved: Tensor) -> Tensor:
    return torch.maximum(moved, moved.square().mean(-1, keepdim=True).sqrt()) if moved.dim() else moved


class apart:
    """Outside the modes, the graph and autocast of the program, so that what is computed is neither seen nor changed by them.

    Entered once per operation, so it is not made of torch's own context managers, which take ten times as long.
    """

    __slots__ = ("_autocast", "_dispatch", "_grad")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._dispatch = torch._C._DisableTorchDispatch()
        self._autocast = torch._C._DisableAutocast()

    def __exit__(self, *_: object) -> None:
        del self._autocast, self._dispatch
        torch._C._set_grad_enabled(self._grad)


class Uncompiled:
    """A function that torch's compiler must leave alone when it is called from a compiled model. Costs nothing elsewhere."""

    __slots__ = ("_function", "_shielded")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._shielded: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if _compiler_callback() in (None, False):
            return self._function(*args)
        if self._shielded is None:
            self._shielded = torch.compiler.disable(lambda *given: self._function(*given), recursive=True)
        return self._shielded(*args)


def is_plain(tensor: Tensor) -> bool:
    """A tensor with values in strides, not of a class that brings its own dispatch (DTensor, FakeTensor)."""
    if type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH or tensor.layout is not _STRIDED:
        return False
    return not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def _copy(tensor: Tensor) -> Tensor:
    with apart():
        return tensor.detach().clone()


def tensors_in(value: Any) -> list[Tensor]:
    """Operations take and give tensors, and lists of them."""
    found: list[Tensor] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            if isinstance(item, Tensor):
                found.append(item)
            elif isinstance(item, (tuple, list, dict)):
                _gather(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _gather(item, found)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        return tuple([mapped(item, change) for item in value])
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


def check_reference(kind: str) -> str:
    if kind not in REFERENCES:
        raise NannyError(f"reference={kind!r} is unknown; use 'wide' (FP32 or FP64 on the CPU) or 'cpu_same_dtype'")
    return kind
