"""A low-precision tensor beside its reference: tensors to `ErrorStats`, and where along each dimension the error sits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..diff_records import DimensionError, ErrorStats
from ..formats import Format
from ..limits import Limits

_SAMPLE = 4096  # elements behind the quantiles
_EXACT = 1 << 16  # up to here sums are taken in fp64


def compare(real: Tensor, reference: Tensor, spacing: Format, limits: Limits | None = None) -> ErrorStats:
    """`spacing`: the format whose ulps the error is counted in. Dimension 0 is taken as the batch."""
    limits = limits or Limits()
    if real.dtype == reference.dtype and real.data_ptr() == reference.data_ptr() and bool(torch.isfinite(real).all()):
        return _no_error(real)
    x, y = real.detach().to(reference.dtype), reference.detach()
    counts = {"nan": 0, "inf": 0, "reference_nan": 0, "reference_inf": 0, "spoiled": 0}
    error = x - y
    if not math.isfinite(float(error.sum())) or not math.isfinite(float(y.sum())):
        x, y, counts = _finite_part(x, y)
        error = x - y
    error_norm, norm, x_norm = _norm(error), _norm(y), _norm(x)
    centred, varying = _centred(error_norm, y, norm, limits.centred_floor)
    p50, p99 = _ulps(error, y, spacing)
    return ErrorStats(
        count=real.numel(),
        rel_l2=_ratio(error_norm, norm),
        centred=centred,
        varying=varying,
        max_abs=_absmax(error),
        cosine=_cosine(x, y, x_norm, norm),
        ulp_p50=p50,
        ulp_p99=p99,
        bias=_bias(error, error_norm),
        reference_absmax=_absmax(y),
        reference_norm=norm,
        all_zero=x_norm == 0 and norm > 0,
        **counts,
    )


def _no_error(real: Tensor) -> ErrorStats:
    return ErrorStats(
        real.numel(), 0.0, None, None, 0.0, 1.0, 0.0, 0.0, None, reference_absmax=_absmax(real), reference_norm=_norm(real)
    )


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
    """fp32 sums of squares are good to 0.1 %; where they leave the range of fp32, fp64 is."""
    if x.numel() > _EXACT:
        value = float(torch.linalg.vector_norm(x))
        if 1e-15 < value < 1e18:
            return value
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) if x.numel() else 0.0


def _absmax(x: Tensor) -> float:
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return max(abs(float(low)), abs(float(high)))


def _ratio(error: float, size: float) -> float:
    if size > 0:
        return error / size
    return math.inf if error > 0 else 0.0


def _centred(error_norm: float, y: Tensor, norm: float, floor: float) -> tuple[float | None, float | None]:
    if y.dim() < 2 or y.shape[0] < 2 or norm == 0:
        return None, None
    varying = _norm(y - y.mean(0, keepdim=True)) / norm
    return (error_norm / norm / varying if varying > floor else None), varying


def _cosine(x: Tensor, y: Tensor, x_norm: float, y_norm: float) -> float | None:
    if not x_norm or not y_norm or not x.numel():
        return None
    a, b = x.reshape(-1), y.reshape(-1)
    dot = float(torch.dot(a, b)) if x.numel() > _EXACT else float(torch.dot(a.double(), b.double()))
    return min(max(dot / (x_norm * y_norm), -1.0), 1.0)


def _bias(error: Tensor, norm: float) -> float | None:
    if error.numel() < 2 or norm == 0:
        return None
    mean = float(error.mean(dtype=torch.float64 if error.numel() <= _EXACT else None))
    spread = norm * norm / error.numel() - mean * mean
    return mean / math.sqrt(spread) if spread > 0 else None


def _ulps(error: Tensor, y: Tensor, spacing: Format) -> tuple[float, float]:
    line, reference = error.reshape(-1), y.reshape(-1)
    step = max(line.numel() // _SAMPLE, 1)
    line, reference = line[::step][:_SAMPLE].double().abs(), reference[::step][:_SAMPLE].double()
    if not line.numel():
        return 0.0, 0.0
    exponent = (torch.frexp(reference).exponent - 1).clamp(spacing.min_exponent, spacing.max_exponent)
    ulps = torch.ldexp(line, spacing.significand - 1 - exponent)
    p50, p99 = torch.quantile(ulps, torch.tensor([0.5, 0.99], dtype=torch.float64, device=ulps.device)).tolist()
    return p50, p99


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
                error_share=_ratio(float(errors[index]), float(errors.sum())) if float(errors.sum()) else 0.0,
                loudest=loudest,
                rms_ratio=float(rms[loudest] / sounding.median()) if sounding.numel() else None,
                rms_max=float(rms[loudest]),
                rms_min=float(sounding.min()) if sounding.numel() else 0.0,
            )
        )
    return tuple(out)
