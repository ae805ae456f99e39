"""What was wrong before the first operation, and masks."""

from __future__ import annotations

import math
from dataclasses import replace

from ...core.examination import Hazard
from ...core.numbers import share, short
from ..records import Suspect
from . import ExaminedStep, hazard, hazard_of


@hazard("given_nonfinite", rank=5)
def given_nonfinite(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Data, weights or buffers that were NaN or infinite before the step"""
    if suspect.trouble != "given" or not suspect.destroyed:
        return None
    operand = suspect.operands[0]
    what = "NaN" if suspect.nan else "infinite"
    if suspect.numbers.get("constant") and not suspect.nan and suspect.dtype == "float16":
        said = "a constant is infinite in fp16 before the step begins: it was written as a number beyond 65504, or as infinity"
        return replace(hazard_of(suspect, said, "constant"), in_reference=False)
    message, site = {
        "parameter": (
            f"the weights {operand.name} are {what} before the step begins: an earlier step destroyed them",
            operand.name,
        ),
        "buffer": (
            f"the buffer {operand.name} is {what}: a step that was skipped has still written into it",
            operand.name.rpartition(".")[0] or operand.name,
        ),
        "gradient": (
            f"the gradient of {operand.name} is {what} before backward adds to it: it was not cleared after a skipped step",
            "loop:zero_grad",
        ),
        "input": (f"the input is {what} before any operation touches it", "data:input"),
    }.get(
        operand.role,
        (f"the data is {what} before any operation touches it", _part_of_data(suspect)),
    )
    return hazard_of(suspect, message, operand.role, site=site)


def _part_of_data(suspect: Suspect) -> str:
    """By where it went: into a module, or past all of them into the loss."""
    if suspect.place.phase != "loop":
        return "data"
    return "data:input" if suspect.fed else "data:target"


@hazard("coarse_target", rank=6)
def coarse_target(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Targets that were stored in 16 bits and differ by less than the spacing there"""
    if suspect.trouble != "coarse":
        return None
    spacing, spread, form = suspect.numbers["spacing"], suspect.numbers["spread"], step.format_of(suspect)
    return hazard_of(
        suspect,
        f"targets were stored in {form.name} where its numbers lie {short(spacing)} apart, and differ by {short(spread)}: "
        "what is between was rounded away before the step",
        value=spread,
        limit=spacing,
        consequence=min(spacing**2 / 12 / spread**2, 1.0),
        site="data:target",
    )


@hazard("coarse_input", rank=7)
def coarse_input(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Inputs that were stored in 16 bits and are told apart by less than the spacing there"""
    numbers, form = suspect.numbers, step.format_of(suspect)
    if suspect.trouble != "stored":
        return None
    spacing = short(numbers["spacing"])
    if "series" in numbers:
        return hazard_of(
            suspect,
            f"{numbers['lost']} of {numbers['of']} columns or series that vary were stored in {form.name} and lost by it: number "
            f"{numbers['series']}, up to {short(numbers['size'])} where its numbers lie {spacing} apart, differs by "
            f"{short(numbers['spread'])}",
            value=numbers["spread"],
            limit=numbers["spacing"],
            consequence=min(numbers["spacing"] / math.sqrt(12) / numbers["spread"], 1.0),
            site="data:input",
        )
    if numbers.get("unexplained", 0.0) < step.limits.stored_unexplained:
        return None
    return hazard_of(
        suspect,
        f"positions were stored in {form.name}, where its numbers lie {spacing} apart, {short(numbers['angle'])} radians in "
        f"{suspect.op_name}: {share(numbers['equal'])} of them are equal to another one, and their targets differ by "
        f"{share(numbers['unexplained'])} of all that targets do",
        "angle",
        value=numbers["angle"],
        limit=step.limits.stored_angle,
        consequence=min(numbers["unexplained"], 1.0),
        site="data:input",
    )


@hazard("masked_rows", rank=8)
def masked_rows(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Softmax over rows in which everything is masked"""
    rows = suspect.numbers.get("masked_rows", 0.0)
    if suspect.trouble != "nonfinite" or not rows or not suspect.destroyed:
        return None
    return hazard_of(
        suspect, f"{share(rows)} of the rows of {suspect.op_name} are -inf throughout, which gives NaN", value=rows, limit=0.0
    )
