"""What rounding alone does to a model: FP32 arithmetic, with weights and all that layers take and return rounded to the target.

A healthy low-precision run differs from FP32 about as much, and flips the same ReLU signs and max-pool ties. What differs more
happens inside the layers or in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .kept_state import WriteGuard, kept_state
from .names import float_leaves


def rounding_floor(
    model: nn.Module, batch: Any, loss_of: Callable[[Any], Tensor | None], dtype: torch.dtype, device: str
) -> tuple[float | None, float | None]:
    """Relative L2 change of the outputs and of the whole gradient."""
    exact_outputs, exact_gradient = _run(model, batch, loss_of, device)
    args, kwargs = _rounded(batch, dtype)
    with _rounding(model, dtype):
        outputs, gradient = _run(model, (args, kwargs), loss_of, device)
    return _change(outputs, exact_outputs), _change(gradient, exact_gradient)


def _run(model: nn.Module, batch: Any, loss_of: Callable[[Any], Tensor | None], device: str) -> tuple[Tensor, Tensor]:
    args, kwargs = batch
    with kept_state(model, batch) as state, WriteGuard(state), torch.autocast(device, enabled=False):
        output = model(*args, **kwargs)
        loss = loss_of(output)
        if loss is not None:
            loss.backward()
        gradients = [p.grad.to_dense().reshape(-1).clone() for p in model.parameters() if p.grad is not None]
        outputs = [leaf.detach().reshape(-1).double() for leaf in float_leaves(output)]
    return (torch.cat(outputs) if outputs else torch.zeros(0)), (torch.cat(gradients) if gradients else torch.zeros(0))


@contextmanager
def _rounding(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Rounded weights, and hooks that round what layers without children take and return; then as before."""

    def before(module: nn.Module, args: Any) -> Any:
        return _rounded(args, dtype)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return _rounded(output, dtype)

    layers = [m for m in model.modules() if not any(m.children())]
    handles: list[Any] = [m.register_forward_pre_hook(before) for m in layers]
    handles += [m.register_forward_hook(after) for m in layers]
    weights = [(p, p.data) for p in model.parameters() if p.is_floating_point()]
    try:
        for parameter, value in weights:
            parameter.data = _rounded(value, dtype)
        yield
    finally:
        for parameter, value in weights:
            parameter.data = value
        for handle in handles:
            handle.remove()


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """Gradients pass as if nothing had happened; what the type cannot hold stays as it is."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        exact = value.detach()
        narrow = exact.to(dtype).to(exact.dtype)
        moved = torch.where(torch.isfinite(narrow), narrow - exact, torch.zeros_like(exact))
        return value + moved
    if type(value) in (tuple, list):
        return type(value)(_rounded(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _rounded(item, dtype) for key, item in value.items()}
    return value


def _change(moved: Tensor, exact: Tensor) -> float | None:
    size = float(torch.linalg.vector_norm(exact, dtype=torch.float64)) if exact.numel() else 0.0
    if not size or moved.shape != exact.shape:
        return None
    return float(torch.linalg.vector_norm(moved - exact, dtype=torch.float64)) / size
