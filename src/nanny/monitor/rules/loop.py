"""The order of calls in a loop, its mode and its batches: what is wrong with them in any precision."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...core.finding import Severity
from ...core.numbers import amount
from ...core.step import SiteTable, StepRecord
from ...diagnose.history import RunHistory, deviation, grad_norm
from ..registry import Observation, rule
from .ownership import breaches, evidence_of, names


@rule("GRADIENT_NEVER_CLEARED", Severity.ERROR, cause="gradient_never_cleared", once=True, needs="breaches")
def gradient_never_cleared(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The gradients of a step still hold those of the step before, on which the optimizer has stepped already.

    Why: backward adds to what is there. Each update is the sum of all batches so far: a momentum without an end, which grows
    until the run explodes, and looks like a learning rate that is too high.
    """
    for one in breaches(step, "uncleared"):
        if one.steps >= run.limits.uncleared_steps:
            yield Observation(
                f"the gradients of {names(one)} were not cleared between {amount(one.steps + 1, 'optimizer step')} in a row",
                "optimizer", value=float(one.steps), limit=run.limits.uncleared_steps, evidence=evidence_of(one), where=one.where,
            )  # fmt: skip


_WHY_STALE = {
    "again": "the gradient was bit for bit the one of the step before, and no backward pass had come between",
    "empty": "no parameter had a gradient, and no backward pass had come before",
    "cleared": "the gradients were cleared between backward and the step",
}


