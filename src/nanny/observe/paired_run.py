"""One batch through a model in both precisions at once: forward, loss and backward, with everything put back afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..diff_records import Failure, GradDiff, GradTotals
from ..formats import Format
from ..limits import Limits
from ..records import NannyError
from .gradients import parameter_gradients
from .kept_state import KeptState, WriteGuard, kept_state
from .names import float_leaves
from .pairs import PairWatcher
from .policy import cast_inputs, cast_model, kept_wide, precision, without_onednn
from .shadow import CarriedShadows

FP16_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)  # a GradScaler would settle on its own


@dataclass(frozen=True)
class Settings:
    target: Format
    reference: str
    policy: str
    backward: bool
    own: bool  # measure each layer's own error
    loss_fn: Callable[..., Any] | None
    loss_scale: float | None
    limits: Limits
    wide: tuple[str, ...] = ()  # modules to keep in FP32
    look_for_faults: bool = False  # the operations that make NaN and Inf: a pass over every result


@dataclass(frozen=True)
class Pass:
    """One batch, measured."""

    watcher: PairWatcher
    gradients: tuple[GradDiff, ...]
    total: GradTotals | None
    loss: float | None
    reference_loss: float | None
    reseeds: dict[str, int]
    notes: tuple[str, ...]


def run_batch(model: nn.Module, batch: Any, target: Any, settings: Settings, device: str) -> Pass | Failure:
    """One pass; again with a smaller loss scale if fp16 gradients overflow, or without oneDNN if it lacks a kernel."""
    scales = (1.0,) if settings.target.name != "fp16" else FP16_SCALES
    if settings.loss_scale is not None:
        scales = (settings.loss_scale,)
    did_without = False
    outcome: Pass | Failure | None = None
    for scale in scales:
        outcome = _one_pass(model, batch, target, settings, device, scale, nullcontext())
        if isinstance(outcome, Failure) and "primitive" in outcome.message:
            did_without = True
            outcome = _one_pass(model, batch, target, settings, device, scale, without_onednn())
        if isinstance(outcome, Failure) or not _overflowed_in_backward(outcome):
            break
    assert outcome is not None
    if isinstance(outcome, Failure):
        return outcome
    if did_without:
        note = "oneDNN has no kernel for this model in the target type here; run without it"
        outcome = replace(outcome, notes=(*outcome.notes, note))
    return outcome


def _overflowed_in_backward(outcome: Pass) -> bool:
    forward = any(call.error.spoiled for call in outcome.watcher.calls) or not math.isfinite(outcome.loss or 0.0)
    return not forward and any(g.error.spoiled for g in outcome.gradients)


def _one_pass(
    model: nn.Module, batch: Any, target: Any, settings: Settings, device: str, scale: float, kernels: AbstractContextManager[Any]
) -> Pass | Failure:
    dtype = getattr(torch, settings.target.torch_name)
    watcher = PairWatcher(settings.target, settings.limits, settings.backward, settings.look_for_faults)
    watcher.loss_scale = scale
    args, kwargs = batch
    error: Exception | None = None
    with ExitStack() as stack:
        state = stack.enter_context(kept_state(model, (args, kwargs, target)))
        wide = torch.float64 if settings.reference == "fp64" else torch.float32
        shadows = CarriedShadows(wide, on_op=watcher.on_op, own=settings.own, before_write=state.before_write)
        stack.enter_context(kernels)
        stack.enter_context(watcher.watching(model, shadows))
        stack.enter_context(kept_wide(model, settings.wide, device))
        if settings.policy == "full":
            stack.enter_context(cast_model(model, dtype, shadows))
            args, kwargs = cast_inputs((args, kwargs), dtype, shadows)
        stack.enter_context(torch.set_grad_enabled(settings.backward))
        try:
            with shadows, precision(settings.policy, dtype, device):
                output = model(*args, **kwargs)
                loss, note = loss_of(output, target, settings) if settings.backward else (None, "")
            if loss is not None:
                with shadows:
                    (loss * scale).backward()
        except Exception as raised:  # noqa: BLE001 - the user's model may raise anything, and that is a result
            error = raised
        else:
            return _measured(model, watcher, shadows, loss, scale, settings, [*_notes(state), *([note] if note else [])])
    assert error is not None
    return _failure(model, batch, target, watcher, error, settings)


def _notes(state: KeptState) -> list[str]:
    written = state.written_parameters
    return [f"the forward pass writes into the parameter {written[0]}; it was put back"] if written else []


def loss_of(output: Any, target: Any, settings: Settings) -> tuple[Tensor | None, str]:
    """The loss to go backward from: the user's, the model's own, or a fixed mix of its outputs."""
    if settings.loss_fn is not None:
        loss = settings.loss_fn(output) if target is None else settings.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise NannyError("loss_fn must return a tensor with a single number")
        return (loss, "") if loss.requires_grad else (None, "the loss does not depend on any parameter; no backward pass")
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1 and own.requires_grad:
        return own, "backward from the loss that the model returns"
    leaves = [t for t in float_leaves(output) if t.requires_grad]
    if not leaves:
        return None, "the output does not depend on any parameter; no backward pass"
    generator = torch.Generator().manual_seed(0)
    parts = []
    for leaf in leaves:
        weights = torch.randn(leaf.shape, generator=generator).to(leaf.device)
        parts.append((leaf.float() * weights).mean())
    return torch.stack(parts).sum(), "no loss_fn: gradients are of a fixed random mix of the outputs; give the loss for real ones"


def _measured(
    model: nn.Module,
    watcher: PairWatcher,
    shadows: CarriedShadows,
    loss: Tensor | None,
    scale: float,
    settings: Settings,
    notes: list[str],
) -> Pass:
    gradients: tuple[GradDiff, ...] = ()
    total: GradTotals | None = None
    if loss is not None:
        gradients, total = parameter_gradients(model, shadows, scale, settings.target, settings.limits)
    return Pass(
        watcher=watcher,
        gradients=gradients,
        total=total,
        loss=None if loss is None else float(loss.detach()),
        reference_loss=None if loss is None else float(shadows.twin(loss).detach()),
        reseeds={f"{op}: {why}": count for (op, why), count in shadows.reseeds.items()},
        notes=tuple(notes),
    )


def _failure(
    model: nn.Module, batch: Any, target: Any, watcher: PairWatcher, error: Exception, settings: Settings
) -> Failure:
    """What the model raised, if it does so in the target precision only."""
    if isinstance(error, NannyError):
        raise error
    args, kwargs = batch
    where = watcher.failed_at or "the model's own forward"
    said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    try:
        with kept_state(model, (batch, target)) as state, WriteGuard(state), torch.set_grad_enabled(settings.backward):
            output = model(*args, **kwargs)
            if settings.backward:
                loss_of(output, target, settings)
    except Exception as again:
        raise NannyError(
            f"the model raises in FP32 too, so the sample input does not fit it ({type(again).__name__} in {where}: "
            f"{str(again).strip().partition(chr(10))[0]}); save an input that model(input) accepts"
        ) from again
    return Failure("target", watcher.failed_at or "", said)


