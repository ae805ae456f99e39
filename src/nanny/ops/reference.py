"""The reference of one operation: the same call on wider copies of its inputs, on the CPU, outside the program.

A call is taken down before it runs, because it may write into what it reads. Random numbers are never drawn, the program's own
tensors are never written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.finding import NannyError
from ..core.ops import ADD_UP, FACTORS, MATMULS, MOVES
from ..watch.op_facts import KERNEL_ERRORS, bare_name, written_by
from ..watch.tensors import WIDER, is_low, map_leaves, outside_program, tensors_besides, tensors_in
from ..watch.without_warnings import run_without_warnings

aten = torch.ops.aten
REFERENCES = ("wide", "cpu_same_dtype")
_HALF_TO_FLOAT = {aten._softmax.default, aten._log_softmax.default}
_FP32_ONLY = {aten._amp_foreach_non_finite_check_and_unscale_.default, aten._amp_update_scale_.default}
_CPU = torch.device("cpu")
PIECE = 1 << 17  # elements
_PRODUCTS = {getattr(aten, name).default: places for name, places in FACTORS.items()}


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
        args, kwargs = map_leaves((self.args, dict(self.kwargs)), self.before)
        return args, kwargs

    def tensors(self) -> list[Tensor]:
        """Its tensor arguments as they were before the call."""
        found = tensors_in(self.args)
        if self.kwargs:
            found += tensors_in(self.kwargs)
        return [self.before(t) for t in found] if self.written else found


def call_before(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    written = tuple(written_by(func, args, kwargs)) if hasattr(func, "_schema") else ()
    return Call(func, args, kwargs, written, tuple(_copy(t) for t in written))


@dataclass(frozen=True)
class Reference:
    """What the wide run made: one tensor per tensor that the call returned or wrote, in the order of `results_of`."""

    results: tuple[Tensor, ...]
    widened: bool  # some input got a wider type: integers may then legitimately differ


def results_of(call: Call, out: Any) -> list[Tensor]:
    """Every tensor that the call made or changed, once."""
    return [*call.written, *tensors_besides(tensors_in(out), call.written)]


def reference_of(call: Call, kind: str = "wide") -> Reference | None:
    """None if there is nothing wider to compare with."""
    if kind == "cpu_same_dtype":
        return Reference(tuple(run_wide(call, {})), False)
    as_it_is = bare_name(call.func) in MOVES or call.func in _FP32_ONLY
    to = {} if as_it_is else _widths(call)
    if not to and not as_it_is and all(t.device == _CPU for t in call.tensors()):
        return None
    try:
        return Reference(tuple(run_wide(call, to)), bool(to))
    except KERNEL_ERRORS:
        if torch.float64 not in to.values() or not any(is_low(d) for d in to):
            raise
        return Reference(tuple(run_wide(call, {d: torch.float32 for d in to if is_low(d)})), True)


def pieces_of(call: Call, results: list[Tensor]) -> Iterable[tuple[Call, list[Tensor]]]:
    """A large call that computes each element by itself, as calls on pieces of its tensors with their results; empty: it is not.

    Wide copies of a piece stay in the cache, and take memory that the last ones gave back.
    """
    whole = results[0]
    if whole.numel() < 2 * PIECE or not is_pointwise(call.func):
        return ()
    alike = (t.shape == whole.shape and t.is_contiguous() for t in results)
    given = (t.dim() == 0 or (t.shape == whole.shape and t.is_contiguous()) for t in call.tensors())
    return _pieces(call, results) if all(alike) and all(given) else ()


def _pieces(call: Call, results: list[Tensor]) -> Iterator[tuple[Call, list[Tensor]]]:
    for start in range(0, results[0].numel(), PIECE):
        cut: dict[int, Tensor] = {}

        def piece(value: Any, start: int = start, cut: dict[int, Tensor] = cut) -> Any:
            if not isinstance(value, Tensor) or not value.dim():
                return value
            if id(value) not in cut:
                cut[id(value)] = value.detach().view(-1)[start : start + PIECE]
            return cut[id(value)]

        args, kwargs = map_leaves(call.inputs, piece)
        kept = tuple(map(piece, call.kept))
        yield Call(call.func, args, kwargs, kept, kept), [piece(t) for t in results]


def _widths(call: Call) -> dict[torch.dtype, torch.dtype]:
    """fp16, bf16 and fp8 are checked in fp32, fp32 in fp64; where they meet, all in fp64."""
    dtypes = {t.dtype for t in call.tensors() if is_inexact(t)}
    dtypes |= {v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.dtype) and v.is_floating_point}
    wide = torch.float64 if torch.float32 in dtypes or torch.float64 in dtypes else torch.float32
    to = {d: wide for d in dtypes if is_low(d)}
    return to | {d: WIDER[d] for d in dtypes if d in WIDER}


def run_wide(call: Call, to: Mapping[torch.dtype, torch.dtype], change: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The call on copies in other types; `change` may alter each floating or complex input."""
    copies: dict[int, Tensor] = {}
    args, kwargs = call.inputs
    kept = set(map(id, call.kept))

    def wide_value(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = _wide_tensor(value, to, change, fresh=id(value) in kept)
            return copies[id(value)]
        if isinstance(value, torch.dtype):
            return to.get(value, value)
        return _CPU if isinstance(value, torch.device) else value

    with outside_program():
        wide_args, wide_kwargs = map_leaves((args, kwargs), wide_value)
        if call.func in _HALF_TO_FLOAT:
            wide_args = (*wide_args[:2], False)
        out = run_without_warnings(call.func, wide_args, wide_kwargs)
    written = [copies[id(tensor)] for tensor in call.kept]
    return [*written, *tensors_besides(tensors_in(out), written)]


def _wide_tensor(
    value: Tensor, to: Mapping[torch.dtype, torch.dtype], change: Callable[[Tensor], Tensor] | None, fresh: bool
) -> Tensor:
    wide = value.detach().to(_CPU, to.get(value.dtype, value.dtype))
    if change is not None and is_inexact(wide):
        wide = change(wide)
    return wide.clone() if fresh and wide.untyped_storage()._cdata == value.untyped_storage()._cdata else wide


def moved_by_rounding(call: Call, reference: Reference, draws: int) -> list[Tensor]:
    """How far each result moves when every input moves by one roundoff of its type: what rounding alone may explain.

    For sums that is known. For others signs are drawn at random; where a result mixes many inputs, roundoffs that are drawn
    cancel while a kernel's need not, and neighbours in the last dimension share what they move by: one may happen not to move.
    Of complex results both parts, as `torch.view_as_real` has them.
    """
    generator = torch.Generator().manual_seed(0)
    to = _widths(call)
    given = [t for t in call.tensors() if is_inexact(t)]
    lowest = max((unit_roundoff(t.dtype) for t in given), default=0.0)
    if bare_name(call.func) in MATMULS:  # kernels of every device add up products of 16-bit numbers in FP32
        lowest = min(lowest, unit_roundoff(torch.float32))
    if bare_name(call.func) in ADD_UP:
        sums = zip(run_wide(call, to, Tensor.abs), reference.results)
        return [_parts_of_size(m.abs().double() * lowest, r) if is_inexact(r) else r for m, r in sums]

    def shake(wide: Tensor) -> Tensor:
        parts = _parts(wide)
        signs = torch.randint(0, 2, parts.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        moved = parts * (1 + signs.to(parts.dtype) * lowest)  # infinities stay what they are
        return torch.view_as_complex(moved) if wide.is_complex() else moved

    moved = [torch.zeros_like(_parts(r), dtype=torch.float64) if is_inexact(r) else r for r in reference.results]
    for _ in range(draws):
        for at, result in enumerate(run_wide(call, to, shake)):
            if is_inexact(result):
                gap = (_parts(result).double() - _parts(reference.results[at]).double()).abs()
                gap.nan_to_num_(0.0, math.inf)  # both infinite: not moved; one of them: without a bound
                torch.maximum(moved[at], gap, out=moved[at])
    if is_pointwise(call.func):
        return moved
    most = max(t.numel() for t in given)
    return [
        _with_neighbours(m, r) * max(1.0, most / max(1, r.numel())) ** 0.5 if is_inexact(r) else r
        for m, r in zip(moved, reference.results)
    ]


def is_pointwise(func: Any) -> bool:
    return torch.Tag.pointwise in getattr(func, "tags", ())


def is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _parts(tensor: Tensor) -> Tensor:
    """Real numbers: of complex ones the two parts, in a dimension of their own."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _parts_of_size(size: Tensor, like: Tensor) -> Tensor:
    return size.unsqueeze(-1).expand(*size.shape, 2) if like.is_complex() else size


def _with_neighbours(moved: Tensor, of: Tensor) -> Tensor:
    last = tuple(range(-min(moved.dim(), 1 + of.is_complex()), 0))
    return torch.maximum(moved, moved.nan_to_num(posinf=0.0).square().mean(last, keepdim=True).sqrt()) if last else moved


def _copy(tensor: Tensor) -> Tensor:
    with outside_program():
        return tensor.detach().clone()


def unwritten_parts(call: Call, reference: Reference) -> list[Tensor]:
    """Where each result holds memory that the kernel never wrote, such as rows beyond the length of a sequence.

    It is run again in memory that holds something else: what then differs was not written.
    """
    found = [torch.zeros_like(r, dtype=torch.bool) for r in reference.results]
    kept: list[list[Tensor]] = []  # so that the next run gets other memory
    for byte in (0x3F, 0x41, 0x3F, 0x41):
        for result in reference.results:
            used = [torch.full((result.nbytes + extra,), byte, dtype=torch.uint8) for extra in (0, 0, 64, 128)]
            del used
        kept.append(run_wide(call, _widths(call) if reference.widened else {}))
        for unwritten, one, other in zip(found, reference.results, kept[-1]):
            unwritten |= (one != other) & ~((one != one) & (other != other))
    return found


def product_parts(call: Call) -> tuple[Tensor | None, Tensor, Tensor, float, float] | None:
    """C = beta * added + alpha * A B."""
    places = _PRODUCTS.get(call.func)
    if places is None:
        return None
    args, kwargs = call.inputs
    left, right = (args[i] for i in places)
    if 0 in places:
        return None, left, right, 0.0, 1.0
    return args[0], left, right, kwargs.get("beta", 1), kwargs.get("alpha", 1)


def independent_product(call: Call) -> Tensor | None:
    """The product in FP64 by another kernel than the call's own: `bmm` for `mm`, `mm` for `bmm`. None for other operations."""
    parts = product_parts(call)
    if parts is None:
        return None
    added, beta, alpha = parts[0], parts[3], parts[4]
    with outside_program():
        left, right = wide_copy(parts[1]), wide_copy(parts[2])
        if left.dim() == 2:
            product: Tensor = aten.bmm.default(left[None], right[None])[0]
        else:
            product = torch.stack([aten.mm.default(a, b) for a, b in zip(left, right)])
        return product * alpha + wide_copy(added) * beta if added is not None and beta != 0 else product * alpha


def wide_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def check_reference(kind: str) -> str:
    if kind not in REFERENCES:
        raise NannyError(f"reference={kind!r} is unknown; use 'wide' (FP32 or FP64 on the CPU) or 'cpu_same_dtype'")
    return kind


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
