"""Whole numbers that collide, and decisions that low precision makes differently."""

from __future__ import annotations

from ...core.examination import Hazard
from ...core.numbers import share
from ..records import Suspect
from . import ExaminedStep, hazard, hazard_of


@hazard("integers", rank=16)
def integers(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Whole numbers (ids, positions, counts) beyond what the format counts exactly"""
    stored = suspect.numbers.get("stored", False) and bool(suspect.met)
    if suspect.trouble != "integers" or not (stored or suspect.destroyed or step.harmful(suspect, certain=True)):
        return None
    form = step.format_of(suspect)
    largest, collisions = suspect.numbers["largest"], suspect.numbers["collisions"]
    angles = bool(suspect.met.keys() & {"sin", "cos"}) and not suspect.wide_angle  # rounded before there was an angle
    return hazard_of(
        suspect,
        f"whole numbers up to {largest:.0f} in {form.name}, which is exact to {form.exact_integers}: "
        + (
            f"{share(suspect.share)} of them are beyond, and {suspect.next[0]} looks them up"
            if stored
            else f"{share(suspect.share)} change, {share(collisions)} fall together"
        ),
        "angle" if angles else "",
        value=largest,
        limit=float(form.exact_integers),
        consequence=max(suspect.consequence, suspect.share) if stored else None,
        site="data:input" if any(o.role == "input" for o in suspect.operands) and not suspect.place.site else None,
    )


@hazard("decision", rank=18)
def decision(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A choice (argmax, top-k, comparison) that FP32 makes differently"""
    if suspect.trouble != "decision" or not step.harmful(suspect, certain=True):
        return None
    ties = suspect.numbers.get("ties", 0.0)
    if suspect.share < step.limits.damage_flips and ties < step.limits.damage_ties:
        return None
    return hazard_of(
        suspect,
        f"{suspect.op} decides {share(suspect.share)} of {suspect.count} cases differently from FP32"
        + (f"; {share(ties)} of the choices are ties" if ties else ""),
        "target" if suspect.target or not suspect.differentiable else "",
        value=suspect.share,
        limit=step.limits.damage_flips,
    )