@rule("STEP_WITHOUT_BACKWARD", Severity.ERROR, cause="step_without_backward", once=True, needs="breaches")
def step_without_backward(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The optimizer steps on gradients that no backward pass has made since its last step.

    Why: it does nothing, or goes the same way once more; either way the step belongs to no batch.
    """
    for one in breaches(step, "no_backward"):
        if one.steps >= run.limits.stale_steps:
            yield Observation(
                f"so at {one.steps} of {amount(one.of, 'optimizer step')}: {_WHY_STALE[one.traits[0]]}",
                "optimizer", value=float(one.steps), limit=run.limits.stale_steps, evidence=evidence_of(one), where=one.where,
            )  # fmt: skip


@rule("BACKWARD_WITHOUT_STEP", Severity.ERROR, cause="backward_without_step", once=True, needs="breaches")
def backward_without_step(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Gradients are computed and no optimizer steps on them: they are cleared before, or it never steps at all.

    Why: the batch was paid for and nothing was learned from it. Accumulation that clears at every batch keeps the last one only.
    """
    for one in breaches(step, "no_step"):
        if "idle" in one.traits:
            if one.steps >= run.limits.never_at_end:
                yield Observation(
                    f"the gradients of {names(one)} were cleared {one.steps} times by their optimizer, which has never stepped",
                    one.names[0] if one.names else "optimizer", value=float(one.steps), limit=run.limits.never_at_end,
                    evidence=evidence_of(one), where=one.where,
                )  # fmt: skip
            continue
        needed = {"kept": run.limits.never_passes, "ended": run.limits.never_at_end}.get("".join(one.traits))
        if needed is not None:
            if one.steps >= needed:
                yield Observation(
                    f"{one.steps} backward passes added up, no optimizer has stepped at all, and no weight has moved",
                    "optimizer", value=float(one.steps), limit=needed, evidence=evidence_of(one), where=one.where,
                )  # fmt: skip
        elif "never" in one.traits:
            if one.steps >= run.limits.lost_windows:
                times = f"{one.steps} times in all, and no optimizer has stepped"
                yield Observation(
                    f"the gradients of {one.of} backward passes were cleared, {times}",
                    "optimizer", value=float(one.steps), limit=run.limits.lost_windows,
                    evidence=evidence_of(one), where=one.where,
                )  # fmt: skip
        elif one.steps >= run.limits.lost_steps and 2 * one.steps >= one.of:
            yield Observation(
                f"the gradients of {one.steps} of {amount(one.of, 'step')} were cleared before an optimizer took them",
                "optimizer", value=float(one.steps), limit=run.limits.lost_steps, evidence=evidence_of(one), where=one.where,
            )  # fmt: skip


@rule(
    "GRADIENT_GONE_FOR_ONE_STEP", Severity.WARNING, cause="gradient_gone_for_one_step", once=True,
    wakes=lambda quiet, run: not run.losses[-1] or not quiet.losses.all(),
)  # fmt: skip
def gradient_gone_for_one_step(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """After a long history the whole gradient, or that of the layer that takes the input, is exactly 0 at one step.

    Why: a real batch does not do that. A transfer or a message between ranks was lost, or the batch arrived empty or all zero.
    """
    if step.grads is None or step.skipped or not step.backwards or not step.stepped:
        return
    if "float16" in (step.amp_dtype, run.amp_dtype) or len(run.norms) < run.limits.gone_history:
        return
    if not step.loss:
        return
    yield from _gone_with_its_loss(step.grads, step.loss, run)
    if step.grads.are_all_live:
        return
    norms = np.asarray(step.grads.columns["norm"])
    if norms.all() and grad_norm(step):
        return
    usual = deviation([abs(loss) for loss in run.losses], abs(step.loss))
    if usual is None or usual.ratio < run.limits.gone_loss:
        return
    at = run.grads.columns(step.grads.names)
    was_zero = (run.grads.zero_record[at] > 0) | (run.grads.zero_steps[at] > 0)
    if grad_norm(step) == 0 and not was_zero.all() and run.grads.ever[at].any():
        yield Observation(
            f"the gradient of all {amount(len(step.grads.names), 'tensor')} is exactly 0, after "
            f"{amount(len(run.norms), 'step')} at which it was not; the loss is {step.loss:.4g}",
            "data", value=0.0, evidence={"parameters": list(step.grads.names[:8]), "steps": len(run.norms)},
        )  # fmt: skip
        return
    names, (layer, dot, _) = step.grads.names, step.grads.names[0].rpartition(".")
    name, beside = layer + dot + "weight", layer + dot + "bias"
    if name in names and beside in names and norms[names.index(beside)] > 0:
        weight = names.index(name)
        if norms[weight] == 0 and not was_zero[weight] and len(run.grads.past(name)) >= run.limits.gone_history:
            yield Observation(
                "its gradient is exactly 0 and that of its bias is not: at this step every number that came in was 0",
                name, value=0.0, evidence={"parameters": [name]},
            )  # fmt: skip


def _gone_with_its_loss(grads: SiteTable, loss: float, run: RunHistory) -> Iterator[Observation]:
    """The loss was exactly 0 as well, at the step before this one only: no sample of that batch counted, which some loops mean.

    A hinge that is met, or a reward of 0, comes slowly or again and again: its losses have been small, or of both signs, before.
    """
    if not run.losses or run.losses[-1] != 0:
        return
    before = list(run.losses)[:-1][-int(2 * run.limits.gone_history) :]
    if len(before) < run.limits.gone_history:
        return
    at = run.grads.columns(grads.names)  # may make new ones, so it comes first
    were_zero = run.grads.zero_steps[at]
    usual = deviation(before, loss)
    if usual is None or not (were_zero >= 1).all() or not (were_zero == 1).any():
        return
    if min(*before, loss) > run.limits.gone_small * usual.median:
        yield Observation(
            f"loss and gradient were exactly 0 at the step before this one alone; the loss is {loss:.4g} now, and was "
            f"{min(before):.4g} or more in the {amount(len(before), 'step')} before",
            "data", Severity.INFO, value=0.0, evidence={"steps": len(before)},
        )  # fmt: skip


_WHENCE = {
    "drawn": "; each was drawn anew, from random numbers that begin anew at each step",
    "slice": "; each is the same slice of something much larger",
}


@rule("SAME_BATCH_AGAIN", Severity.WARNING, cause="same_batch_again", once=True, needs="breaches")
def same_batch_again(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """A DataLoader with many batches, or a draw by hand, gives the same one again and again.

    Why: the model learns a few samples by heart and the loss looks splendid. An iterator is made anew at each step, workers or
    steps draw from generators that were seeded alike, or an index stands still.
    """
    for one in breaches(step, "same_batch"):
        by_hand = len(one.traits) > 1
        limit = run.limits.same_draws if by_hand else run.limits.same_batches
        if one.steps >= limit:
            whole = f" of {one.count}" if one.count else ""
            workers = int(one.traits[0])
            by = f"; {workers} workers give the same" if workers > 1 else _WHENCE.get(one.traits[-1], "")
            yield Observation(
                f"{one.steps} batches{whole} in a row were bit for bit one that came just before{by}",
                "data", value=float(one.steps), limit=limit, evidence=evidence_of(one),
            )  # fmt: skip


@rule("MODE_MISMATCH", Severity.WARNING, cause="mode_mismatch", once=True, needs="breaches")
def mode_mismatch(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The model is trained in evaluation mode, or evaluated in train mode, and has layers to which that matters.

    Why: in evaluation mode dropout is off and norms use old statistics; in train mode an evaluation is noisy, and its batches
    leak into the running statistics.
    """
    for one in breaches(step, "evaluation_mode"):
        if one.steps >= run.limits.mode_steps:
            yield Observation(
                f"the last {amount(one.steps, 'step')} trained in evaluation mode, and {names(one, 'module')} is another there",
                one.names[0], value=float(one.steps), limit=run.limits.mode_steps, evidence=evidence_of(one), where=one.where,
            )  # fmt: skip
    for one in breaches(step, "training_mode"):
        occasions = int(one.traits[0])
        # at every step, it is a part of the training: a target, a second view, a rollout
        if (occasions > 1 or one.steps >= run.limits.mode_steps) and one.of >= 4 and 2 * occasions < one.of:
            yield Observation(
                f"{amount(one.steps, 'call')} without gradients between the steps ran in train mode, and {names(one, 'module')} "
                "is another there",
                one.names[0], value=float(one.steps), evidence=evidence_of(one),
            )  # fmt: skip
