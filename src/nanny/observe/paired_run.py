"""One batch through a model in both precisions at once: forward, loss and backward, with everything put back afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..diff_records import CallDiff, Failure, GradDiff, GradTotals, IntegerLoss, Mix, OpFault
from ..records import NannyError
from .diff_settings import Settings, loss_of
from .gradients import parameter_gradients, with_totals
from .kept_state import KeptState, kept_state
from .pairs import PairWatcher
from .policy import cast_inputs, cast_model, kept_wide, precision, without_onednn
from .separate_runs import separate_run
from .shadow import CarriedShadows

FP16_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)  # a GradScaler would settle on its own


@dataclass(frozen=True)
class Pass:
    """One batch, measured."""

    calls: Sequence[CallDiff]
    activation_gradients: Sequence[GradDiff]
    gradients: tuple[GradDiff, ...]
    total: GradTotals | None
    loss: float | None
    reference_loss: float | None
    notes: tuple[str, ...]
    reseeds: Mapping[str, int] = field(default_factory=dict)
    flips: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    operations: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    integers: Mapping[tuple[str, str], IntegerLoss] = field(default_factory=dict)
    faults: Mapping[str, OpFault] = field(default_factory=dict)
    mixes: Mapping[str, Mix] = field(default_factory=dict)


def run_batch(model: nn.Module, batch: Any, target: Any, settings: Settings) -> Pass | Failure:
    """One pass; again with a smaller loss scale if fp16 gradients overflow, or without oneDNN if it lacks a kernel."""
    scales = (1.0,) if settings.target.name != "fp16" else FP16_SCALES
    if settings.loss_scale is not None:
        scales = (settings.loss_scale,)
    did_without = False
    outcome: Pass | Failure | None = None
    for scale in scales:
        outcome = _one_pass(model, batch, target, settings, scale, nullcontext())
        if isinstance(outcome, Failure) and "primitive" in outcome.message:
            did_without = True
            outcome = _one_pass(model, batch, target, settings, scale, without_onednn())
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
    forward = any(call.error.spoiled for call in outcome.calls) or not math.isfinite(outcome.loss or 0.0)
    return not forward and any(g.error.spoiled for g in outcome.gradients)


def _one_pass(
    model: nn.Module, batch: Any, target: Any, settings: Settings, scale: float, kernels: AbstractContextManager[Any]
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
        stack.enter_context(kept_wide(model, settings.wide, settings.device))
        if settings.policy == "full":
            stack.enter_context(cast_model(model, dtype, shadows))
            args, kwargs = cast_inputs((args, kwargs), dtype, shadows)
        stack.enter_context(torch.set_grad_enabled(settings.backward))
        try:
            with shadows, precision(settings.policy, dtype, settings.device):
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
    return _without_shadows(model, batch, target, watcher, error, settings, scale)


def _notes(state: KeptState) -> list[str]:
    written = state.written_parameters
    return [f"the forward pass writes into the parameter {written[0]}; it was put back"] if written else []


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
        calls=watcher.calls,
        activation_gradients=watcher.gradients,
        gradients=gradients,
        total=total,
        loss=None if loss is None else float(loss.detach()),
        reference_loss=None if loss is None else float(shadows.twin(loss).detach()),
        notes=tuple(notes),
        reseeds={f"{op}: {why}": count for (op, why), count in shadows.reseeds.items()},
        flips=watcher.flips,
        operations=watcher.operations,
        integers=watcher.integers,
        faults=watcher.faults,
        mixes=watcher.mixes,
    )


def _without_shadows(
    model: nn.Module,
    batch: Any,
    target: Any,
    watcher: PairWatcher,
    error: Exception,
    settings: Settings,
    scale: float,
) -> Pass | Failure:
    """The target run raised. In FP32 too: bad input. Without shadows too: a result. Else the runs come one after the other."""
    if isinstance(error, NannyError):
        raise error
    try:
        with separate_run(model, batch, target, settings, scale, low=False) as reference:
            pass
    except Exception as again:
        where = watcher.failed_at or "the model's own forward"
        raise NannyError(
            f"the model raises in FP32 too, so the sample input does not fit it ({type(again).__name__} in {where}: "
            f"{_first_line(again)}); save an input that model(input) accepts"
        ) from again
    try:
        with separate_run(model, batch, target, settings, scale, low=True) as low:
            calls, activation_gradients, gradients = low.beside(reference)
    except Exception as again:  # noqa: BLE001 - the user's model may raise anything, and that is a result
        return Failure("target", watcher.failed_at or "", f"{type(again).__name__}: {_first_line(again)}")
    shared, total = with_totals(gradients, scale)
    return Pass(
        calls=calls,
        activation_gradients=activation_gradients,
        gradients=shared,
        total=total if settings.backward else None,
        loss=low.loss,
        reference_loss=reference.loss,
        notes=(
            f"the two precisions could not run in one pass ({type(error).__name__}: {_first_line(error)}); they ran one after "
            f"the other, matched by module and call: own errors, flips and the table of operations are missing",
        ),
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
