"""The loss scale: what GradScaler does by itself is information, what it cannot mend is not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...core.finding import Severity
from ...core.numbers import share
from ...core.step import StepRecord
from ...diagnose.first_nonfinite import bad_sites, forward_culprit
from ...diagnose.history import RunHistory
from ..registry import Observation, rule


def why_skipped(step: StepRecord) -> str:
    """The three-way split: forward not finite, scale too high, singular backward."""
    if step.loss is None and step.grads is None:
        return "the scale alone does not tell why: watch the model too"
    if forward_culprit(step) is not None or (step.loss is not None and not abs(step.loss) < float("inf")):
        return "the forward pass is not finite, so no loss scale can help"
    if step.scale is not None and step.scale <= 1:
        if step.grads is not None and not np.isnan(np.asarray(step.grads.columns["min"])).any():
            return "gradients overflow even at a scale of 1 or less: they are themselves beyond the range of fp16"
        return "gradients are NaN even at a scale of 1 or less: a derivative is singular (sqrt, norm or log at 0)"
    return "activations and loss are finite, only the scaled gradients overflow"


@rule("STEP_SKIPPED", Severity.INFO, needs="skipped")
def step_skipped(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """GradScaler skipped the optimizer step because a gradient was not finite.

    Why: now and then this is how the scaler finds its scale; it costs one step.

    Fix: nothing, unless it goes on; then see SCALE_DECLINE.
    """
    if step.skipped:
        bad = bad_sites(step.grads)
        names = ", ".join(f"`{n}`" for n in bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        yield Observation(
            f"optimizer step skipped at loss scale {step.scale:g}; not finite: {names or 'unknown'}",
            "scaler",
            value=step.scale,
            evidence={"overflowed": bad, "scale_after": step.scale_after},
        )


@rule("SCALE_DECLINE", Severity.ERROR, needs="skipped")
def scale_decline(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Many skipped steps in a row, after the scaler had already found a working scale.

    Why: each one halves the scale and throws the step away; the weights do not move.

    Fix: if the forward pass is not finite, mend the producer (FP32 for that layer). If it is, something multiplies the gradients:
    look for a singular derivative (sqrt or norm at 0, log of 0) or a sudden jump of the loss.
    """
    in_row = run.skips_in_row + 1
    if (
        step.skipped
        and run.stepped_once
        and in_row >= run.limits.scale_skips_error
        and run.pinned + 1 < run.limits.scale_skips_error
    ):
        yield Observation(
            f"{in_row} optimizer steps skipped in a row, loss scale at {step.scale:g}; {why_skipped(step)}",
            "scaler",
            value=in_row,
            limit=run.limits.scale_skips_error,
            evidence={"overflowed": bad_sites(step.grads), "scale": step.scale},
        )


