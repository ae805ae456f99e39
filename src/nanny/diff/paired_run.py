"""One batch through a model in both precisions at once: forward, loss and backward, with everything put back afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.finding import NannyError
from ..core.numbers import join_names, plain_name, relative, shorten
from ..measure.errors import compare, relative_l2
from ..watch.snapshot import KeptState, kept_state
from ..watch.tensors import outside_program, short_dtype
from ..watch.twins import Twins
from .policy import apply_policy, precision, without_onednn
from .records import CallDiff, Failure, GradDiff, GradTotals
from .separate_runs import SeparateRun, separate_run
from .settings import DiffSettings, loss_of
from .watch import PairWatcher, SeenOps

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
    loss_own: float | None = None
    reseeds: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (operation, why) -> times
    ops: SeenOps = field(default_factory=SeenOps)
    interrupted: bool = False  # the calls are those that were seen until then


def run_batch(settings: DiffSettings) -> Pass | Failure:
    """One pass; again with a smaller loss scale if fp16 gradients overflow, or without oneDNN if it lacks a kernel."""
    scales = (1.0,) if settings.target.name != "fp16" else FP16_SCALES
    if settings.loss_scale is not None:
        scales = (settings.loss_scale,)
    without: tuple[str, ...] = ()
    outcome: Pass | Failure | None = None
    scale = 1.0
    for scale in scales:
        outcome = _one_pass(settings, scale, nullcontext())
        if isinstance(outcome, Failure) and settings.device == "cpu":
            again = _one_pass(settings, scale, without_onednn())
            if not isinstance(again, Failure):
                without = ("oneDNN has no kernel for this model in the target type here; run without it",)
                outcome = again
        if isinstance(outcome, Failure) or not _overflowed_in_backward(outcome):
            break
    assert outcome is not None
    if isinstance(outcome, Failure):
        return outcome
    if outcome.ops.other_ways or outcome.reseeds:
        outcome = _beside_separate_runs(settings, scale, outcome)
    return replace(outcome, notes=(*outcome.notes, *without))


def _overflowed_in_backward(outcome: Pass) -> bool:
    forward = any(call.error.spoiled for call in outcome.calls) or not math.isfinite(outcome.loss or 0.0)
    return not forward and any(g.error.spoiled for g in outcome.gradients)


def _one_pass(settings: DiffSettings, scale: float, kernels: AbstractContextManager[Any]) -> Pass | Failure:
    model, watcher = settings.model, PairWatcher(settings, scale)
    error: Exception | None = None
    with ExitStack() as stack:
        state = stack.enter_context(kept_state(model, (*settings.batch, settings.labels)))
        wide = torch.float64 if settings.reference == "fp64" else torch.float32
        shadows = Twins(wide, watcher.ops, settings.own, state.before_write, watcher.site)
        stack.enter_context(kernels)
        stack.enter_context(watcher.watching(shadows))
        args, kwargs = stack.enter_context(apply_policy(settings, shadows))
        stack.enter_context(torch.set_grad_enabled(settings.backward))
        try:
            with shadows, precision(settings):
                output = model(*args, **kwargs)
                loss, note = loss_of(output, settings) if settings.backward else (None, "")
            own_loss = None if loss is None else shadows.own_value(loss)
            if loss is not None:
                with shadows:
                    (loss * scale).backward()
        except KeyboardInterrupt:
            if not watcher.calls:
                raise
            return replace(_pass_of(settings, watcher, None, None, scale, ()), interrupted=True)
        except Exception as raised:  # noqa: BLE001 - the user's model may raise anything, and that is a result
            error = raised
        else:
            notes = (*_changes(state), *_left_out(model), *([note] if note else []))
            return _pass_of(settings, watcher, loss, own_loss, scale, notes)
    assert error is not None
    return _without_shadows(settings, watcher, error, scale)


def _changes(state: KeptState) -> list[str]:
    """Buffers, caches and counters are put back without a word; a trained parameter that forward changes is refused."""
    changed = state.changed_parameters()
    if changed:
        raise NannyError(
            f"the forward pass changes the parameter {changed[0]}, so two runs of the model are not the same model; "
            f"move that update out of forward, or behind `if self.training` and use eval mode (nanny diff --eval)"
        )
    return ["the forward pass writes into its input; it was put back"] if state.changed_inputs() else []


def _left_out(model: nn.Module) -> list[str]:
    sparse = [n for n, p in model.named_parameters() if p.grad is not None and p.grad.layout != torch.strided]
    return [f"sparse gradients are not compared: {join_names(sparse)}"] if sparse else []


def _pass_of(
    settings: DiffSettings,
    watcher: PairWatcher,
    loss: Tensor | None,
    own_loss: Tensor | None,
    scale: float,
    notes: tuple[str, ...],
) -> Pass:
    shadows = watcher.shadows
    gradients, total = ((), None) if loss is None else _parameter_gradients(settings, watcher, scale)
    return Pass(
        calls=watcher.calls,
        activation_gradients=watcher.gradients,
        gradients=gradients,
        total=total,
        loss=None if loss is None else float(loss.detach()),
        reference_loss=None if loss is None else float(shadows.twin(loss).detach()),
        loss_own=None if loss is None or own_loss is None else relative_l2(own_loss, shadows.twin(loss)),
        notes=notes,
        reseeds=dict(shadows.reseeds),
        ops=watcher.ops.seen,
    )


def _beside_separate_runs(settings: DiffSettings, scale: float, outcome: Pass) -> Pass:
    """The reference could not be carried all the way: errors are then those of two runs, each going its own way."""
    try:
        with separate_run(settings, scale, low=False) as reference:
            pass
        with separate_run(settings, scale, low=True) as low:
            separate = _pass_of_two_runs(low, reference)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return replace(outcome, notes=(*outcome.notes, f"two separate runs were tried and failed: {_first_line(error)}"))
    errors = {(c.site, c.call): c.error for c in separate.calls}
    must_repeat(outcome.calls, separate.calls)
    unmatched = [c.name for c in outcome.calls if (c.site, c.call) not in errors]
    own = {g.name: g.own for g in outcome.gradients}
    ways = [f"a branch in {site or 'the model itself'}" for site in outcome.ops.other_ways]
    ways += [op for op, _ in outcome.reseeds]
    unlike = f"; without a counterpart: {join_names(unmatched)}" if unmatched else ""
    note = (
        f"the two precisions go different ways ({join_names(list(dict.fromkeys(ways)))}): errors are of two runs, one after the "
        f"other, matched by module and call{unlike}"
    )
    return replace(
        outcome,
        calls=[replace(c, error=errors.get((c.site, c.call), c.error)) for c in outcome.calls],
        gradients=tuple(replace(g, own=own.get(g.name)) for g in separate.gradients),
        activation_gradients=separate.activation_gradients,
        total=separate.total,
        loss=separate.loss,
        reference_loss=separate.reference_loss,
        notes=(*outcome.notes, note),
    )


def _pass_of_two_runs(low: SeparateRun, reference: SeparateRun, *notes: str) -> Pass:
    calls, activation_gradients, parameters = low.beside(reference)
    gradients, total = _with_totals(parameters, low.scale)
    return Pass(
        calls=calls,
        activation_gradients=activation_gradients,
        gradients=gradients,
        total=total if low.settings.backward else None,
        loss=low.loss,
        reference_loss=reference.loss,
        notes=notes,
    )


def must_repeat(calls: Sequence[CallDiff], again: Sequence[CallDiff]) -> None:
    """Refuses a model whose second run, from the same weights, input and random state, is not the first one."""
    before = {c.call: c.error.norm for c in calls if not c.site}
    for call in again:
        first = before.get(call.call) if not call.site else None
        if first is not None and math.isfinite(first) and not math.isclose(first, call.error.norm, rel_tol=1e-3):
            raise NannyError(
                "the model gives another result when it runs again on the same input, weights and random state; make it "
                "repeatable (seed what is random in it: clocks, os.urandom and fresh generators are not reset), then try again"
            )


def _without_shadows(settings: DiffSettings, watcher: PairWatcher, error: Exception, scale: float) -> Pass | Failure:
    """The target run raised. In FP32 too: bad input. Without shadows too: a result. Else the runs come one after the other."""
    if isinstance(error, NannyError):
        raise error
    try:
        with separate_run(settings, scale, low=False) as reference:
            pass
    except Exception as again:
        where = watcher.failed_at or "the model's own forward"
        if not settings.backward and _runs_in_fp32(replace(settings, backward=True), scale):
            raise NannyError(
                f"the model differentiates inside its forward ({where}), which needs gradients; leave out --no-backward "
                f"(backward=False)"
            ) from again
        if watcher.failed_at is None and any(not c.site for c in watcher.calls):
            given = "loss(output)" if settings.labels is None else "loss(output, target)"
            raise NannyError(
                f"the loss or its backward raises in FP32 too, called as {given} ({type(again).__name__}: {_first_line(again)}); "
                f"give a loss that fits the output and the target"
            ) from again
        raise NannyError(
            f"the model raises in FP32 too, so the sample input does not fit it ({type(again).__name__} in {where}: "
            f"{_first_line(again)}); save an input that model(input) accepts"
        ) from again
    try:
        with separate_run(settings, scale, low=True) as low:
            pass
    except Exception as again:  # noqa: BLE001 - the user's model may raise anything, and that is a result
        return Failure("target", watcher.failed_at or "", f"{type(again).__name__}: {_first_line(again)}")
    note = (
        f"the two precisions could not run in one pass ({type(error).__name__}: {_first_line(error)}); they ran one after "
        f"the other, matched by module and call: own errors, flips and the table of operations are missing"
    )
    return _pass_of_two_runs(low, reference, note)


def _runs_in_fp32(settings: DiffSettings, scale: float) -> bool:
    try:
        with separate_run(settings, scale, low=False):
            return True
    except Exception:  # noqa: BLE001 - the user's model may raise anything, and that is the answer
        return False


def _first_line(error: Exception) -> str:
    return shorten(str(error).strip().partition("\n")[0], 240)


def _parameter_gradients(settings: DiffSettings, watcher: PairWatcher, scale: float) -> tuple[tuple[GradDiff, ...], GradTotals]:
    """Each parameter's gradient with its share of the whole, and the whole. Unscaled."""
    out: list[GradDiff] = []
    with outside_program():
        for name, parameter in settings.model.named_parameters():
            if parameter.grad is None or parameter.grad.layout != torch.strided:
                continue
            real, twin = parameter.grad, watcher.shadows.twin(parameter.grad)
            if scale != 1:
                real, twin = real.to(twin.dtype) / scale, twin / scale
            out.append(
                GradDiff(
                    name=plain_name(name),
                    kind="parameter",
                    order=len(out),
                    dtype=short_dtype(parameter.grad.dtype),
                    shape=tuple(parameter.shape),
                    error=compare(real, twin, settings.target, settings.limits),
                    own=watcher.own_of_parameters.get(plain_name(name)),
                )
            )
    return _with_totals(out, scale)


def _with_totals(gradients: list[GradDiff], scale: float) -> tuple[tuple[GradDiff, ...], GradTotals]:
    """Each gradient with its share of the whole, and the whole: error, target and reference are the sides of a triangle."""
    squares = sum(g.error.reference_norm**2 for g in gradients)
    shared = tuple(replace(g, energy=g.error.reference_norm**2 / squares if squares else 0.0) for g in gradients)
    errors = [g.error.rel_l2 * g.error.reference_norm if g.error.reference_norm else g.error.norm for g in gradients]
    size, error = math.sqrt(squares), math.sqrt(sum(e * e for e in errors))
    norm = math.sqrt(sum(g.error.norm**2 for g in gradients))
    cosine = (norm**2 + size**2 - error**2) / (2 * norm * size) if norm and size else None
    return shared, GradTotals(relative(error, size), cosine, size, scale)
