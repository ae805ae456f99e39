"""Who trains what: parameters that no optimizer has, that get no gradient, that do not move, or move though they are frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...core.finding import Severity
from ...core.numbers import amount, short
from ...core.step import Breach, SiteTable, StepRecord
from ...diagnose.history import RunHistory
from ...diagnose.signs import Signs
from ..registry import Observation, rule


def breaches(step: StepRecord, kind: str) -> Iterator[Breach]:
    return (one for one in step.breaches if one.kind == kind)


def names(breach: Breach, what: str = "tensor") -> str:
    """`a.weight`, `a.bias` and 3 more (5 tensors, 1.2M elements)."""
    shown = ", ".join(f"`{name}`" for name in breach.names[:2])
    more = f" and {breach.count - 2} more" if breach.count > 2 else ""
    size = f" ({amount(breach.count, what)}, {short(breach.elements)} elements)" if breach.elements else ""
    return f"{shown}{more}{size}"


def evidence_of(breach: Breach) -> dict[str, object]:
    return {"names": list(breach.names), "count": breach.count, "steps": breach.steps, "traits": list(breach.traits)}


@rule("STEP_CHANGES_NOTHING", Severity.ERROR, cause="step_changes_nothing", once=True, needs="breaches")
def step_changes_nothing(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The optimizer steps, and no parameter of the model moves.

    Why: nothing is learned. Its parameters are not the model's (built before the model was wrapped, copied or made anew), its
    learning rate is 0 or too small for the weights, or its step does nothing.
    """
    for one in breaches(step, "still"):
        if "faded" in one.traits:
            if step.lr is not None and _has_gradient(step, run) and not Signs(run.evidence(())).learns:
                yield Observation(
                    f"the learning rate, now {step.lr:g}, has been a thousandth of its highest, or less, for "
                    f"{amount(one.steps, 'step')}, and was above that for {one.of}; the loss is where it was",
                    "optimizer.lr", severity=Severity.WARNING, value=float(one.steps), evidence=evidence_of(one), where=one.where,
                )  # fmt: skip
            continue
        if "others" in one.traits:
            reason = f"none of its parameters is one of the model's, and no optimizer holds {names(one)}"
        elif "cleared" in one.traits:
            reason = "its gradients were there and are exactly 0 when it steps, clipped to 0 or overwritten"
        elif "no_rate" in one.traits or step.lr == 0:
            reason = "its learning rate is 0"
        elif "narrow" in one.traits:
            reason = f"its updates, at a learning rate of {step.lr:g}, round away in the 16 bits of the weights"
        else:
            reason = f"learning rate {step.lr:g}" if step.lr is not None else "its step does nothing"
        if "others" not in one.traits and not _has_gradient(step, run):
            continue
        later = "later" in one.traits
        if not later:
            steps, enough = one.of, one.steps >= run.limits.still_looks
            if "no_rate" in one.traits:
                enough = one.of >= run.limits.still_steps
            elif "rises" in one.traits:
                enough = one.of >= run.limits.still_rising
        else:
            tail = 0.0 if "sudden" in one.traits else run.limits.still_tail * one.of
            steps, enough = one.steps, one.steps >= run.limits.still_again and one.steps > tail
        if enough:
            did, since = amount(steps, "optimizer step"), f"; {amount(one.of, 'step')} before moved them" if later else ""
            yield Observation(
                f"{did} and at most 1 % of the weights changed at each: {reason}{since}" if "nearly" in one.traits
                else f"{did} and every weight is bit for bit what it was: {reason}{since}",
                "optimizer", severity=Severity.WARNING if later or "rises" in one.traits else None,
                value=float(steps), evidence=evidence_of(one), where=one.where,
            )  # fmt: skip


def _has_gradient(step: StepRecord, run: RunHistory) -> bool:
    """More than the rounding noise of a loss that is flat, and not so much that an optimizer's own squares overflow."""
    if step.grads is None or step.grads.whole_norm is None:
        return False
    rms = step.grads.whole_norm / float(np.sum(step.grads.columns["count"])) ** 0.5
    return run.limits.still_gradient < rms < 1e15


