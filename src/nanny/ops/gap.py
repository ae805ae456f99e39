"""How far a result is from its reference, and whether rounding explains it.

With `atol` and `rtol` given, an element may be off by `atol + rtol * |reference|`, taken literally. Without, by a few roundoffs
of its type relative to its own size and the tensor's; where that is not enough, by what moving each input by one roundoff does to
it. Factors of a matrix are compared by what they must satisfy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..core.limits import Limits
from ..core.ops import ADD_UP, MATMULS
from ..watch.op_facts import KERNEL_ERRORS, bare_name
from ..watch.tensors import is_low, outside_program, short_dtype
from .factors import Equation, equations_of, free_results
from .records import MOST_ELEMENTS, Element, Gap, TensorNote
from .reference import (
    PIECE,
    Call,
    Reference,
    is_pointwise,
    moved_by_rounding,
    pieces_of,
    product_parts,
    reference_of,
    unit_roundoff,
    unwritten_parts,
)

_WORTH_IT = 1 << 18  # multiplications; below, computing again is as cheap
_MARGIN = 4.0  # the largest of many rows


@dataclass(frozen=True)
class Tolerance:
    """None: by dtype and by the operation's conditioning."""

    atol: float | None = None
    rtol: float | None = None

    @property
    def is_given(self) -> bool:
        return self.atol is not None or self.rtol is not None


def gaps_of(
    call: Call, results: list[Tensor], reference: Reference, tolerance: Tolerance, limits: Limits
) -> tuple[Gap, ...] | None:
    """The results that differ from their reference by more than they may; None: they are not unique, and nothing tells."""
    moved: dict[int, list[Tensor]] = {}

    def movement(at: int, draws: int) -> Tensor | None:
        if draws not in moved:
            try:
                moved[draws] = moved_by_rounding(call, reference, draws)
            except KERNEL_ERRORS:
                moved[draws] = []
        if not moved[draws]:
            return None
        # a kernel that goes through many terms rounds at each, as if the inputs had moved by as much; of sums that is known
        many = not is_low(results[at].dtype) and not is_pointwise(call.func) and bare_name(call.func) not in ADD_UP
        return moved[draws][at] * limits.op_fp32_slack if many else moved[draws][at]

    found = []
    free = [at for at in free_results(call) if results[at].numel()]
    if free:
        equations = equations_of(call, results)
        if equations is None:
            return None
        found = [gap for e in equations if (gap := _equation_gap(e, results[free[0]].dtype, tolerance, limits)) is not None]
    for at, (result, wide) in enumerate(zip(results, reference.results)):
        if at in free or is_close(result, wide, tolerance, limits):
            continue
        coarse = _device_roundoff(call.func, result.device, result.dtype)
        judged = partial(
            gap_between, reference=wide, tolerance=tolerance, limits=limits, moved=partial(movement, at),
            exact=not reference.widened, coarse=coarse,
        )  # fmt: skip
        gap = judged(result)
        if gap is not None and len(results) > 1:  # what is kept for backward may be written in part only
            unwritten = unwritten_parts(call, reference)[at]
            if bool(unwritten.any()):
                gap = judged(torch.where(unwritten, wide.to(result.dtype), result.detach().cpu()))
        if gap is not None:
            found.append(gap)
    return tuple(found)


def _equation_gap(equation: Equation, dtype: torch.dtype, tolerance: Tolerance, limits: Limits) -> Gap | None:
    left, right = equation.left, equation.right
    difference = (left - right).abs()
    if tolerance.is_given:
        atol, rtol = tolerance.atol or 0.0, tolerance.rtol or 0.0
        allowed: Tensor | float = atol + rtol * right.abs()
        said = f"atol {atol:g}, rtol {rtol:g}"
    else:  # errors of a stable method grow with the root of the size
        roundoffs = limits.op_error_roundoffs * _slack(dtype, limits) * math.sqrt(max(1, *left.shape[-2:]))
        allowed = equation.size * (roundoffs * unit_roundoff(dtype))
        said = f"{roundoffs:.3g} roundoffs of {short_dtype(dtype)}"
    bad = ~(difference <= allowed)
    if not bool(bad.any()):
        return None
    if left.is_complex():
        left, right = left.abs(), right.abs()
    return _gap_of(left, right, bad, difference, f"{equation.said}, to {said}")


