"""How the loop uses its loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...core.numbers import number, share
from ..describe import by_first_bad, by_hazard
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, cause
from ..signs import Signs


@cause("clip_before_unscale", family="scaler_misuse")
def clip_before_unscale(signs: Signs) -> Iterator[Diagnosis]:
    """Gradients are clipped while still multiplied by the loss scale."""
    yield from _scaled_penalty(signs)
    yield from _clipped_before_division(signs)
    facts = signs.facts
    finding = signs.evidence.finding("CLIP_BEFORE_UNSCALE")
    wrong = facts.count("clipped_scaled")
    if not wrong or finding is None:
        return
    _, norms = signs.evidence.curve("grad_norm")
    _, scales = signs.evidence.curve("scale")
    _, clips = signs.evidence.curve("clip")
    known = norms[norms > 0] if len(norms) else norms
    finite = known[[math.isfinite(n) for n in known]] if len(known) else known
    scale, clip = (float(values[-1]) if len(values) else math.nan for values in (scales, clips))
    shrunk = f"true gradients of norm {number(float(finite[-1]))} became {clip / scale:.2g}" if len(finite) and scale else ""
    yield Diagnosis(
        culprit="loop:clip",
        confidence=CERTAIN,
        evidence=tuple(
            t for t in (
                f"{finding.message}",
                f"in {wrong} of {facts.count('clipped')} clipped steps; order of calls: {' -> '.join(facts.latest.calls[:8])}",
                shrunk,
            ) if t
        ),
        chain=("clip on scaled gradients", "unscale divides once more", "updates are too small by the loss scale"),
        step=finding.step,
    )  # fmt: skip


def _clipped_before_division(signs: Signs) -> Iterator[Diagnosis]:
    """The loop divides its gradients by its own loss scale, and clips before that: to what it clips is smaller by the scale."""
    clips = dict(zip(*(values.tolist() for values in signs.evidence.curve("clip"))))
    for exam, factor in signs.fact("shrunk_while_scaled"):
        scale, clip = exam.facts["divided_by_hand"], clips.get(exam.step, math.nan)
        norm = (exam.scale or 1.0) * math.sqrt(sum(g.norm**2 for g in exam.gradients if not g.nonfinite))  # as it was clipped
        if not (clip < scale and abs(factor * norm / clip - 1) < _SAME_NORM):
            continue  # another factor; or the threshold was multiplied as well
        yield Diagnosis(
            culprit="loop:clip",
            confidence=CERTAIN,
            evidence=(
                f"step {exam.step}: gradients were clipped to {clip:g} while multiplied by {number(scale)}, and divided by it "
                f"afterwards: the real threshold was {clip / scale:.3g}",
                f"true gradients of norm {number(norm / scale)} became {clip / scale:.2g}",
            ),
            chain=("clip on scaled gradients", "divided by the loss scale afterwards", "updates are too small by the loss scale"),
            step=exam.step,
            precision_caused=None,
        )
        return


_SAME_NORM = 0.02  # of two ways to add it up


def _scaled_penalty(signs: Signs) -> Iterator[Diagnosis]:
    """A penalty on the size of gradients that are still multiplied by the loss scale, as wrong as a norm that is clipped by."""
    for exam, seen in signs.fact("scaled_penalty"):
        yield Diagnosis(
            culprit="loop:penalty",
            confidence=CERTAIN,
            evidence=(
                f"step {exam.step}: a penalty is computed of gradients that are multiplied by the loss scale, "
                f"{number(seen['scale'])}, and undivided",
                f"a norm in it is {number(seen['scale'])} times as large as meant, a square {number(seen['scale'] ** 2)} times",
            ),
            chain=("gradients of a scaled loss", "a penalty too large by the loss scale", "the loss itself is drowned"),
            step=exam.step,
            where=seen["where"],
            source=seen["source"],
            precision_caused=None,
        )
        return


@cause("unscaled_twice", family="scaler_misuse")
def unscaled_twice(signs: Signs) -> Iterator[Diagnosis]:
    """Gradients are divided by the loss scale once too often: by hand and by the scaler, in every micro-batch, or without
    having been multiplied."""
    yield from _unscaled_in_between(signs)
    yield from _never_scaled(signs)
    divided = [(exam, scale) for exam, scale in signs.fact("divided_by_hand") if exam.facts.get("unscaled_by_torch")]
    if not divided:
        return
    exam, scale = divided[0]
    norm = math.sqrt(sum(g.norm**2 for g in exam.gradients if not g.nonfinite))
    yield Diagnosis(
        culprit="loop:unscale",
        confidence=CERTAIN,
        evidence=(
            f"step {exam.step}: the loop divides the gradients by the loss scale, {number(scale)}, and the scaler does too",
            f"true gradients of norm {number(norm)} reach the optimizer as {number(norm / scale)}",
            f"order of calls: {' -> '.join(signs.facts.latest.calls[:8])}",
        ),
        chain=("divided by hand", "divided by the scaler", "updates are too small by the loss scale"),
        step=exam.step,
        precision_caused=True,
    )


def _unscaled_in_between(signs: Signs) -> Iterator[Diagnosis]:
    """`unscale_` and `update` behind every micro-batch: the next `unscale_` divides what the earlier ones gave once more."""
    facts, (_, scales) = signs.facts, signs.evidence.curve("scale")
    wrong, step = facts.count("unscaled_again"), facts.first_steps.get("unscaled_again")
    if not wrong or not len(scales) or float(scales.max()) < signs.limits.scale_low_warn:
        return
    scale = number(float(scales.max()))
    yield Diagnosis(
        culprit="loop:unscale",
        confidence=CERTAIN,
        evidence=(
            f"in {wrong} of {facts.steps} steps backward added to unscaled gradients, and unscale_ divided the sum again",
            f"of what the earlier micro-batches gave one part in {scale} is left: only the last one counts",
            f"order of calls: {' -> '.join(facts.latest.calls[:10])}",
        ),
        chain=("unscaled before all is added up", "divided by the scale once more", "micro-batches that do not count"),
        step=step,
        precision_caused=True,
    )


def _never_scaled(signs: Signs) -> Iterator[Diagnosis]:
    """A second loss whose backward pass did not go through `scaler.scale`; the scaler divides what it added all the same."""
    facts, (_, scales) = signs.facts, signs.evidence.curve("scale")
    wrong, step = facts.count("never_scaled"), facts.first_steps.get("never_scaled")
    if wrong < 2 or not len(scales) or float(scales.max()) < signs.limits.scale_low_warn:
        return
    scale, some = number(float(scales.max())), facts.first.never_scaled[0]
    yield Diagnosis(
        culprit="loop:scale",
        confidence=CERTAIN,
        evidence=(
            f"at {wrong} steps a loss that `scaler.scale` had not multiplied added to the gradients of `{some}` and others",
            f"the scaler divided them by {scale}: one part in {scale} of that loss is left",
            f"order of calls: {' -> '.join(facts.latest.calls[:10])}",
        ),
        chain=("one of the losses is not scaled", "divided by the scale all the same", "that loss does not count"),
        step=step,
        precision_caused=True,
    )


@cause("step_on_scaled_gradients", family="scaler_misuse")
def step_on_scaled_gradients(signs: Signs) -> Iterator[Diagnosis]:
    """An optimizer steps by itself while its gradients are still multiplied by the loss scale."""
    facts = signs.facts
    yield from _scaled_by_hand(signs)
    yield from _divided_in_part(signs)
    yield from _stepped_by_hand(signs)
    wrong, step = facts.count("stepped_scaled"), facts.first_steps.get("stepped_scaled")
    away = signs.harmed or signs.runaway is not None or signs.weights_left
    if not wrong or not away or any(signs.fact("divided_by_hand")):
        return  # a loop that divides its gradients by hand is well
    _, scales = signs.evidence.curve("scale")
    times = f", times {number(float(scales[0]))}," if len(scales) else ""
    yield Diagnosis(
        culprit="loop:step",
        confidence=CERTAIN,
        evidence=(
            f"in {wrong} of {facts.steps} steps optimizer.step() ran on gradients{times} that the scaler had not unscaled",
            f"order of calls: {' -> '.join(facts.latest.calls[:8])}",
        ),
        chain=(
            "optimizer.step() beside the scaler",
            "updates too large by the loss scale, infinities unchecked",
            "loss and weights lost",
        ),
        step=step,
    )


def _scaled_by_hand(signs: Signs) -> Iterator[Diagnosis]:
    """A loss that is multiplied before backward, and gradients that nobody divides: the steps are too long by as much."""
    facts = signs.facts
    factor = facts.largest.get("loss_factor", 1.0)
    if (
        factor < signs.limits.scale_low_warn
        or "fp16" not in signs.formats
        or facts.count("scale")
        or signs.steps_too_long is None
    ):
        return
    if any(o.beta2 is not None for o in facts.latest.optimizers) or any(signs.fact("divided_by_hand")):
        return  # Adam divides by the size of its gradients
    yield Diagnosis(
        culprit="loop:step",
        confidence=LIKELY,
        evidence=(
            f"the loss is multiplied by {number(factor)} before backward, and the gradients are not divided again",
            f"the updates are {number(factor)} times as long as the learning rate says, and the loss runs away",
        ),
        chain=("loss scaled by hand", "gradients not unscaled", "updates too long by the factor", "loss and weights lost"),
        step=signs.steps_too_long.start,
        precision_caused=False,
    )


def _divided_in_part(signs: Signs) -> Iterator[Diagnosis]:
    """The loop divides some of the gradients by its loss scale, and steps on others as they are."""
    at = signs.first_bad
    left = [(e, f) for e, f in signs.fact("left_scaled") if at is None or e.step <= at.step]
    if not left or not (signs.harmed or signs.runaway is not None):
        return
    if any(o.beta2 is not None for o in signs.facts.latest.optimizers):
        return  # Adam divides by the size of its gradients
    exam, seen = left[0]
    factor, some = number(seen["scale"]), seen["names"][0]
    yield Diagnosis(
        culprit="loop:unscale",
        confidence=CERTAIN,
        evidence=(
            f"step {exam.step}: the loop divides the gradients by {factor} again, but not those of {seen['count']} of "
            f"{seen['of']} parameters that it steps, `{some}` among them",
            f"their updates are {factor} times as long as the learning rate says",
        ),
        chain=("loss scaled by hand", f"{some}: not unscaled", "updates too long by the factor", "loss and weights lost"),
        step=exam.step,
        precision_caused=False,
    )


def _stepped_by_hand(signs: Signs) -> Iterator[Diagnosis]:
    """The loop moves weights itself (an inner loop) by gradients of a scaled loss, and they are replaced rather than moved."""
    at = signs.first_bad
    seen = [(e, f) for e, f in signs.fact("stepped_by_hand") if at is None or e.step <= at.step]
    if not seen or "fp16" not in signs.formats:
        return
    exam, told = seen[0]
    factor = number(told["scale"])
    yield Diagnosis(
        culprit="loop:step",
        confidence=CERTAIN,
        evidence=(
            f"step {exam.step}: the loop moves weights by gradients of a loss that is multiplied by {factor}, undivided",
            f"these updates are {number(told['ratio'])} times as long as the weights, and would be "
            f"{number(told['ratio'] / told['scale'])} times",
            f"seen in {len({e.step for e, _ in seen})} of {len(signs.evidence.examinations)} examined steps",
        ),
        chain=("loss scaled", "gradients not unscaled", "updates too long by the factor", "weights thrown away"),
        step=exam.step,
        where=told["where"],
        source=told["source"],
        precision_caused=None if signs.facts.count("scale") else False,
    )


@cause("loss_scale_pinned", family="scaler_misuse")
def loss_scale_pinned(signs: Signs) -> Iterator[Diagnosis]:
    """The loss scale is set anew at every step, so it cannot fall when gradients overflow."""
    facts = signs.facts
    steps, scales = signs.evidence.curve("scale")
    _, skipped = signs.evidence.curve("skipped")
    if len(scales) < 3 or len(scales) != len(skipped):
        return
    least = signs.limits.scale_stuck
    stuck = [i for i in range(1, len(scales)) if skipped[i] and skipped[i - 1] and scales[i] >= least * scales[i - 1]]
    falls = bool(stuck) and all(scales[i] < scales[i - 1] for i in stuck)
    bad_forward = [i for i in facts.incidents if i.loss is not None and not math.isfinite(i.loss)]
    begun_anew = [i for i in stuck if scales[i] > scales[i - 1]] if all(skipped) else []  # and no search has come to an end
    is_stuck = len(stuck) >= 2 and len(stuck) >= 0.5 * float(sum(skipped))
    if not (is_stuck or len(begun_anew) >= 2) or len(bad_forward) > 0.5 * len(facts.incidents):
        return
    if facts.count("stale") >= len(stuck):
        return
    scalers, given, calls = facts.count("new_scaler"), facts.count("scale_given"), facts.latest.calls
    made = scalers > 1 and (scalers >= 0.5 * facts.count("scale") or len(begun_anew) >= 2)
    how = (
        f"{scalers} GradScaler objects in {facts.count('scale')} steps: it is made anew each time"
        if made
        else f"update() was given a scale at {given} steps"
        if given
        else "the backoff factor is 1: the scale cannot fall"
        if facts.count("scale_static")
        else f"a skip leaves {share(scales[stuck[0]] / scales[stuck[0] - 1])} of the scale: the backoff factor is too near 1"
        if falls
        else "update() is not called" if "update" not in calls else "the scale is put back between the steps"
    )  # fmt: skip
    yield Diagnosis(
        culprit="scaler" if made else "scaler.update" if "update" not in calls or facts.count("scale_given") else "scaler.scale",
        confidence=CERTAIN,
        evidence=(
            f"{int(sum(skipped))} of {len(skipped)} steps skipped while the scale stayed near {scales[-1]:g}"
            if is_stuck
            else f"all {len(skipped)} steps skipped, and the scale was put back to {max(scales):g} again and again",
            how,
            "loss and activations are finite: only the scaled gradients overflow",
        ),
        chain=("scaled gradients overflow", "step skipped", "the scale does not fall", "the next step overflows again"),
        step=int(steps[stuck[0] - 1]),
        precision_caused=True,
    )


@cause("stale_inf_grads", family="scaler_misuse")
def stale_inf_grads(signs: Signs) -> Iterator[Diagnosis]:
    """Gradients are not cleared after a skipped step: new ones are added to the old infinities."""
    facts = signs.facts
    stale = facts.count("stale")
    if not stale:
        if not facts.count("stepped"):  # nobody tells when they are used
            yield from by_hazard(signs, "stale_inf_grads")
        return
    finding = signs.evidence.finding("STALE_GRADS")
    total, _, _ = signs.skips
    yield Diagnosis(
        culprit="loop:zero_grad",
        confidence=CERTAIN,
        evidence=(
            f"{stale} steps began backward with non-finite gradients of an earlier step, first in `{facts.first.stale[0]}`",
            f"{total} of {facts.steps} steps skipped",
            f"order of calls: {' -> '.join(facts.latest.calls[:8])}",
        ),
        chain=("one overflow", "step skipped, gradients kept", "inf + anything = inf", "every later step is skipped"),
        step=finding.step if finding is not None else None,
        precision_caused=True,
    )


@cause("static_loss_scale_overflow", family="scaler_misuse")
def static_loss_scale_overflow(signs: Signs) -> Iterator[Diagnosis]:
    """The loss is multiplied by a constant made by hand; gradients overflow in backward and nobody checks."""
    facts = signs.facts
    at = signs.first_bad
    factor = facts.largest.get("loss_factor", 1.0)
    by_hand, static = factor > 1, facts.count("scale_static") > 0
    if at is None or not (by_hand or static) or (facts.count("scale") and not static):
        return
    if (
        at.in_reference is True
        or at.hint == "constant_out_of_range"
        or (at.place.phase not in ("backward", "optimizer") and at.source == "examination")
    ):
        return
    if at.source != "examination" and at.place.phase != "backward":
        return
    said = f"the loss is multiplied by {factor:g} by hand before backward" if by_hand else "the scaler's backoff factor is 1"
    yield by_first_bad(
        signs, at, CERTAIN if at.source == "examination" else LIKELY, said,
        "activations and loss are finite, the gradients are not, and no step was made on them" if signs.refused
        else "activations and loss are finite, the gradients are not, and the optimizer applied them",
        culprit="loop:scale" if by_hand else "scaler.scale",
    )  # fmt: skip
