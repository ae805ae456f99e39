"""Gradients of parameters beside those of their FP32 twins, as `GradientError`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.examination import GradientError
from .damage_tags import Tag


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
    tag: Tag | None

    @property
    def reference_rms(self) -> float:
        return self.reference_norm / math.sqrt(max(self.elements, 1))


def measured_gradient(grad: Tensor, twin: Tensor, scale: float, tag: Tag | None) -> GradientNumbers:
    real, wide = grad.detach(), twin.detach()
    same = wide is real or twin is grad
    norm = _norm(real) / scale
    reference = norm if same else _norm(wide) / scale
    finite, reference_finite = _is_finite(real, norm), _is_finite(wide, reference)
    error = 0.0 if same else _norm(wide.float() - real.float()) / scale if finite and reference_finite else math.inf
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
        tag=tag,
    )


def _norm(tensor: Tensor) -> float:
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
            error=math.nan if g.reference_nonfinite else _ratio(g.error_norm, g.reference_norm),
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
    return each, _ratio(math.sqrt(sum(g.error_norm**2 for g in measured.values())), math.sqrt(squares))


def _ratio(error: float, size: float) -> float:
    return error / size if size else math.inf if error else 0.0