def gap_between(
    out: Tensor,
    reference: Tensor,
    tolerance: Tolerance,
    limits: Limits,
    moved: Callable[[int], Tensor | None],
    exact: bool,
    coarse: float,
) -> Gap | None:
    """None if they agree. `moved` tells, by so many draws, how far rounding of the inputs moves each element of the reference.

    `exact`: integers must be equal (both sides computed the same thing from the same numbers). `coarse`: the roundoff that the
    device computes with, where it is larger than the result's own (TF32).
    """
    if not (out.is_floating_point() or out.is_complex()):
        if not exact or bool(torch.equal(out.cpu(), reference)):
            return None
        return _gap_of(out, reference, out.cpu() != reference, None, "must be equal")
    if out.is_complex():
        out, reference = torch.view_as_real(out.resolve_conj()), torch.view_as_real(reference.resolve_conj())
    if not out.numel():
        return None
    wide = reference if reference.dtype in (torch.float32, torch.float64) else reference.float()
    difference = out.detach().to("cpu", wide.dtype) - wide
    if not tolerance.is_given:
        return _beyond_rounding(out, wide, difference, limits, moved, coarse)
    atol, rtol = tolerance.atol or 0.0, tolerance.rtol or 0.0
    bad = ~((difference.abs() <= wide.abs() * rtol + atol) | _same(out, wide))
    return _gap_of(out, wide, bad, difference, f"atol {atol:g}, rtol {rtol:g}") if bool(bad.any()) else None


def is_close(out: Tensor, reference: Tensor, tolerance: Tolerance, limits: Limits) -> bool:
    """The common case, in as few passes as possible: all is finite, and nothing is off by more than rounding explains by itself.

    False: unknown, see `gap_between`.
    """
    if not out.is_floating_point() or not out.numel():
        return False
    own, off, norm, largest = _apart(out, reference)
    if tolerance.is_given:
        return largest == 0.0 or largest <= (tolerance.atol or 0.0) < math.inf
    rms, root = norm / math.sqrt(out.numel()), math.sqrt(out.numel())
    if largest <= _small(out.dtype, limits) * rms < math.inf:
        return True
    # what `_beyond_rounding` asks of whole tensors in FP64, with a score of fresh ones
    if not math.isfinite(largest + rms) or float(torch.linalg.vector_norm(off)) / root > _small(out.dtype, limits) * rms:
        return largest == 0.0
    each = _each(out.dtype, limits)
    return float(off.abs_().sub_(own.abs(), alpha=each).max()) <= each * rms


def is_close_in_pieces(call: Call, results: list[Tensor], tolerance: Tolerance, limits: Limits) -> bool:
    """`is_close` to its reference, of a large operation that computes each element by itself; False: unknown."""
    pieces = pieces_of(call, results)
    if not pieces or not all(t.is_floating_point() for t in results):
        return False
    norms, offs, largest = ([0.0] * len(results) for _ in range(3))
    for part, parts in pieces:
        reference = reference_of(part)
        if reference is None or [t.shape for t in reference.results] != [t.shape for t in parts]:
            return False
        for at, (out, wide) in enumerate(zip(parts, reference.results)):
            _, apart, norm, most = _apart(out, wide)
            if not math.isfinite(most):
                return False
            norms[at], largest[at] = math.hypot(norms[at], norm), max(largest[at], most)
            offs[at] = math.hypot(offs[at], float(torch.linalg.vector_norm(apart)))
    if tolerance.is_given:
        return all(most <= (tolerance.atol or 0.0) for most in largest)
    for out, most, off, norm in zip(results, largest, offs, norms):
        each = _each(out.dtype, limits) * norm / math.sqrt(out.numel())
        if most != 0.0 and not (off <= _small(out.dtype, limits) * norm < math.inf and most <= each):
            return False
    return True


