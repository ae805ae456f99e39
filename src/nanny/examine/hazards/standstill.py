"""Additions without effect and state that does not move."""

from __future__ import annotations

from ...core.examination import Hazard
from ...core.numbers import share, short
from ..records import Suspect
from . import ExaminedStep, hazard, hazard_of


@hazard("residual", rank=80)
def residual(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A residual branch too small for the stream it is added to"""
    if suspect.trouble != "absorbed" or suspect.place.phase != "forward" or not (suspect.residual or step.harmful(suspect)):
        return None
    if suspect.repeats >= step.limits.damage_repeats:
        return None
    return hazard_of(
        suspect,
        f"the branch is {short(suspect.numbers['ratio'])} of the stream it is added to: {share(suspect.unchanged or 0)} of the "
        f"elements stay as they were in {step.format_of(suspect).name}",
        value=suspect.kept,
        limit=step.limits.damage_kept,
        consequence=max(suspect.consequence, _lost_share(suspect)),
    )


@hazard("average", rank=82)
def average(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A moving average whose step is below the spacing of its format"""
    if not _still(suspect, step) or not _decays(suspect) or _follows(suspect, step) or suspect.place.phase == "optimizer":
        return None
    return hazard_of(
        suspect,
        f"{share(suspect.unchanged or 0)} of the average stay as they were, {share(max(suspect.kept or 0, 0))} of it arrives",
        value=suspect.kept,
        limit=step.limits.damage_kept,
        consequence=_lost_share(suspect),
        site="loop:ema" if suspect.place.phase == "loop" and not suspect.place.site else None,
    )


@hazard("accumulator", rank=84)
def accumulator(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A running sum that no longer changes"""
    if suspect.trouble != "absorbed" or suspect.repeats < step.limits.damage_repeats:
        return None
    gradients = any(o.role == "gradient" for o in suspect.operands)
    return hazard_of(
        suspect,
        f"after {suspect.repeats} additions {share(max(suspect.kept or 0, 0))} of what is added still arrives in "
        f"{step.format_of(suspect).name}",
        "of_gradients" if gradients else "",
        value=suspect.kept,
        limit=step.limits.damage_kept,
        consequence=_lost_share(suspect),
    )


@hazard("update_lost", rank=86)
def update_lost(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Updates below the spacing of the weights"""
    if not _is_state(suspect, "parameter") or not _still(suspect, step):
        return None
    return hazard_of(
        suspect,
        f"{share(suspect.unchanged or 0)} of {suspect.operands[0].name} are bit-identical after the update; "
        f"{share(max(suspect.kept or 0, 0))} of it arrives",
        value=suspect.unchanged,
        limit=step.limits.unchanged_share_warn,
        consequence=_lost_share(suspect),
        site=suspect.operands[0].name,
    )


@hazard("decay_lost", rank=88)
def decay_lost(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Weight decay whose factor rounds to 1"""
    lost = [f for f in suspect.numbers.get("lost_factors", ()) if step.limits.damage_decay <= 1 - f < 1]
    if not _is_state(suspect, "parameter") or not lost:
        return None
    return hazard_of(
        suspect,
        f"multiplying {suspect.operands[0].name} by {lost[0]:.6f} changes nothing in {step.format_of(suspect).name}",
        value=1 - lost[0],
        consequence=1 - lost[0],
        site=suspect.operands[0].name,
    )


@hazard("gradient_sum", rank=90)
def gradient_sum(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Gradients of several micro-batches added up in 16 bits"""
    if not _is_state(suspect, "gradient") or not _still(suspect, step):
        return None
    return hazard_of(
        suspect,
        f"the gradient of {suspect.operands[0].name} grows by {share(max(suspect.kept or 0, 0))} of what is added to it",
        value=suspect.kept,
        limit=step.limits.damage_kept,
        consequence=_lost_share(suspect),
        site=suspect.operands[0].name,
    )


@hazard("state_still", rank=92)
def state_still(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """State of the optimizer, a buffer or a sum that does not move"""
    if suspect.trouble != "state" or not _still(suspect, step):
        return None
    operand = suspect.operands[0]
    optimizer = operand.role == "optimizer"
    if not optimizer and _decays(suspect) and _follows(suspect, step):
        return None
    return hazard_of(
        suspect,
        f"{share(suspect.unchanged or 0)} of {operand.name or 'it'} stay as they were while FP32 moves",
        "average" if optimizer or _decays(suspect) else "",
        value=suspect.unchanged,
        limit=step.limits.unchanged_share_warn,
        consequence=_lost_share(suspect),
        site="optimizer" if optimizer else operand.name or None,
    )


def _lost_share(suspect: Suspect) -> float:
    """The share of what was added that did not arrive."""
    return 1 - min(max(suspect.kept or 0.0, 0.0), 1.0)


def _is_state(suspect: Suspect, role: str) -> bool:
    return suspect.trouble == "state" and suspect.operands[0].role == role


def _still(suspect: Suspect, step: ExaminedStep) -> bool:
    kept = suspect.kept if suspect.kept is not None else 1.0
    return (
        suspect.trouble in ("state", "absorbed")
        and kept < step.limits.damage_kept
        and (suspect.unchanged or 0.0) > step.limits.unchanged_share_warn
    )


def _decays(suspect: Suspect) -> bool:
    """Multiplied by a number just below one before something is added: an exponential average."""
    return bool(_decay_factors(suspect))


def _follows(suspect: Suspect, step: ExaminedStep) -> bool:
    """An average that stands still is at most so many roundings from what it follows as the steps that it is taken over."""
    return step.limits.damage_average * (1 - max(_decay_factors(suspect))) >= 1


def _decay_factors(suspect: Suspect) -> list[float]:
    written = "lerp" in suspect.numbers.get("ops", ()) or suspect.numbers.get("average")
    averaged = written and suspect.place.phase == "loop"
    if suspect.trouble == "state" and suspect.operands[0].role in ("parameter", "gradient", "optimizer") and not averaged:
        return []
    factors = suspect.numbers.get("factors") or (suspect.numbers.get("factor"),)
    least = 0.0 if averaged else 0.5  # a decay that begins at 0 and rises
    return [f for f in factors if f is not None and least <= f < 1]
