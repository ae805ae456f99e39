"""Tensors beside their FP32 twins, as plain numbers: cheap ones for every operation, dear ones for suspects, and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.examination import GradientError
from ..core.formats import format_of
from ..core.numbers import relative
from ..measure.histogram import exponents_of
from ..watch.tensors import LOW, tensors_in
from ..watch.without_warnings import run_without_warnings

_CLEARLY_VARYING = 0.03  # below, the varying part is no longer taken as the difference of two sums
_VARYING_FLOOR = 2e-5  # of the norm; FP32 itself has 6e-8, so that less would be its own rounding
_ALL_ARE_WHOLE = 2.0**23  # FP32 has no fractions beyond
_SAMPLE = 4096
_MOST_DETAILED = 1 << 22
_PIECE = 1 << 20
_BIAS_ELEMENTS = 256  # the mean of so many is known to a sixteenth of their spread


class ErrorLevel(NamedTuple):
    """Error of a tensor beside its twin."""

    plain: float
    centred: float
    error: float  # absolute norm
    size: float  # norm of the twin

    def grade(self, centred_weight: float) -> float:
        return max(self.plain, self.centred * centred_weight)


EXACT = ErrorLevel(0.0, 0.0, 0.0, 0.0)
SPOILED = ErrorLevel(math.inf, math.inf, math.inf, 0.0)


class Extent(NamedTuple):
    """Smallest and largest value."""

    low: float
    high: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def nan(self) -> bool:
        return math.isnan(self.low)

    @property
    def only_minus_infinity(self) -> bool:
        return self.low == -math.inf and self.high < math.inf

    @property
    def absmax(self) -> float:
        return max(abs(self.low), abs(self.high))


def extent(tensor: Tensor) -> Extent:
    if tensor.numel() == 0:
        return Extent(0.0, 0.0)
    low, high = torch.aminmax(_computable(tensor))
    return Extent(float(low), float(high))


def scalars_in(args: Any, kwargs: Any) -> tuple[float, ...]:
    found = [v for v in (*args, *kwargs.values()) if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return tuple(float(v) for v in found[:4])


def level_of(real: Tensor, twin: Tensor) -> ErrorLevel:
    """Plain and centred error. Where one of the two is not finite, the rest is compared."""
    real = _computable(real)
    error, size = _distance(twin, real), _norm(twin)
    if not math.isfinite(error) or not math.isfinite(size):
        both = torch.isfinite(twin) & torch.isfinite(real)
        difference = torch.where(both, torch.sub(twin, real), 0).double()
        twin = torch.where(both, twin, 0).double()
        error, size = _norm(difference), _norm(twin)
    if error == 0:
        return ErrorLevel(0.0, 0.0, 0.0, size)
    if size == 0:
        return ErrorLevel(math.inf, math.inf, error, 0.0)
    plain = error / size
    varying = min((_varying_share(twin, dim, size) for dim in _dims(twin)), default=1.0)
    return ErrorLevel(plain, plain / varying, error, size)


def _sample(tensor: Tensor) -> Tensor:
    """Every so-manieth element of a large tensor: details of a suspect must not cost another copy of it in FP64."""
    step = tensor.numel() // _MOST_DETAILED
    return tensor.reshape(-1)[::step] if step > 1 else tensor


def _computable(tensor: Tensor) -> Tensor:
    """fp8 has hardly any operations."""
    return tensor.float() if tensor.element_size() == 1 and tensor.is_floating_point() else tensor


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _distance(twin: Tensor, real: Tensor) -> float:
    """Norm of the difference, which of a large tensor is never there as a whole."""
    if twin.numel() <= _PIECE or not (twin.is_contiguous() and real.is_contiguous() and twin.shape == real.shape):
        return _norm(torch.sub(twin, real))
    pairs = zip(twin.view(-1).split(_PIECE), real.view(-1).split(_PIECE))
    return math.hypot(*(_norm(torch.sub(wide, low)) for wide, low in pairs))


def _dims(tensor: Tensor) -> set[int]:
    return {dim for dim in (0, tensor.dim() - 1) if tensor.dim() and tensor.shape[dim] > 1}


def _varying_share(twin: Tensor, dim: int, size: float) -> float:
    """The part of the norm that varies along a dimension; 1 if it is too small to say."""
    mean = twin.mean(dim, keepdim=True)
    common = _norm(mean) / size
    varying = math.sqrt(max(1 - twin.shape[dim] * common * common, 0.0))
    if varying < _CLEARLY_VARYING:
        varying = _norm(twin - mean) / size
    return varying if varying > _VARYING_FLOOR else 1.0


def lost_to_zero(real: Tensor, twin: Tensor) -> int:
    """How many more zeros than its twin a tensor has."""
    return int(torch.count_nonzero(twin)) - int(torch.count_nonzero(_computable(real)))


def flush_numbers(real: Tensor, twin: Tensor) -> dict[str, float]:
    """Share and energy of what became zero, and energy of what lies where the format has few digits left."""
    real, twin = _sample(real), _sample(twin)
    wide = twin.double()
    zeroed = (_computable(real) == 0) & (wide != 0)
    energy = float(wide.square().sum())
    there = max(int((wide != 0).sum()), 1)
    smallest = format_of(real.dtype).min_normal if real.dtype in LOW else 0.0
    below = (wide != 0) & (wide.abs() < smallest)
    return {
        "flushed_share": int(zeroed.sum()) / there,
        "flushed_energy": float(wide[zeroed].square().sum()) / energy if energy else 0.0,
        "below_normal_energy": float(wide[below].square().sum()) / energy if energy else 0.0,
        "flushed_absmax": float(wide[zeroed].abs().max()) if bool(zeroed.any()) else 0.0,
    }


class Absorption(NamedTuple):
    kept: float
    unchanged: float
    ratio: float  # norm of the smaller addend over that of the larger


def absorption(large: Tensor, small: Tensor, result: Tensor) -> Absorption | None:
    """What arrived of the smaller addend. None if it is too large to be lost."""
    a, b = large.float().expand(result.shape), small.float().expand(result.shape)
    size_a, size_b = _norm(a), _norm(b)
    limit = 8 * format_of(result.dtype).unit_roundoff * size_a
    if not size_a or not size_b or not math.isfinite(size_a + size_b) or size_b > limit:
        return None
    result = _computable(result)
    there = b != 0
    unchanged = int(((result == large.to(result.dtype)) & there).sum()) / max(int(there.sum()), 1)
    change = result.double() - a
    kept = float((change * b).sum() / b.double().square().sum())
    return Absorption(kept, unchanged, size_b / size_a)


def whole_numbers_lost(real: Tensor, twin: Tensor) -> dict[str, float] | None:
    """Largest value, share changed and share of collisions, if the twin holds whole numbers that the format cannot."""
    line, wide = _computable(real).reshape(-1), twin.reshape(-1)
    step = max(line.numel() // _SAMPLE, 1)
    line, wide = line[::step], wide[::step]
    if wide.numel() < 2 or not bool((wide[:64] == wide[:64].round()).all()):
        return None
    largest = float(wide.abs().max())
    if not format_of(real.dtype).exact_integers < largest < _ALL_ARE_WHOLE or not bool((wide == wide.round()).all()):
        return None
    changed = float((line.to(wide.dtype) != wide).double().mean())
    distinct = len(wide.unique())
    if not changed or distinct <= 2:
        return None
    return {"largest": largest, "changed": changed, "distinct": distinct, "collisions": 1 - len(line.unique()) / distinct}


def flips(real: Tensor, twin: Tensor) -> int:
    return int((real != twin).sum()) if real.shape == twin.shape else real.numel()


def tied_rows(values: Tensor, twin: Tensor, dim: int, k: int) -> float:
    """Share of rows whose choice is a tie in low precision and none in the twin."""
    size = values.shape[dim] if values.dim() else 1
    if size < 2:
        return 0.0
    k = min(k, size - 1)
    return max(_ties(values, dim, k) - _ties(twin, dim, k), 0.0)


def _ties(values: Tensor, dim: int, k: int) -> float:
    ordered = values.float().sort(dim, descending=True).values
    return float((ordered.select(dim, k - 1) == ordered.select(dim, k)).double().mean())


def own_error(func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> float | None:
    """Worst relative error of an operation beside FP32 on its very own inputs; None if it cannot run so."""
    try:
        exact = [t for t in tensors_in(run_without_warnings(func, _widen(args), _widen(dict(kwargs)))) if t.is_floating_point()]
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    worst = 0.0
    for real, wide in zip(outs, exact):
        if real.shape == wide.shape and real.numel():
            level = level_of(real, wide.float())
            worst = max(worst, level.plain if level.size else 0.0)
    return worst


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in LOW else value
    if isinstance(value, torch.dtype):
        return torch.float32 if value in LOW else value
    if isinstance(value, (tuple, list)):
        return type(value)(_widen(item) for item in value)
    if isinstance(value, dict):
        return {key: _widen(item) for key, item in value.items()}
    return value


def operand_numbers(tensor: Tensor) -> dict[str, Any]:
    """Sizes of the finite part."""
    if not tensor.is_floating_point() or not tensor.numel():
        return {}
    wide = _sample(tensor.detach()).double()
    finite = wide.nan_to_num(0.0, 0.0, 0.0).abs()
    low, high = torch.aminmax(finite)
    return {
        "absmax": float(high),
        "absmin": float(low),
        "rms": float(finite.square().mean().sqrt()),
        "nonfinite": not bool(torch.isfinite(wide).all()),
    }


def exponents_beside(real: Tensor, twin: Tensor | None) -> dict[str, dict[str, int]]:
    return {"ran": exponents_of(real)} | ({} if twin is None else {"fp32": exponents_of(twin)})


def rms_of(tensor: Tensor) -> float:
    return float(_sample(tensor).double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()) if tensor.numel() else 0.0


def bias_of(real: Tensor, twin: Tensor) -> float | None:
    """Mean of the error over its spread, in value or in magnitude, whichever is worse; None for few elements."""
    if real.numel() < _BIAS_ELEMENTS:
        return None
    wide = _sample(twin).double()
    error = _sample(real).double() - wide
    biases = []
    for one in (error, error * wide.sign()):
        spread = float(one.std())
        if 0 < spread < math.inf:
            biases.append(float(one.mean()) / spread)
    return max(biases, key=abs, default=None)


class GradientNumbers(NamedTuple):
    """Unscaled."""

    norm: float
    reference_norm: float
    error_norm: float
    zero_share: float
    reference_zero_share: float
    nonfinite: bool
    reference_nonfinite: bool
    elements: int

    @property
    def reference_rms(self) -> float:
        return self.reference_norm / math.sqrt(max(self.elements, 1))


def gradient_numbers(grad: Tensor, twin: Tensor, scale: float) -> GradientNumbers:
    real, wide = grad.detach(), twin.detach()
    same = wide is real or twin is grad
    norm = _wide_norm(real) / scale
    reference = norm if same else _wide_norm(wide) / scale
    finite, reference_finite = _is_finite(real, norm), _is_finite(wide, reference)
    error = 0.0 if same else _wide_norm(wide.float() - real.float()) / scale if finite and reference_finite else math.inf
    zeros = 1 - int(torch.count_nonzero(real)) / max(real.numel(), 1)
    return GradientNumbers(
        norm=norm,
        reference_norm=reference if reference_finite else math.inf,
        error_norm=error,
        zero_share=zeros,
        reference_zero_share=zeros if same else 1 - int(torch.count_nonzero(wide)) / max(wide.numel(), 1),
        nonfinite=not finite,
        reference_nonfinite=not reference_finite,
        elements=real.numel(),
    )


def _wide_norm(tensor: Tensor) -> float:
    """In FP64 where FP32 would lose it."""
    value = float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) if tensor.dtype != torch.float64 else math.nan
    return value if 1e-15 < value < math.inf else float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _is_finite(tensor: Tensor, norm: float) -> bool:
    return math.isfinite(norm) or bool(torch.isfinite(tensor).all())


def gradient_errors(measured: Mapping[str, GradientNumbers]) -> tuple[tuple[GradientError, ...], float | None]:
    """Each gradient with its share of the whole, and the error of the whole; None without a finite reference."""
    squares = sum(g.reference_norm**2 for g in measured.values() if not g.reference_nonfinite)
    each = tuple(
        GradientError(
            name=name,
            norm=g.norm,
            reference_norm=g.reference_norm,
            error=math.nan if g.reference_nonfinite else relative(g.error_norm, g.reference_norm),
            energy_share=g.reference_norm**2 / squares if squares and not g.reference_nonfinite else 0.0,
            zero_share=g.zero_share,
            reference_zero_share=g.reference_zero_share,
            nonfinite=g.nonfinite,
            reference_nonfinite=g.reference_nonfinite,
        )
        for name, g in measured.items()
    )
    if not measured or any(g.reference_nonfinite for g in measured.values()):
        return each, None
    return each, relative(math.sqrt(sum(g.error_norm**2 for g in measured.values())), math.sqrt(squares))