@rule("SCALE_COLLAPSE", Severity.ERROR, needs="skipped")
def scale_collapse(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The loss scale fell below 1 and the steps are still skipped.

    Why: GradScaler has no floor, it halves for ever. Below 1 the gradients themselves do not fit, or are NaN at any scale.

    Fix: if the forward pass is not finite, mend the layer that made the first infinity. If gradients are NaN, look for sqrt, norm
    or log at 0. If they overflow, scale the loss down or compute the layers with the largest gradients in FP32 or BF16.
    """
    if not step.skipped:
        return
    in_row = run.skips_in_row + 1
    after = step.scale_after if step.scale_after is not None else step.scale
    if after is not None and after < run.limits.scale_floor and in_row >= run.limits.scale_collapse_skips:
        yield Observation(
            f"loss scale collapsed to {after:g} after {in_row} skipped steps in a row; {why_skipped(step)}",
            "scaler",
            value=after,
            limit=run.limits.scale_floor,
            evidence={"overflowed": bad_sites(step.grads)},
        )


@rule("SCALE_PINNED", Severity.ERROR, cause="loss_scale_pinned", needs="skipped")
def scale_pinned(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Every step overflows and the loss scale does not move.

    Why: the scaler is made anew or its scale is set by hand each step, or `update()` is not called; it cannot back off, and
    the weights never change.
    """
    if run.is_pinned(step) and run.pinned + 1 >= run.limits.scale_skips_error:
        yield Observation(
            f"{run.pinned + 1} steps in a row skipped while the loss scale stayed near {step.scale:g}",
            "scaler",
            value=step.scale,
            evidence={"overflowed": bad_sites(step.grads)},
        )
    elif run.is_begun_anew(step) and run.searches_begun + 1 >= run.limits.scale_searches:
        yield Observation(
            f"{run.skips_in_row + 1} steps in a row skipped, and the loss scale was put back to {step.scale:g} "
            "before it had fallen far enough",
            "scaler",
            value=step.scale,
            evidence={"overflowed": bad_sites(step.grads)},
        )


@rule("SKIP_RATE", Severity.WARNING, needs="skipped")
def skip_rate(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """GradScaler skips far more steps than its own growth would explain.

    Why: a healthy scaler overflows about once per growth interval. More means the gradients swing over several orders.

    Fix: find the layers named under `overflowed`; lower the learning rate or clip after `scaler.unscale_`.
    """
    limits = run.limits
    window = [*run.skips, step.skipped]
    if not step.skipped or len(window) < limits.skip_window / 2:
        return
    rate = sum(window) / len(window)
    expected = 1.0 / step.growth_interval if step.growth_interval else 0.0
    if rate > max(limits.skip_rate_warn, 3 * expected) and sum(window) >= 4:
        severe = rate > max(limits.skip_rate_error, 3 * expected)
        yield Observation(
            f"{sum(window)} of the last {len(window)} steps were skipped ({share(rate)}); {share(expected)} would be usual",
            "scaler",
            severity=Severity.ERROR if severe else None,
            value=rate,
            limit=limits.skip_rate_warn,
            evidence={"overflowed": bad_sites(step.grads)},
        )


@rule("SCHEDULE_AHEAD", Severity.WARNING, wakes=lambda quiet, run: run.last_skipped)
def schedule_ahead(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The learning rate schedule moves on at steps that GradScaler skips.

    Why: a schedule counts steps that were made. Those that were not shorten the warmup and the time at a high rate.

    Fix: call `scheduler.step()` only if the scale did not fall: compare `scaler.get_scale()` before and after `scaler.update()`.
    """
    before = run.scalars.get("lr")
    if not run.last_skipped or before is None or step.lr is None or step.lr == before:
        return
    run.schedule_skips += 1
    seen = run.schedule_skips
    if seen > run.limits.schedule_skips and seen > run.limits.skip_rate_error * run.steps:
        yield Observation(
            f"the learning rate moved on at {seen} skipped steps of {run.steps}: the schedule is so far ahead of the training",
            "scheduler",
            value=seen,
            limit=run.limits.schedule_skips,
        )


def _has_sunk(step: StepRecord, run: RunHistory) -> bool:
    """By more than one step back, which is how it finds its scale."""
    scale, began = step.scale_after, run.first_good_scale
    return scale is not None and began is not None and 2 * scale < began


@rule("SCALE_LOW", Severity.WARNING, wakes=lambda quiet, run: _has_sunk(quiet.last, run))
def scale_low(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The loss scale has sunk far below the one at which steps first passed.

    Why: small gradients may flush to zero. Which scale is low depends on the model: where the search for one ends, is no fault.

    Fix: compare the flushed share: `nanny whatif --dtype fp16 --scale` with this scale.
    """
    scale, began = step.scale_after, run.first_good_scale
    if scale is None or began is None or not _has_sunk(step, run):
        return
    if len(run.scales) < run.limits.baseline_steps:  # and the first steps are the search for it
        return
    limit = max(run.limits.scale_low_warn if began >= run.limits.scale_low_warn else 0.0, run.limits.scale_sunk * began)
    if scale < limit:
        yield Observation(f"loss scale is {scale:g}, the first steps passed at {began:g}", "scaler", value=scale, limit=limit)


@rule("CLIP_BEFORE_UNSCALE", Severity.ERROR, cause="clip_before_unscale", needs="clipped_scaled")
def clip_before_unscale(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Gradients were clipped while still multiplied by the loss scale.

    Why: the threshold is meant for true gradients. Clipped to max_norm and then divided by the scale, the update is some
    65536 times too small.
    """
    by_hand = any("divided_by_hand" in exam.facts for exam in run.examinations)
    if step.clipped_scaled and step.scale is not None and step.clipped is not None and not by_hand:
        real = step.clipped / step.scale
        yield Observation(
            f"gradients were clipped to {step.clipped:g} while scaled by {step.scale:g}: the real threshold was {real:.3g}",
            "scaler",
            value=step.scale,
        )


@rule("STALE_GRADS", Severity.ERROR, cause="stale_inf_grads", needs="stale")
def stale_grads(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Non-finite gradients of a former step were still there when backward began.

    Why: new gradients are added to the old ones; inf plus anything stays inf, so every later step is skipped too.
    """
    if step.stale:
        more = f" and {len(step.stale) - 1} more" if len(step.stale) > 1 else ""
        yield Observation(
            f"`{step.stale[0]}`{more} still held a non-finite gradient from an earlier step when backward began",
            step.stale[0],
            evidence={"parameters": list(step.stale)},
        )
