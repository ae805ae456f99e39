"""Weights and averages that should move and do not."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.formats import format_of
from ...core.numbers import share, short
from ..describe import by_hazard
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, POSSIBLE, cause
from ..signs import Signs
from .early import updates_shrink


@cause("update_lost", family="update_stagnation")
def update_lost(signs: Signs) -> Iterator[Diagnosis]:
    """Weights are kept in 16 bits and most updates are below half a spacing: the steps do nothing.

    Confirm: count the elements with a non-zero gradient that the step left bit-identical: more than half.
    """
    yield from updates_shrink(signs)
    facts = signs.facts
    narrow = [u for u in facts.updates if u.may_be_lost]
    total = sum(u.count for u in narrow)
    if not total or facts.probes < 1 or facts.lost_probes <= facts.probes / 2:
        return
    if not all(o.rounds_to_nearest for o in facts.latest.optimizers):
        return
    part = sum(u.unchanged for u in narrow) / total
    if part <= signs.limits.unchanged_share_warn:
        return
    worst = max(narrow, key=lambda u: u.unchanged)
    spacing = format_of(worst.dtype).eps
    yield Diagnosis(
        culprit=worst.name,
        confidence=CERTAIN if part > signs.limits.unchanged_share_error else LIKELY,
        evidence=(
            f"step {facts.updates_step}: {share(part)} of the {worst.dtype} weights with a gradient did not change",
            f"most in `{worst.name}`: update {short(worst.update_rms)} (rms) on weights of {short(worst.weight_rms)}, "
            f"whose spacing is about {short(spacing * worst.weight_rms)}",
            f"so in {facts.lost_probes} of {facts.probes} probed steps; lr {worst.lr:g}",
        ),
        chain=("lr * update below half a spacing", "the sum rounds back to the old weight", "the loss stands still"),
        step=facts.updates_step,
        precision_caused=True,
    )


@cause("ema_stagnation", family="update_stagnation")
def ema_stagnation(signs: Signs) -> Iterator[Diagnosis]:
    """A moving average decays more slowly than its format can express, and stands still.

    Confirm: the average is bit-identical over many steps while its target moves.
    """
    yield from by_hazard(signs, "ema_stagnation")
    for state in signs.facts.latest.optimizers:
        half = state.stalls_at
        if state.beta2 is None or half is None or signs.facts.count("stepped") < 3:
            continue
        lost = signs.facts.lost_probes > signs.facts.probes / 2
        yield Diagnosis(
            culprit="optimizer",
            confidence=POSSIBLE if lost else LIKELY,
            evidence=(
                f"{state.name} keeps exp_avg_sq in {state.state_dtype}; 1 - beta2 = {1 - state.beta2:.2g} is below {half:.2g}, "
                "so v * beta2 rounds back to v",
                f"after {signs.facts.count('stepped')} steps the bias correction expects an average that was never formed",
            ),
            chain=("v * beta2 == v", "the second moment never falls", "steps of the wrong size"),
            step=signs.facts.updates_step,
            precision_caused=True,
        )