@rule("IN_NO_OPTIMIZER", Severity.WARNING, cause="in_no_optimizer", once=True, needs="breaches")
def in_no_optimizer(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Parameters that are trainable and get gradients belong to no optimizer, and never move.

    Why: this part of the model keeps its first, random weights for good; the rest learns around it and the loss still falls.
    """
    for one in breaches(step, "unowned"):
        if one.of >= run.limits.unowned_steps:
            yield Observation(
                f"{names(one)}: trainable, with a gradient at {amount(one.steps, 'look')}, in no optimizer, and never moved",
                one.names[0], value=float(one.count), evidence=evidence_of(one), where=one.where,
            )  # fmt: skip


@rule("TRAINED_BUT_FROZEN", Severity.WARNING, cause="trained_but_frozen", once=True, needs="breaches")
def trained_but_frozen(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """What is meant to be frozen moves: weights that the optimizer goes on with, or running statistics in train mode.

    Why: the optimizer takes whatever gradient, momentum or decay is left, and norms in train mode follow the batches;
    a pretrained stage is worn away without a word.
    """
    for one in breaches(step, "frozen_moves"):
        if one.steps >= 2:
            yield Observation(
                f"{names(one)}: requires_grad is False, and the optimizer still moves it",
                one.names[0], value=float(one.count), evidence=evidence_of(one), where=one.where,
            )  # fmt: skip
    for one in breaches(step, "frozen_statistics"):
        if one.steps >= 2:
            yield Observation(
                f"{names(one)}: every weight of the stage is frozen, and its running statistics follow the batches (train mode)",
                one.names[0], value=float(one.count), evidence=evidence_of(one), where=one.where,
            )  # fmt: skip
    for one in breaches(step, "said_frozen"):
        yield Observation(
            f"{names(one)}: was told to be frozen by an attribute that torch does not know, and is trained",
            one.names[0], value=float(one.count), evidence=evidence_of(one), where=one.where,
        )  # fmt: skip


_SEVERITIES = {"idle": Severity.INFO, "unused": Severity.INFO, "nowhere": Severity.ERROR}
_WHY_NONE = {
    "nowhere": "all of them are exactly 0, in FP32 too, and the loss is not: two factors that are both 0, or an output that is "
    "saturated",
    "ran": "its module runs at every step and its output does not reach the loss with a gradient",
    "unused": "its module runs within a library's model, and the program does not use what it gives",
    "without_grad": "its module runs without gradients (no_grad)",
    "idle": "its module was never called",
    "unread": "its module was never called, and no line of the program names it but the one that makes it",
}


def _is_zero_in_fp32(names: Sequence[str], step: StepRecord, run: RunHistory) -> bool:
    """bf16 reaches as far as FP32; in fp16 it takes an examination to tell."""
    if run.amp_dtype != "float16" and (step.grads is None or "float16" not in step.grads.dtypes):
        return True
    seen = [g.reference_norm for exam in run.examinations for g in exam.gradients if g.name in names]
    return bool(seen) and not any(seen)


def _is_short_format(run: RunHistory, names: Sequence[str]) -> bool:
    """A gradient of these is exactly 0, and in FP32 it is not: that is underflow, and nothing cuts it off."""
    return any(g.reference_norm > 0 == g.norm for exam in run.examinations for g in exam.gradients if g.name in names)


def _has_dead_output(traced: StepRecord | None) -> bool:
    """A module put out nothing but 0, and not for its weights: units that are off have no gradient, DEAD_LAYER tells of them."""
    if traced is None or traced.outputs is None:
        return False
    by_weight = {name.rpartition(".")[0] for name in _zeros(traced.weights)}
    return any(name not in by_weight for name in _zeros(traced.outputs))


def _zeros(table: SiteTable | None) -> list[str]:
    if table is None:
        return []
    low, high = (np.asarray(table.columns[name]) for name in ("min", "max"))
    return [table.names[i] for i in np.flatnonzero((low == 0) & (high == 0))]


@rule("NO_GRADIENT_ARRIVES", Severity.WARNING, cause="no_gradient_arrives", once=True, needs="breaches")
def no_gradient_arrives(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Parameters that are trainable and in an optimizer have had no gradient, or exactly 0, from the first step on.

    Why: a detach, a no_grad, a rounding or an index cuts them off from the loss, or the loss leaves their output out; they
    keep their first weights for good.
    """
    for one in breaches(step, "no_gradient"):
        if "unconnected" in one.traits:
            if one.steps >= run.limits.still_looks:
                yield Observation(
                    f"no parameter has had a gradient at {amount(one.steps, 'step')}: the loss does not depend on the model",
                    "loss", severity=Severity.ERROR, value=float(one.steps), evidence=evidence_of(one), where=one.where,
                )  # fmt: skip
            continue
        if "zero" in one.traits and _has_dead_output(run.last_trace):
            continue
        if "nowhere" in one.traits and not (step.loss and _is_zero_in_fp32(one.names, step, run)):
            continue  # no reward yet, or a format too short
        if _is_short_format(run, one.names):
            continue
        needed = run.limits.idle_steps if "idle" in one.traits else run.limits.no_gradient_steps
        if one.steps >= needed:
            yield Observation(
                f"{names(one)}: no gradient in {amount(one.steps, 'optimizer step')}; {_WHY_NONE[one.traits[0]]}",
                one.names[0], severity=_SEVERITIES.get(one.traits[0]), value=float(one.count), limit=needed,
                evidence=evidence_of(one), where=one.where,
            )  # fmt: skip