def _apart(out: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """The result and how far the reference is from it, in the type that tells; the reference's norm, and the largest distance:
    NaN if there is one on either side."""
    # one roundoff of fp32 is far below what fp32 results may be off by
    narrow = torch.float64 if out.dtype == torch.float64 else torch.float32
    own = out.detach().to("cpu", narrow)
    other = reference.to(narrow)
    norm = float(torch.linalg.vector_norm(other))
    # a fresh copy is written over: fresh memory costs more than the subtraction
    off = other - own if other is reference else other.sub_(own)
    low, high = torch.aminmax(off)
    return own, off, norm, max(-float(low), float(high))


def _small(dtype: torch.dtype, limits: Limits) -> float:
    """How far a result may be off as a whole, relative to its norm."""
    return unit_roundoff(dtype) * limits.op_l2_roundoffs * _slack(dtype, limits)


def _each(dtype: torch.dtype, limits: Limits) -> float:
    """How far an element may be off, relative to its own size and the tensor's."""
    return unit_roundoff(dtype) * limits.op_error_roundoffs * _slack(dtype, limits)


def _slack(dtype: torch.dtype, limits: Limits) -> float:
    return 1.0 if is_low(dtype) else limits.op_fp32_slack


def _beyond_rounding(
    out: Tensor,
    wide: Tensor,
    difference: Tensor,
    limits: Limits,
    moved: Callable[[int], Tensor | None],
    coarse: float,
) -> Gap | None:
    roundoff = max(unit_roundoff(out.dtype), coarse)
    slack = 1.0 if coarse else _slack(out.dtype, limits)
    small = roundoff * limits.op_l2_roundoffs * slack
    same = _same(out, wide)
    finite = torch.isfinite(wide) & torch.isfinite(difference)
    difference = torch.where(finite, difference, torch.where(same, 0.0, math.inf))
    kept = torch.where(finite, wide, 0.0)
    rms = _rms(kept)
    # a subnormal is one step from the next, whatever its size
    allowed = (kept.abs() + rms) * (roundoff * limits.op_error_roundoffs * slack) + _subnormal(out.dtype)
    bad = (difference.abs() > allowed) & ~same
    off = _rms(torch.where(torch.isfinite(difference), difference, 0.0))
    whole = off > small * rms + _subnormal(out.dtype)
    if not bool(bad.any()) and not whole:
        return None
    for draws in (1, 8):  # most is explained by the first; one of few draws may happen to move nothing
        explained = moved(draws)
        if explained is None:
            break
        more = explained.to(wide.dtype) * limits.op_conditioning
        if is_low(out.dtype):  # sums that are kept in 16 bits go wrong by this much in health, not by more
            most = (kept.abs() + rms) * limits.op_excused_low
            more = torch.maximum(torch.minimum(more, most), more * (unit_roundoff(torch.float32) / roundoff))
        bad &= difference.abs() > allowed + more
        bad &= torch.isfinite(difference) | (more <= wide.abs().nan_to_num(0.0, 0.0) + rms)  # at a pole no digit is certain
        whole = whole and off > small * rms + _rms(more.nan_to_num(posinf=0.0))
        if not bool(bad.any()) and not whole:
            return None
    if not bool(bad.any()):
        bad = difference.abs() > small * kept.abs()
    said = f"{limits.op_error_roundoffs * slack:g} roundoffs of {short_dtype(out.dtype)}, and the operation's conditioning"
    return _gap_of(out, wide, bad, difference, said)


def _rms(tensor: Tensor) -> float:
    """Of any finite magnitudes: their squares may leave the range."""
    largest = float(tensor.abs().max())
    return largest * float(torch.linalg.vector_norm(tensor / largest)) / math.sqrt(tensor.numel()) if largest else 0.0


def _subnormal(dtype: torch.dtype) -> float:
    """Twice the smallest number of the type: below it lies no other to round to."""
    return torch.finfo(dtype).tiny * unit_roundoff(dtype) * 4


def _same(out: Tensor, wide: Tensor) -> Tensor:
    """Equal, infinities included, or both NaN."""
    own = out.detach().to("cpu", wide.dtype)
    return (own == wide) | (own.isnan() & wide.isnan())


def _gap_of(out: Tensor, wide: Tensor, bad: Tensor, difference: Tensor | None, limit: str) -> Gap:
    places = bad.nonzero()
    own = out.detach().cpu()
    elements = tuple(_element(own, wide, tuple(p)) for p in places[:MOST_ELEMENTS].tolist())
    worst, rel_l2 = None, None
    if difference is not None:
        ranked = torch.where(bad, difference.abs().nan_to_num(math.inf), -1.0)
        at = int(ranked.argmax())
        worst = _element(own, wide, tuple(int(i) for i in torch.unravel_index(torch.tensor(at), bad.shape)))
        finite = torch.isfinite(difference) & torch.isfinite(wide)
        norm = float(torch.linalg.vector_norm(torch.where(finite, wide, 0.0)))
        rel_l2 = float(torch.linalg.vector_norm(torch.where(finite, difference, 0.0))) / norm if norm else None
    return Gap(tensor_note(out), tensor_note(wide), len(places), elements, worst, rel_l2, limit, _reason(worst, out))


def _reason(worst: Element | None, out: Tensor) -> str:
    if worst is None or not out.is_floating_point():
        return ""
    largest = torch.finfo(out.dtype).max
    if not math.isfinite(worst.value) and math.isfinite(worst.reference):
        if abs(worst.reference) > largest:
            return f"the result {worst.reference:.6g} does not fit into {short_dtype(out.dtype)} (largest {largest:.6g})"
        return f"the reference is finite: {worst.reference:.6g}"
    if worst.value == 0 and worst.reference != 0 and abs(worst.reference) <= torch.finfo(out.dtype).tiny:
        return f"the result {worst.reference:.3g} is too small for {short_dtype(out.dtype)}"
    return ""


def _element(out: Tensor, wide: Tensor, index: tuple[int, ...]) -> Element:
    return Element(index, float(out[index]), float(wide[index]))


def tensor_note(tensor: Tensor, label: str = "", measured: bool = False) -> TensorNote:
    low = high = None
    if measured and tensor.is_floating_point() and tensor.numel():
        low, high = (float(v) for v in torch.aminmax(tensor.detach()))
    return TensorNote(tuple(tensor.shape), short_dtype(tensor.dtype), str(tensor.device), low, high, label)


def _device_roundoff(func: Any, device: torch.device, dtype: torch.dtype) -> float:
    """TF32, where the program allows it: FP32 products on CUDA keep 11 bits. 0: the type's own."""
    if device.type != "cuda" or dtype != torch.float32:
        return 0.0
    name = bare_name(func)
    if name.startswith(("convolution", "cudnn", "_cudnn")):
        return 2.0**-11 if torch.backends.cudnn.allow_tf32 else 0.0
    return 2.0**-11 if name in MATMULS and torch.backends.cuda.matmul.allow_tf32 else 0.0


def passes_screen(call: Call, out: Any, tolerance: Tolerance, limits: Limits) -> bool:
    """Is a matrix product right, as far as its type goes? False: unknown, compute it.

    Freivalds' check: if C = A B, then C r = A (B r) for any vector r. Three products with a vector, in FP64, cost few percent of
    a matrix product; with random r an error in any element of C shows in its row.
    """
    parts = product_parts(call)
    if parts is None or not isinstance(out, Tensor) or out.dtype != torch.float32 or out.device.type != "cpu":
        return False
    added, left, right, beta, alpha = parts
    if left.numel() * right.shape[-1] < _WORTH_IT:
        return False
    with outside_program():
        columns = right.shape[-1]
        probe = _probe(columns)
        inner = _times(right, probe)
        expected = _times(left, inner) * alpha
        if added is not None and beta != 0:
            expected += _times(added.expand_as(out), probe) * beta if added.dim() > 1 else beta * (added.double() @ probe)
        off = float((_times(out, probe) - expected).abs().max())
        if tolerance.is_given:
            return off <= (tolerance.atol or 0.0) / 4
        rms = float(torch.linalg.vector_norm(out.detach())) / math.sqrt(out.numel())
    allowed = unit_roundoff(out.dtype) * limits.op_l2_roundoffs * limits.op_fp32_slack * _MARGIN * math.sqrt(columns) * rms
    return off <= allowed < math.inf


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix times vector; for a batch, each with its own vector or all with one. A large one is made wide piece by piece."""
    matrix = matrix.detach()
    if matrix.dim() > 2:
        return (matrix.double() * vector.reshape(-1, 1, matrix.shape[-1])).sum(-1)
    across = matrix.stride(0) < matrix.stride(1)  # pieces that lie together
    step = max(1, PIECE // max(1, matrix.shape[0 if across else 1]))
    parts = matrix.split(step, int(across))
    if not across:
        return torch.cat([torch.mv(part.double(), vector) for part in parts])
    return sum((torch.mv(part.double(), some) for part, some in zip(parts, vector.split(step))), vector.new_zeros(len(matrix)))


@lru_cache(maxsize=64)
def _probe(length: int) -> Tensor:
    """Signs at random, sizes between a half and one: errors of several elements do not cancel, none is hidden."""
    random = torch.rand(2, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    return (random[0] / 2 + 0.5) * torch.where(random[1] < 0.5, -1.0, 1.0)
