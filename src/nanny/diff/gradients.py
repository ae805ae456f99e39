"""Parameter gradients of a watched backward pass beside their reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from ..core.formats import Format
from ..core.limits import Limits
from ..measure.errors import compare
from ..watch.names import plain_name
from ..watch.tensors import outside_program, short_dtype
from ..watch.twins import Twins
from .records import GradDiff, GradTotals


def parameter_gradients(
    model: nn.Module, shadows: Twins, scale: float, target: Format, limits: Limits, own: Mapping[str, float]
) -> tuple[tuple[GradDiff, ...], GradTotals]:
    """Each parameter's gradient with its share of the whole, and the whole. Unscaled."""
    out: list[GradDiff] = []
    with outside_program():
        for name, parameter in model.named_parameters():
            if parameter.grad is None or parameter.grad.layout != torch.strided:
                continue
            real, twin = parameter.grad, shadows.twin(parameter.grad)
            if scale != 1:
                real, twin = real.to(twin.dtype) / scale, twin / scale
            out.append(
                GradDiff(
                    name=plain_name(name),
                    kind="parameter",
                    order=len(out),
                    dtype=short_dtype(parameter.grad.dtype),
                    shape=tuple(parameter.shape),
                    error=compare(real, twin, target, limits),
                    own=own.get(plain_name(name)),
                )
            )
    return with_totals(out, scale)


def with_totals(gradients: list[GradDiff], scale: float) -> tuple[tuple[GradDiff, ...], GradTotals]:
    """Each gradient with its share of the whole, and the whole."""
    squares = sum(g.error.reference_norm**2 for g in gradients)
    shared = tuple(replace(g, energy=g.error.reference_norm**2 / squares if squares else 0.0) for g in gradients)
    return shared, _totals(gradients, math.sqrt(squares), scale)


def _totals(gradients: list[GradDiff], size: float, scale: float) -> GradTotals:
    """From the norms of the parts: error, target and reference are the sides of a triangle."""
    errors = [g.error.rel_l2 * g.error.reference_norm if g.error.reference_norm else g.error.norm for g in gradients]
    error = math.sqrt(sum(e * e for e in errors))
    norm = math.sqrt(sum(g.error.norm**2 for g in gradients))
    return GradTotals(
        rel_l2=error / size if size else (math.inf if error else 0.0),
        cosine=(norm**2 + size**2 - error**2) / (2 * norm * size) if norm and size else None,
        reference_norm=size,
        loss_scale=scale,
    )
