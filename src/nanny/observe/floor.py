"""What rounding alone does to a model: FP32, with the inputs and every layer's output moved by at most one unit roundoff.

A healthy low-precision run differs from FP32 about as much. A model that amplifies such a change, or whose gradients hang on
ties, would do so in any precision: nothing to blame an operation for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..formats import Format
from .kept_state import WriteGuard, kept_state
from .names import float_leaves


def rounding_floor(
    model: nn.Module, batch: Any, loss_of: Callable[[Any], Tensor | None], target: Format
) -> tuple[float | None, float | None]:
    """Relative L2 change of the outputs and of the whole gradient."""
    exact_outputs, exact_gradient = _run(model, batch, loss_of, None)
    outputs, gradient = _run(model, batch, loss_of, target)
    return _change(outputs, exact_outputs), _change(gradient, exact_gradient)


def _run(model: nn.Module, batch: Any, loss_of: Callable[[Any], Tensor | None], target: Format | None) -> tuple[Tensor, Tensor]:
    args, kwargs = batch
    with kept_state(model, batch) as state, WriteGuard(state):
        handles = _rounding_hooks(model, target) if target is not None else []
        try:
            if target is not None:
                args, kwargs = _rounded((args, kwargs), target, torch.Generator().manual_seed(1))
            output = model(*args, **kwargs)
            loss = loss_of(output)
            if loss is not None:
                loss.backward()
            gradients = [p.grad.detach().reshape(-1) for p in model.parameters() if p.grad is not None]
        finally:
            for handle in handles:
                handle.remove()
        outputs = [leaf.detach().reshape(-1).double() for leaf in float_leaves(output)]
    return (torch.cat(outputs) if outputs else torch.zeros(0)), (torch.cat(gradients) if gradients else torch.zeros(0))


def _rounding_hooks(model: nn.Module, target: Format) -> list[Any]:
    generator = torch.Generator().manual_seed(0)  # its own stream: the model's random numbers stay the same

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return _rounded(output, target, generator)

    return [m.register_forward_hook(hook) for m in model.modules() if not any(m.children())]


def _rounded(value: Any, target: Format, generator: torch.Generator) -> Any:
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float32).to(value.device).mul_(2).sub_(1)
        return value * noise.mul_(target.unit_roundoff).add_(1).to(value.dtype)
    if type(value) in (tuple, list):
        return type(value)(_rounded(item, target, generator) for item in value)
    if type(value) is dict:
        return {key: _rounded(item, target, generator) for key, item in value.items()}
    return value


def _change(moved: Tensor, exact: Tensor) -> float | None:
    size = float(torch.linalg.vector_norm(exact, dtype=torch.float64)) if exact.numel() else 0.0
    if not size or moved.shape != exact.shape:
        return None
    return float(torch.linalg.vector_norm(moved - exact, dtype=torch.float64)) / size
