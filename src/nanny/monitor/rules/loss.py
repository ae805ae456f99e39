"""The loss curve."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...core.finding import Severity
from ...core.step import QuietSteps, StepRecord
from ...diagnose.history import RunHistory, deviation, grad_norm
from ..registry import Observation, rule


def _may_have_risen(quiet: QuietSteps, run: RunHistory) -> bool:
    """Above the lowest limit that the medians of these steps can make."""
    medians = run.losses.median_bounds(len(quiet))
    if run.loss_high or medians is None or medians[0] <= 0 <= medians[1]:
        return True
    limit = min(usual + (run.limits.loss_ratio - 1) * abs(usual) for usual in medians)
    return bool(quiet.losses.max() > limit - 1e-3 * abs(limit))


@rule("LOSS_SPIKE", Severity.WARNING, wakes=_may_have_risen)
def loss_spike(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The loss stays far above its own recent past.

    Why: a gradient spike has thrown the weights out of their region; often precision or a too high learning rate is behind it.

    Fix: look at GRAD_EXPLOSION and the loss scale just before; go back to a checkpoint, skip the batch, lower the learning rate.
    """
    limits, lately = run.limits, run.losses.comparable(step.loss_unit)
    if step.loss is None or not math.isfinite(step.loss) or len(lately) < limits.baseline_steps:
        run.loss_high = 0
        return
    known = deviation(lately, step.loss, logarithmic=False)
    high = (
        known is not None
        and step.loss - known.median > (limits.loss_ratio - 1) * abs(known.median)
        and not any(optimizer.maximizes for optimizer in run.optimizers)
        and known.zscore > limits.loss_zscore
        and step.loss > _lately_at_most(run)
    )
    run.loss_high = run.loss_high + 1 if high else 0
    if known is not None and high:
        if run.loss_high == 1:
            run.loss_jump = step.loss if not run.norm_high else 0.0
        # it jumped behind a usual update: the batches changed, not the weights, and may be learnt
        patience = limits.baseline_steps if run.loss_jump else limits.loss_high_steps
        lasting = run.loss_high >= patience and not step.loss < limits.loss_learnt * run.loss_jump
        yield Observation(
            f"loss {step.loss:.4g} against a median of {known.median:.4g}" + (f", for {run.loss_high} steps" if lasting else ""),
            "loss",
            severity=Severity.WARNING if lasting else Severity.INFO,
            value=step.loss,
            limit=known.median * limits.loss_ratio,
            evidence={"zscore": known.zscore, "steps": run.loss_high},
        )


def _lately_at_most(run: RunHistory) -> float:
    """The largest loss before the present rise: a heavy-tailed loss has shown its peaks before, and they are no spike."""
    losses = list(run.losses)[: len(run.losses) - run.loss_high]
    return max(losses[-2 * int(run.limits.baseline_steps) :], default=-math.inf)


@rule("LOSS_PLATEAU", Severity.WARNING, wakes=lambda quiet, run: run.same_loss + len(quiet) + 1 >= run.limits.plateau_steps)
def loss_plateau(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The loss is bit-identical for many steps, and that is not convergence.

    Why: nothing moves: updates round away, every step is skipped, or the loss is pinned (x/inf = 0 holds a Dice loss at 1).

    Fix: look at LOST_UPDATE and the skipped steps; check whether a sum inside the loss overflows in fp16.
    """
    if step.loss is None or not step.loss or run.same_loss + 1 < run.limits.plateau_steps or not step.lr:
        return
    norm = grad_norm(step)
    begun = float(np.median(run.first_norms)) if run.first_norms else 0.0
    if norm is None or (0 < norm < run.limits.converged * begun) or not run.losses or run.losses[-1] != step.loss:
        return
    if run.first_losses and abs(step.loss) < run.limits.converged * abs(run.first_losses[0]) and norm:
        return  # what it began with is learned, within a few steps of an optimizer that takes long ones
    seen = "gradients are exactly 0" if norm == 0 else f"the gradient norm is {norm:.3g}"
    yield Observation(f"loss is exactly {step.loss:.6g} for {run.same_loss + 1} steps; {seen}", "loss", value=step.loss)
