"""What a change of the size of a rounding does to a model in FP32 arithmetic: the floor that a healthy run cannot go below.

Two ways, both measured on 23 healthy models, three seeds, both formats. *Rounding*: weights and all that layers take and return
are rounded to the target. It predicts the error of the outputs within a factor of 1.8 (a standard deviation of 0.28 binary
orders, against 0.44 for the other way). *Nudging*: inputs and weights move by one ulp of the target, up or down at random. A
single ReLU sign or max-pool tie that flips moves a gradient by percents, and which ones flip is chance: rounding missed it by up
to a factor of 90, the worst of three nudges never by more than 1.4. Nudging the input alone says nothing about models that take
whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..watch.op_stream import watching
from ..watch.snapshot import kept_state
from ..watch.tensors import float_leaves
from .policy import map_floats
from .settings import DiffSettings, loss_of

NUDGES = 3


@dataclass(frozen=True)
class Floor:
    """Relative L2 changes; None where there is nothing to change or to compare."""

    output: float | None  # by rounding
    output_by_input: float | None  # by nudging the input alone: what the model makes of any change of its input
    gradient: float | None  # by rounding or nudging, whichever is larger


def error_floor(settings: DiffSettings) -> Floor:
    model, dtype = settings.model, settings.dtype
    exact, exact_gradient = _run(settings)
    with _rounding_layers(model, dtype):
        rounded, gradient = _run(replace(settings, batch=map_floats(settings.batch, partial(_round, dtype=dtype))))
    by_input: list[float | None] = []
    by_all = [_change(gradient, exact_gradient)]
    for seed in range(NUDGES):
        nudge = partial(_nudge, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        moved = replace(settings, batch=map_floats(settings.batch, nudge))
        by_input.append(_change(_run(replace(moved, backward=False))[0], exact))
        if exact_gradient.numel():
            with _other_weights(model, nudge):
                by_all.append(_change(_run(moved)[1], exact_gradient))
    return Floor(_change(rounded, exact), _largest(by_input), _largest(by_all))


def _largest(changes: Sequence[float | None]) -> float | None:
    return max((c for c in changes if c is not None), default=None)


def _run(settings: DiffSettings) -> tuple[Tensor, Tensor]:
    model, (args, kwargs) = settings.model, settings.batch
    with kept_state(model, settings.batch) as state, watching(state), torch.autocast(settings.device, enabled=False):
        output = model(*args, **kwargs)
        loss = loss_of(output, settings)[0] if settings.backward else None
        if loss is not None:
            loss.backward()
        gradients = [p.grad.to_dense().reshape(-1).clone() for p in model.parameters() if p.grad is not None]
        outputs = [leaf.detach().reshape(-1).double() for leaf in float_leaves(output)]
    return (torch.cat(outputs) if outputs else torch.zeros(0)), (torch.cat(gradients) if gradients else torch.zeros(0))


@contextmanager
def _rounding_layers(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Rounded weights, and hooks that round what layers without children take and return; then as before."""
    change = partial(_round, dtype=dtype)
    layers = [m for m in model.modules() if not any(m.children())]
    handles: list[Any] = [m.register_forward_pre_hook(lambda _, args: map_floats(args, change)) for m in layers]
    handles += [m.register_forward_hook(lambda *call: map_floats(call[-1], change)) for m in layers]
    try:
        with _other_weights(model, change):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _other_weights(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    weights = [(p, p.data) for p in model.parameters() if p.is_floating_point()]
    try:
        for parameter, value in weights:
            parameter.data = change(value)
        yield
    finally:
        for parameter, value in weights:
            parameter.data = value


def _round(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradients pass as if nothing had happened; what the type cannot hold stays as it is."""
    exact = value.detach()
    narrow = exact.to(dtype).to(exact.dtype)
    return value + torch.where(torch.isfinite(narrow), narrow - exact, torch.zeros_like(exact))


def _nudge(value: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Each element one spacing of the target up or down; zeros stay."""
    exact = value.detach()
    up = torch.randint(0, 2, exact.shape, generator=generator).to(exact.device, exact.dtype) * 2 - 1
    spacing = torch.ldexp(torch.full_like(exact, torch.finfo(dtype).eps), torch.frexp(exact).exponent - 1)
    return value + torch.where(torch.isfinite(exact) & (exact != 0), up * spacing, torch.zeros_like(exact))


def _change(moved: Tensor, exact: Tensor) -> float | None:
    size = float(torch.linalg.vector_norm(exact, dtype=torch.float64)) if exact.numel() else 0.0
    if not size or moved.shape != exact.shape:
        return None
    return float(torch.linalg.vector_norm(moved - exact, dtype=torch.float64)) / size
