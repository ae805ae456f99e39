"""Weights and averages that should move and do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...core.formats import format_of
from ...core.numbers import share, short
from ...core.step import unchanged_share
from ..describe import by_hazard
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, POSSIBLE, cause
from ..signs import Signs
from .early import updates_shrink


@cause("update_lost", family="update_stagnation")
def update_lost(signs: Signs) -> Iterator[Diagnosis]:
    """Weights are kept in 16 bits and most updates are below half a spacing: the steps do nothing."""
    yield from updates_shrink(signs)
    facts = signs.facts
    updates, step = (facts.updates, facts.updates_step) if facts.lost_step is None else (facts.lost_updates, facts.lost_step)
    part = unchanged_share(updates)
    if part is None or part <= signs.limits.unchanged_share_warn or facts.lost_probes <= facts.probes / 2:
        return
    if not all(o.rounds_to_nearest for o in facts.latest.optimizers):
        return
    worst = max((u for u in updates if u.may_be_lost), key=lambda u: u.unchanged)
    spacing = format_of(worst.dtype).eps
    yield Diagnosis(
        culprit=worst.name,
        confidence=CERTAIN if part > signs.limits.unchanged_share_error else LIKELY,
        evidence=(
            f"step {step}: {share(part)} of the {worst.dtype} weights with a gradient did not change",
            f"most in `{worst.name}`: update {short(worst.update_rms)} (rms) on weights of {short(worst.weight_rms)}, "
            f"whose spacing is about {short(spacing * worst.weight_rms)}",
            f"so in {facts.lost_probes} of {facts.probes} probed steps; lr {worst.lr:g}",
        ),
        chain=("lr * update below half a spacing", "the sum rounds back to the old weight", "the loss stands still"),
        step=step,
        precision_caused=True,
    )


@cause("ema_stagnation", family="update_stagnation")
def ema_stagnation(signs: Signs) -> Iterator[Diagnosis]:
    """A moving average decays more slowly than its format can express, and stands still."""
    chain = (
        "a step of the average is below half a spacing",
        "the sum rounds back to the old average",
        "the average stands still",
    )
    yield from (replace(one, chain=chain) for one in by_hazard(signs, "ema_stagnation"))
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
