"""How the loop uses its loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..accounts import by_break, by_hazard, number
from ..registry import CERTAIN, LIKELY, Suspicion, cause
from ..signs import Signs


@cause("clip_before_unscale", "scaler_misuse")
def clip_before_unscale(signs: Signs) -> Iterator[Suspicion]:
    """Gradients are clipped while still multiplied by the loss scale.

    Fix: call `scaler.unscale_(optimizer)` before `clip_grad_norm_`.

    Confirm: print the norm that clip_grad_norm_ returns: it is the loss scale times the true one.
    """
    facts = signs.facts
    finding = signs.evidence.finding("CLIP_BEFORE_UNSCALE")
    if not facts.clipped_scaled or finding is None:
        return
    _, norms = signs.evidence.curve("grad_norm")
    _, scales = signs.evidence.curve("scale")
    _, clips = signs.evidence.curve("clip")
    known = norms[norms > 0] if len(norms) else norms
    finite = known[[math.isfinite(n) for n in known]] if len(known) else known
    scale, clip = (float(values[-1]) if len(values) else math.nan for values in (scales, clips))
    shrunk = f"true gradients of norm {number(float(finite[-1]))} became {clip / scale:.2g}" if len(finite) and scale else ""
    yield Suspicion(
        culprit="loop:clip",
        score=CERTAIN + 0.03,
        evidence=tuple(
            t for t in (
                f"{finding.message}",
                f"in {facts.clipped_scaled} of {facts.clips} clipped steps; order of calls: {' -> '.join(facts.calls[:8])}",
                shrunk,
            ) if t
        ),
        chain=("clip on scaled gradients", "unscale divides once more", "updates are too small by the loss scale"),
        step=finding.step,
    )  # fmt: skip


@cause("loss_scale_pinned", "scaler_misuse")
def loss_scale_pinned(signs: Signs) -> Iterator[Suspicion]:
    """The loss scale is set anew at every step, so it cannot fall when gradients overflow.

    Fix: create one GradScaler before the loop and call `scaler.update()` once per step, without an argument.

    Confirm: print scaler.get_scale() at every step: it never falls although every step is skipped.
    """
    facts = signs.facts
    steps, scales = signs.evidence.curve("scale")
    _, skipped = signs.evidence.curve("skipped")
    if len(scales) < 3 or len(scales) != len(skipped):
        return
    stuck = [i for i in range(1, len(scales)) if skipped[i] and skipped[i - 1] and scales[i] >= scales[i - 1]]
    bad_forward = [i for i in facts.incidents if i.loss is not None and not math.isfinite(i.loss)]
    if len(stuck) < 2 or len(stuck) < 0.5 * float(sum(skipped)) or len(bad_forward) > 0.5 * len(facts.incidents):
        return
    if facts.stale and facts.stale >= len(stuck):
        return
    made = facts.scalers > 1 and facts.scalers >= 0.5 * facts.scaler_steps
    how = (
        f"{facts.scalers} GradScaler objects in {facts.scaler_steps} steps: it is made anew each time"
        if made
        else f"update() was given a scale at {facts.scale_given} steps"
        if facts.scale_given
        else "the backoff factor is 1: the scale cannot fall"
        if facts.scale_static
        else "update() is not called" if "update" not in facts.calls else "the scale is put back between the steps"
    )  # fmt: skip
    yield Suspicion(
        culprit="scaler" if made else "scaler.update" if "update" not in facts.calls or facts.scale_given else "scaler.scale",
        score=CERTAIN + 0.03,
        evidence=(
            f"{int(sum(skipped))} of {len(skipped)} steps skipped while the scale stayed at {scales[-1]:g}",
            how,
            "loss and activations are finite: only the scaled gradients overflow",
        ),
        chain=("scaled gradients overflow", "step skipped", "the scale does not fall", "the next step overflows again"),
        step=int(steps[stuck[0]]),
        precision_caused=True,
    )


@cause("stale_inf_grads", "scaler_misuse")
def stale_inf_grads(signs: Signs) -> Iterator[Suspicion]:
    """Gradients are not cleared after a skipped step: new ones are added to the old infinities.

    Fix: call `optimizer.zero_grad()` in every iteration, also when the step was skipped.

    Confirm: look at p.grad just before backward: it still holds inf from the step before.
    """
    facts = signs.facts
    if not facts.stale:
        yield from by_hazard(signs, "stale_inf_grads")
        return
    finding = signs.evidence.finding("STALE_GRADS")
    total, _, _ = signs.skips
    yield Suspicion(
        culprit="loop:zero_grad",
        score=CERTAIN + 0.04,
        evidence=(
            f"{facts.stale} steps began backward with non-finite gradients of an earlier step, first in `{facts.stale_names[0]}`",
            f"{total} of {facts.steps} steps skipped",
            f"order of calls: {' -> '.join(facts.calls[:8])}",
        ),
        chain=("one overflow", "step skipped, gradients kept", "inf + anything = inf", "every later step is skipped"),
        step=finding.step if finding is not None else None,
        precision_caused=True,
    )


@cause("static_loss_scale_overflow", "scaler_misuse")
def static_loss_scale_overflow(signs: Signs) -> Iterator[Suspicion]:
    """The loss is multiplied by a constant made by hand; gradients overflow in backward and nobody checks.

    Fix: use torch.amp.GradScaler, which checks and lowers its scale; or divide the constant by 16 until nothing overflows.

    Confirm: halve the constant: the infinities move or go away.
    """
    facts = signs.facts
    at = signs.break_
    by_hand = facts.loss_factor is not None and facts.loss_factor > 1
    if at is None or not (by_hand or facts.scale_static) or (facts.scaler_steps and not facts.scale_static):
        return
    if at.in_reference is True or (at.phase not in ("backward", "optimizer") and at.source == "examination"):
        return
    if at.source != "examination" and at.phase != "backward":
        return
    factor = facts.loss_factor if by_hand else None
    said = f"the loss is multiplied by {factor:g} by hand before backward" if factor else "the scaler's backoff factor is 1"
    yield by_break(
        signs, at, CERTAIN if at.source == "examination" else LIKELY, said,
        "activations and loss are finite, the gradients are not, and the optimizer applied them",
        culprit="loop:scale" if by_hand else "scaler.scale",
    )  # fmt: skip
