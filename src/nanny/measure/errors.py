"""A low-precision tensor beside its reference: tensors to `ErrorStats`, and where along each dimension the error sits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.formats import Format
from ..core.limits import Limits
from ..core.numbers import relative
from .records import DimensionError, ErrorStats

_SAMPLE = 1024  # elements behind the quantiles
_EXACT = 1 << 15  # up to here sums are taken in fp64
_CLEARLY_VARYING = 0.03  # below, the variation is no longer taken as the difference of two sums


def compare(real: Tensor, reference: Tensor, spacing: Format, limits: Limits | None = None) -> ErrorStats:
    """`spacing`: the format whose ulps the error is counted in. Dimension 0 is taken as the batch."""
    limits = limits or Limits()
    x, y, error, error_norm, norm, counts = _difference(real.detach(), reference.detach())
    x_norm = _norm(x)
    centred, varying = _centred_error(error_norm, y, norm, limits.centred_floor)
    p50, p99 = _ulps(error, y, spacing)
    return ErrorStats(
        count=real.numel(),
        rel_l2=relative(error_norm, norm),
        centred=centred,
        varying=varying,
        max_abs=_absmax(error),
        cosine=_cosine(x_norm, norm, error_norm),
        ulp_p50=p50,
        ulp_p99=p99,
        bias=_bias(error, error_norm),
        reference_absmax=_absmax(y),
        reference_norm=norm,
        norm=x_norm,
        all_zero=x_norm == 0 and norm > 0,
        **counts,
    )


def _difference(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, float, float, dict[str, int]]:
    """What is finite in both, its error, the norms of error and reference, and the counts of what is not finite."""
    error = torch.sub(x, y)
    error_norm, norm = _norm(error), _norm(y)
    if math.isfinite(error_norm) and math.isfinite(norm):
        return x, y, error, error_norm, norm, {}
    x, y, counts = _finite_part(x.to(y.dtype), y)
    error = x - y
    return x, y, error, _norm(error), _norm(y), counts


def _finite_part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Both with everything zeroed that is not finite in one of them. Equal infinities (masks) are no difference."""
    x_finite, y_finite = torch.isfinite(x), torch.isfinite(y)
    both = x_finite & y_finite
    counts = {
        "nan": int(x.isnan().sum()),
        "inf": int(x.isinf().sum()),
        "reference_nan": int(y.isnan().sum()),
        "reference_inf": int(y.isinf().sum()),
        "spoiled": int((~x_finite & y_finite).sum()),
    }
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(both, x, zero), torch.where(both, y, zero), counts


def _norm(x: Tensor) -> float:
    """fp32 sums of squares are good to 1e-5 here; where they leave the range of fp32, fp64 is taken."""
    if x.numel() > _EXACT:
        value = float(torch.linalg.vector_norm(x, dtype=torch.float32 if x.dtype != torch.float64 else None))
        if 1e-15 < value < 1e18:
            return value
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) if x.numel() else 0.0


def _absmax(x: Tensor) -> float:
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return max(abs(float(low)), abs(float(high)))


def _centred_error(error_norm: float, y: Tensor, norm: float, floor: float) -> tuple[float | None, float | None]:
    if y.dim() < 2 or y.shape[0] < 2 or norm == 0:
        return None, None
    mean = y.mean(0, keepdim=True)
    common = _norm(mean) / norm
    varying = math.sqrt(max(1 - y.shape[0] * common * common, 0.0))
    if varying < _CLEARLY_VARYING:
        varying = _norm(y - mean) / norm
    return (error_norm / norm / varying if varying > floor else None), varying


def _cosine(x_norm: float, y_norm: float, error_norm: float) -> float | None:
    """From the three sides of the triangle: as exact as the norms, also where the angle is small."""
    if not x_norm or not y_norm:
        return None
    return 1 - min(max((error_norm**2 - (x_norm - y_norm) ** 2) / (2 * x_norm * y_norm), 0.0), 2.0)


def _bias(error: Tensor, norm: float) -> float | None:
    if error.numel() < 2 or norm == 0:
        return None
    mean = float(error.mean(dtype=torch.float64 if error.numel() <= _EXACT else None))
    spread = norm * norm / error.numel() - mean * mean
    return mean / math.sqrt(spread) if spread > 0 else None


def _ulps(error: Tensor, y: Tensor, spacing: Format) -> tuple[float, float]:
    """Median and 99 % quantile, of elements spread over the tensor."""
    line, reference = error.reshape(-1), y.reshape(-1)
    step = max(line.numel() // _SAMPLE, 1)
    line, reference = line[::step][:_SAMPLE].double().abs(), reference[::step][:_SAMPLE].double()
    if not line.numel():
        return 0.0, 0.0
    exponent = (torch.frexp(reference).exponent - 1).clamp(spacing.min_exponent, spacing.max_exponent)
    ordered = torch.ldexp(line, spacing.significand - 1 - exponent).sort().values
    return float(ordered[(len(ordered) - 1) // 2]), float(ordered[(len(ordered) - 1) * 99 // 100])


def relative_l2(real: Tensor, reference: Tensor) -> float:
    """Only the relative error, over what is finite in both."""
    _, _, _, error_norm, norm, _ = _difference(real.detach(), reference.detach())
    return relative(error_norm, norm)


def contributions(a: Tensor, b: Tensor) -> Tensor:
    """For `a @ b`, of matrices or of batches of them: the size of the products at each index of the sum."""
    return _sizes(a, a.dim() - 1) * _sizes(b, b.dim() - 2)


def channel_contributions(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> Tensor | None:
    """For a convolution: the size of the products of each input channel; None with groups, which do not mix all channels."""
    if groups != 1 or x.dim() != weight.dim():
        return None
    return _sizes(x, 1) * _sizes(weight, 0 if transposed else 1)


def _sizes(x: Tensor, dim: int) -> Tensor:
    """The norm at each index of a dimension."""
    sizes: Tensor = torch.linalg.vector_norm(x, dim=[d for d in range(x.dim()) if d != dim], dtype=torch.float32)
    return sizes


def contribution_ratio(sizes: Tensor) -> tuple[float, int]:
    """The loudest index of a sum against the median one."""
    sounding = sizes[sizes > 0]
    if not sounding.numel():
        return 1.0, 0
    index = int(sizes.argmax())
    return float(sizes[index] / sounding.median()), index


def dimension_errors(real: Tensor, reference: Tensor) -> tuple[DimensionError, ...]:
    """For each dimension the index that holds most of the error's energy, and how unlike the magnitudes along it are."""
    x, y, _ = _finite_part(real.detach().double(), reference.detach().double())
    error, size = (x - y).square(), y.square()
    out = []
    for dim in range(y.dim()):
        if y.shape[dim] < 2:
            continue
        others = [d for d in range(y.dim()) if d != dim]
        errors = error.sum(others) if others else error
        rms = (size.mean(others) if others else size).sqrt()
        index, loudest = int(errors.argmax()), int(rms.argmax())
        sounding = rms[rms > 0]
        out.append(
            DimensionError(
                dim=dim,
                size=y.shape[dim],
                index=index,
                error_share=relative(float(errors[index]), float(errors.sum())) if float(errors.sum()) else 0.0,
                loudest=loudest,
                rms_ratio=float(rms[loudest] / sounding.median()) if sounding.numel() else None,
                rms_max=float(rms[loudest]),
                rms_min=float(sounding.min()) if sounding.numel() else 0.0,
            )
        )
    return tuple(out)
