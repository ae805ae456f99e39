"""Where a model in BF16 or FP16 parts from its FP32 self: which layer, how much, and whether it is the layer's own fault.

    report = nanny.auto_diff(model, batch, torch.bfloat16, loss_fn=loss)      print(report)

Both precisions run in one pass (`watch.twins`), on the same weights, inputs and random numbers. The model, its gradients,
its buffers and the random state are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.finding import NannyError
from ..core.formats import Format, format_of
from ..core.limits import Limits
from ..watch.names import unwrap
from ..watch.tensors import float_leaves
from .advisor import find_advice, run_trials
from .blame import needs_closer_look, needs_floor, suspects, warn_limit
from .floor import error_floor
from .judge import judge_diff
from .paired_run import Pass, must_repeat, run_batch
from .records import POLICIES, REFERENCES, CallDiff, DiffReport, Failure, Flip, GradDiff, OpUse
from .settings import DiffSettings

Progress = Callable[[str], None]


def auto_diff(
    model: nn.Module,
    sample_input: Any,
    target_dtype: torch.dtype | str = "bfloat16",
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    backward: bool = True,
    own: bool = True,
    policy: str = "native",
    reference: str = "fp32",
    loss_scale: float | None = None,
    rel_warn: float | None = None,
    rel_error: float | None = None,
    limits: Limits | None = None,
    advise: bool | float = False,
    progress: Progress | None = None,
) -> DiffReport:
    """Runs `model` on `sample_input` in the target precision and in the reference at once, and compares every module call.

    `sample_input`: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of such batches. `loss_fn(output)`, or
    `loss_fn(output, target)` with a target (a list of them for a list of batches). `own=False` leaves out the layers' own errors
    and is faster. `advise`: also look for the modules to keep in FP32 so that the output error falls below this number (True:
    below what a healthy model shows). `rel_warn` and `rel_error` turn plain limits of the relative error into a rule. An
    interrupt (Ctrl-C) gives the calls seen until then, in a report that is marked `partial`.
    """
    if reference not in REFERENCES:
        raise NannyError(f"unknown reference {reference!r}; use one of: {', '.join(REFERENCES)}")
    if policy not in POLICIES:
        raise NannyError(f"unknown policy {policy!r}; use one of: {', '.join(POLICIES)}")
    if advise and not own:
        raise NannyError("the advisor needs each layer's own error; leave out own=False")
    device, limits = _device_of(model), limits or Limits()
    settings = DiffSettings(
        unwrap(model), _target(target_dtype), reference, policy, backward, own, loss_fn, loss_scale, limits, device
    )
    batches = _as_batches(sample_input)
    labels = _as_targets(target, sample_input, len(batches))
    samples = [replace(settings, batch=batch, labels=of_batch) for batch, of_batch in zip(batches, labels)]
    report = _run_batches(samples, progress)
    report = replace(report, input_nan=sum(int(t.isnan().sum()) for t in float_leaves((batches, labels))))
    if report.failure is None and not report.partial:
        try:
            report = _explain(samples, report, advise, progress)
        except KeyboardInterrupt:
            report = replace(report, partial=True, notes=(*report.notes, "interrupted while looking for the cause"))
    return replace(report, findings=judge_diff(report, limits, rel_warn, rel_error))


def _run_batches(samples: Sequence[DiffSettings], progress: Progress | None) -> DiffReport:
    """All batches, or what was seen before an interrupt or a failure."""
    passes: list[Pass] = []
    failure: Failure | None = None
    notes: list[str] = []
    stopped = False
    for number, sample in enumerate(samples):
        where = f"batch {number + 1} of {len(samples)}"
        try:
            outcome = run_batch(_with_progress(sample, progress, where))
        except KeyboardInterrupt:
            if not passes:
                raise
            stopped = True
            notes.append(f"interrupted after {number} of {len(samples)} batches; the numbers are of those")
            break
        if isinstance(outcome, Failure):
            failure = outcome
            break
        passes.append(outcome)
        if outcome.interrupted:
            notes.append(f"interrupted in {where}, after {len(outcome.calls)} module calls; what came later is missing")
            break
    if failure is None and not any(p.calls for p in passes):
        raise NannyError("the model returns no floating-point numbers for this input, so there is nothing to compare")
    report = _merge_passes(samples[0], passes, failure, notes)
    return replace(report, partial=report.partial or stopped)


def _merge_passes(settings: DiffSettings, passes: Sequence[Pass], failure: Failure | None, notes: Sequence[str]) -> DiffReport:
    calls = _worst_calls([p.calls for p in passes])
    parents = {site.rpartition(".")[0] for site in {c.site for c in calls} if site}
    leaves = [c for c in calls if c.site and c.site not in parents]
    return DiffReport(
        model=type(settings.model).__name__,
        target=settings.target.name,
        reference=settings.reference,
        policy=settings.policy,
        device=settings.device,
        training=settings.model.training,
        batches=len(passes),
        calls=calls,
        gradients=_worst_gradients([p.gradients for p in passes]),
        activation_gradients=_worst_gradients([p.activation_gradients for p in passes]),
        total=max((p.total for p in passes if p.total), key=lambda t: t.rel_l2, default=None),
        loss=passes[-1].loss if passes else None,
        reference_loss=passes[-1].reference_loss if passes else None,
        loss_own=passes[-1].loss_own if passes else None,
        floor=settings.target.unit_roundoff * max(len(leaves), 1) ** 0.5,
        flips=_flips(passes),
        operations=tuple(OpUse(*key, count) for key, count in passes[0].ops.operations.items()) if passes else (),
        flops=dict(passes[0].ops.flops) if passes else {},
        integers=tuple({key: lost for p in passes for key, lost in p.ops.integers.items()}.values()),
        mixes=tuple({site: mix for p in passes for site, mix in p.ops.mixes.items()}.values()),
        failure=failure,
        partial=any(p.interrupted for p in passes),
        reseeds={f"{op}: {why}": n for p in passes for (op, why), n in p.reseeds.items()},
        notes=tuple(dict.fromkeys([*notes, *(note for p in passes for note in p.notes)])),
    )


def _worst_calls(batches: Sequence[Sequence[CallDiff]]) -> tuple[CallDiff, ...]:
    """Each call with the numbers of its worst batch, and the mean of its relative error over all."""
    groups: dict[tuple[str, int], list[CallDiff]] = {}
    for number, calls in enumerate(batches):
        for call in calls:
            groups.setdefault((call.site, call.call), []).append(replace(call, batch=number))
    worst = []
    for group in groups.values():
        one = max(group, key=lambda c: (c.error.spoiled > 0, c.error.worst))
        worst.append(replace(one, mean_rel_l2=sum(c.error.rel_l2 for c in group) / len(group)))
    return tuple(sorted(worst, key=lambda c: c.order))


def _worst_gradients(batches: Sequence[Sequence[GradDiff]]) -> tuple[GradDiff, ...]:
    worst: dict[tuple[str, int], GradDiff] = {}
    for gradients in batches:
        for one in gradients:
            held = worst.get((one.name, one.call))
            if held is None or (one.error.spoiled > 0, one.error.rel_l2) > (held.error.spoiled > 0, held.error.rel_l2):
                worst[(one.name, one.call)] = one
    return tuple(sorted(worst.values(), key=lambda g: g.order))


def _flips(passes: Sequence[Pass]) -> tuple[Flip, ...]:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for one in passes:
        for key, (flipped, count) in one.ops.flips.items():
            before = sums.get(key, (0, 0))
            sums[key] = (before[0] + flipped, before[1] + count)
    return tuple(Flip(site, op, flipped, count) for (site, op), (flipped, count) in sums.items() if flipped)


def _with_progress(settings: DiffSettings, progress: Progress | None, where: str) -> DiffSettings:
    """DiffSettings that tell of every module call."""
    if progress is None:
        return settings
    seen = 0

    def on_call(site: str) -> None:
        nonlocal seen
        seen += 1
        progress(f"{where}: module call {seen}, {site or 'the model'}")

    return replace(settings, on_call=on_call)


def _explain(samples: Sequence[DiffSettings], report: DiffReport, advise: bool | float, progress: Progress | None) -> DiffReport:
    """Further runs, for trouble only: what rounding explains, which operation it is, what helps."""
    limits = samples[0].limits
    if needs_floor(report, limits):
        floor = error_floor(samples[0])
        report = replace(report, output_floor=floor.output, input_floor=floor.output_by_input, gradient_floor=floor.gradient)
    worst = samples[max(report.outputs, key=lambda c: (c.error.spoiled > 0, c.error.worst)).batch if report.outputs else 0]
    if needs_closer_look(report, limits):
        report = _look_closely(_with_progress(worst, progress, "a closer look"), report)
        sites = suspects(report, limits) if worst.own else ()
        if sites:
            report = replace(report, trials=run_trials(_with_progress(worst, progress, "kept in FP32"), report, sites))
    if advise:
        goal = warn_limit(report, limits) if advise is True else float(advise)
        report = replace(report, advice=find_advice(_with_progress(worst, progress, "advice"), report, goal))
    return report


def _look_closely(settings: DiffSettings, report: DiffReport) -> DiffReport:
    scale = report.total.loss_scale if report.total else settings.loss_scale
    again = run_batch(replace(settings, closely=True, loss_scale=scale))
    if isinstance(again, Failure):
        return report
    must_repeat(report.outputs, [c for c in again.calls if not c.site])
    return replace(report, faults=tuple(again.ops.faults.values()), op_errors=tuple(again.ops.errors))


def _target(dtype: object) -> Format:
    target = format_of(dtype)
    if target.name not in ("fp16", "bf16"):
        raise NannyError(f"{target.name} is no target that a model can run in; use bf16 or fp16")
    return target


def _device_of(model: Any) -> str:
    if not isinstance(model, nn.Module):
        raise NannyError(f"auto_diff needs a torch.nn.Module, not {type(model).__name__}")
    if any(is_lazy(p) for p in model.parameters()):
        raise NannyError("the model has lazy layers that have no weights yet; run it once on a batch first: model(x)")
    devices = {t.device.type for t in chain(model.parameters(), model.buffers())}
    if "meta" in devices:
        raise NannyError("the model is on the meta device and holds no values; load its weights first (load_state_dict)")
    return next(iter(devices - {"cpu"}), "cpu")


def _as_batches(sample: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A list is a list of batches; a tuple is the arguments of one call, a dict its keyword arguments."""
    batches = sample if isinstance(sample, list) else [sample]
    if not batches:
        raise NannyError("the list of sample inputs is empty; give at least one batch")
    out: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for batch in batches:
        if isinstance(batch, dict):
            if not all(isinstance(key, str) for key in batch):
                raise NannyError("a dict of inputs is passed as keyword arguments; its keys must be names")
            out.append(((), dict(batch)))
        elif isinstance(batch, (tuple, list)):
            out.append((tuple(batch), {}))
        else:
            out.append(((batch,), {}))
    return out


def _as_targets(target: Any, sample: Any, count: int) -> list[Any]:
    if not isinstance(sample, list):
        return [target]
    if target is None:
        return [None] * count
    if not isinstance(target, (list, tuple)) or len(target) != count:
        raise NannyError(f"there are {count} batches; give a list of {count} targets, one for each")
    return list(target)
