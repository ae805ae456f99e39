"""Parameter gradients of a watched backward pass beside their reference."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..diff_records import GradDiff, GradTotals
from ..formats import Format
from ..limits import Limits
from ..measure.errors import compare
from .names import plain_name, short_dtype
from .shadow import CarriedShadows, aside


def parameter_gradients(
    model: nn.Module, shadows: CarriedShadows, scale: float, target: Format, limits: Limits
) -> tuple[tuple[GradDiff, ...], GradTotals]:
    """Each parameter's gradient with its share of the whole, and the whole. Unscaled."""
    out: list[GradDiff] = []
    dot = squares = error_squares = real_squares = 0.0
    with aside():
        for name, parameter in model.named_parameters():
            if parameter.grad is None or parameter.grad.layout != torch.strided:
                continue
            twin = shadows.twin(parameter.grad) / scale
            real = parameter.grad.to(twin.dtype) / scale
            error = compare(real, twin, target, limits)
            out.append(
                GradDiff(
                    name=plain_name(name),
                    kind="parameter",
                    order=len(out),
                    dtype=short_dtype(parameter.grad.dtype),
                    shape=tuple(parameter.shape),
                    error=error,
                )
            )
            squares += error.reference_norm**2
            error_squares += (error.rel_l2 * error.reference_norm) ** 2 if error.reference_norm else error.max_abs**2
            finite = real.nan_to_num(0.0, 0.0, 0.0).double().reshape(-1)
            reference = twin.nan_to_num(0.0, 0.0, 0.0).double().reshape(-1)
            dot += float(torch.dot(finite, reference))
            real_squares += float(torch.dot(finite, finite))
    size = math.sqrt(squares)
    total = GradTotals(
        rel_l2=math.sqrt(error_squares) / size if size else (math.inf if error_squares else 0.0),
        cosine=dot / (size * math.sqrt(real_squares)) if size and real_squares else None,
        reference_norm=size,
        loss_scale=scale,
    )
    shared = [_with_energy(one, squares) for one in out]
    return tuple(shared), total


def _with_energy(one: GradDiff, squares: float) -> GradDiff:
    from dataclasses import replace

    return replace(one, energy=one.error.reference_norm**2 / squares if squares else 0.0)
