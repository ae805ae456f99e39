"""The optimizer's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...core.formats import format_of
from ...core.numbers import median, number, share
from ...core.step import OptimizerState
from ..describe import by_hazard
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, POSSIBLE, cause
from ..signs import Runaway, Signs


@cause("adam_eps_underflow_fp16", family="optimizer")
def adam_eps_underflow(signs: Signs) -> Iterator[Diagnosis]:
    """Adam works in fp16: eps and small second moments are 0, and the step divides by zero."""
    for state in signs.facts.latest.optimizers:
        dtype = state.state_dtype or state.param_dtype
        if state.eps is None or state.fused or dtype != "float16" or state.eps > format_of(dtype).flush_at:
            continue
        incident = next((i for i in signs.facts.incidents if not i.skipped), None)
        if state.state_dtype == "float16" and state.param_dtype != "float16" and signs.steps_too_long is not None:
            found = list(_divides_by_eps(signs, state, signs.steps_too_long))
            if found:
                yield from found
                return
        if incident is None:
            continue
        yield Diagnosis(
            culprit="optimizer.eps",
            confidence=CERTAIN if incident.step <= 2 else LIKELY,
            evidence=(
                f"{state.name} keeps its state in float16, where eps={state.eps:g} is 0",
                f"step {incident.step}: loss or gradients are not finite; the steps before were",
            ),
            chain=("v and eps are 0 in fp16", "step divides by 0", "parameters inf or NaN", f"loss bad at step {incident.step}"),
            step=max(incident.step - 1, 0),
            precision_caused=True,
        )
        return
    if any("times" in h.numbers for _, h in signs.hazards("adam_eps_underflow_fp16")):
        yield from by_hazard(signs, "adam_eps_underflow_fp16")


def _divides_by_eps(signs: Signs, state: OptimizerState, away: Runaway) -> Iterator[Diagnosis]:
    """Weights are wide and second moments are not: squared gradients that are 0 as they are stored leave eps alone."""
    exam, sizes = next(iter(signs.clean_exams), None), signs.facts.sizes
    if exam is None or state.beta2 is None:
        return
    squares = [g.reference_norm**2 / sizes[g.name] for g in exam.gradients if sizes.get(g.name) and g.reference_norm > 0]
    lost = [(1 - state.beta2) * square <= format_of("float16").flush_at for square in squares]
    if sum(lost) < max(0.5 * len(lost), 1):
        return
    yield Diagnosis(
        culprit="optimizer.eps",
        confidence=LIKELY,
        evidence=(
            f"{state.name} keeps its state in float16: (1 - beta2) g^2 is 0 there for the typical gradient of "
            f"{share(sum(lost) / len(lost))} of the parameters, and a step divides by eps={state.eps:g} alone",
            f"{away.name} grows {number(away.factor)} times from step {away.start} on",
        ),
        chain=("second moments are 0 in fp16", "a step divides by eps", "steps far too long"),
        step=away.start,
        precision_caused=True,
    )


@cause("adam_eps_dominates", family="optimizer", precision=False)
def adam_eps_dominates(signs: Signs) -> Iterator[Diagnosis]:
    """Adam's eps is larger than the gradients it divides by, so the steps shrink with them."""
    for state in signs.facts.latest.optimizers:
        ratio = state.eps_ratio
        if ratio is None or ratio >= signs.limits.eps_dominates_error or signs.facts.bad_steps:
            continue
        if signs.converged:
            continue
        yield Diagnosis(
            culprit="optimizer.eps",
            confidence=LIKELY if not signs.learns else POSSIBLE,
            evidence=(
                f"half of the values of sqrt(v) are below {ratio:.2g} times eps={state.eps:g}",
                f"so a step is about {share(ratio / (1 + ratio))} of what the learning rate says",
            ),
            chain=("gradients smaller than eps", "update = lr * g / eps instead of lr", "the loss hardly moves"),
            step=signs.facts.updates_step,
            precision_caused=False,
        )


@cause("optimizer_v_lag", family="optimizer", precision=False)
def optimizer_v_lag(signs: Signs) -> Iterator[Diagnosis]:
    """The second moment has forgotten, or never seen, gradients this large: one step is many times too long."""
    steps, losses = signs.evidence.curve("loss")
    known = [s for s in signs.facts.surprises if s.ratio >= signs.limits.surprise_spike]
    if not known or len(losses) < 8:
        return
    began = median(losses[:4])
    for one in known:
        before = losses[(steps < one.step) & np.isfinite(losses)]
        calm = max(s.step for s in signs.facts.surprises if s.step <= one.step + 8)  # the strange batches themselves are over
        after = losses[(steps > calm) & (steps <= calm + 8)]
        after = after[np.isfinite(after)]
        if len(before) < 4 or len(after) < 2:
            continue
        usual, thrown = median(before[-8:]), median(after)
        rises = float(after.max()) > 1.5 * float(after[0])  # by the updates; a new task is only learnt away
        if thrown > signs.limits.runaway_loss * abs(began) and not signs.weights_ran_away(one.step):
            continue  # the loss is made of other things than before: the weights are where they were
        shown = float(before[len(before) // 4 :].max())  # a loss with heavy tails has been there before
        if rises and usual > 0 and thrown > max(signs.limits.loss_ratio * usual, 0.5 * began, shown):
            yield Diagnosis(
                culprit="optimizer",
                confidence=LIKELY,
                evidence=(
                    f"step {one.step}: the gradient of `{one.name}` is {one.ratio:.3g} times what its second moment expects",
                    f"the loss, {usual:.3g} before, is {thrown:.3g} when that is over; the run began with {began:.3g}",
                ),
                chain=(f"{one.name}: gradient spike", "sqrt(v) is still small", "huge update", "thrown back to the start"),
                step=one.step,
                precision_caused=False,
            )
            return


@cause("weight_decay_lost", family="optimizer")
def weight_decay_lost(signs: Signs) -> Iterator[Diagnosis]:
    """Weight decay multiplies 16-bit weights by a number that rounds to 1."""
    facts = signs.facts
    for state in facts.latest.optimizers:
        if not state.decoupled or not state.weight_decay or not state.has_half_weights:
            continue
        factor = state.lr * state.weight_decay
        half = format_of(state.param_dtype).unit_roundoff / 2
        missing = factor * facts.count("stepped")
        if not state.rounds_to_nearest or not 0 < factor < half or missing < signs.limits.decay_missing:
            continue
        moved = facts.lost_probes < facts.probes  # else the steps are lost altogether
        proved = any(True for _ in signs.hazards("weight_decay_lost"))
        yield Diagnosis(
            culprit="optimizer.weight_decay",
            confidence=POSSIBLE if not moved else CERTAIN if proved else LIKELY,
            evidence=(
                f"weights are {state.param_dtype}; lr * weight_decay = {factor:.2g} is below half a spacing ({half:.2g})",
                f"over {facts.count('stepped')} steps the weights should have shrunk by {share(missing)}, and have not",
            ),
            chain=("1 - lr * weight_decay rounds to 1", "no decay at all", "weights grow where they should not"),
            step=facts.updates_step,
            precision_caused=True,
        )
