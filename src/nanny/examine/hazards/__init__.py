"""From the suspects of an examined step to hazards: what happened, with its numbers. No torch.

A kind of hazard is one decorated function in this folder. It takes a suspect and the step, and returns a hazard if the
suspect is of its kind *and* did harm; the first kind that claims a suspect has it. Which cause a hazard speaks for is not
decided here: its traits say what tells causes apart, and `diagnose.choose` reads them. Count is not consequence: what healthy
nets do all the time (tails that flush, masks of -inf, near-ties) is claimed only if loss, gradients or state suffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.examination import Examination, Hazard
from ...core.formats import FORMATS, Format, format_of
from ...core.limits import Limits
from ...core.ops import SCATTERS
from ...core.registry import Entry, Registry
from ...diagnose.choose import with_cause
from ..records import Suspect


@dataclass(frozen=True)
class ExaminedStep:
    """What a kind may ask about the whole step."""

    examination: Examination
    limits: Limits

    @property
    def scale(self) -> float | None:
        """Of a scaler that adapts; a number that only the user multiplied with is `loss_factor`."""
        if self.examination.scale is None and self.examination.facts.get("unscaled_by_torch"):
            return self.loss_factor
        return self.examination.scale

    @property
    def loss_factor(self) -> float | None:
        return self.examination.facts.get("loss_factor")

    def format_of(self, suspect: Suspect) -> Format:
        """The format of the result, or of the step's low precision where FP32 carries its errors."""
        found = format_of(suspect.dtype) if suspect.dtype else None
        if found is not None and found.bits < 32:
            return found
        return FORMATS.get(self.examination.amp_dtype, FORMATS["fp32"])

    def trains(self, module: str) -> bool:
        """Parameters in this module got a gradient."""
        return bool(module) and any(g.name.startswith(f"{module}.") for g in self.examination.gradients)

    def harmful(self, suspect: Suspect, certain: bool = False) -> bool:
        """`certain`: the mechanism is proved at the operation itself, so that less harm is needed."""
        return suspect.consequence >= (self.limits.damage_certain if certain else self.limits.damage_consequence)

    def from_the_scale(self, suspect: Suspect) -> bool:
        """An overflow in backward that a smaller loss scale cures: a GradScaler finds it by itself."""
        if self.scale is None or self.scale <= 1 or not suspect.in_backward:
            return False
        return suspect.reference_absmax / self.scale < self.format_of(suspect).max


kinds = Registry(__name__)
hazard = kinds.enter  # `@hazard("overflow", rank=30)`: kinds of lower rank are asked first


def all_kinds() -> list[Entry]:
    return list(kinds.entries().values())


def judge(examination: Examination, limits: Limits | None = None) -> Examination:
    """The examination with its hazards, worst first; the suspects are spent."""
    step = ExaminedStep(examination, limits or Limits())
    claimed = [found for suspect in examination.suspects if (found := _claim(suspect, step)) is not None]
    return replace(examination, hazards=tuple(_worst_first(_merge(map(with_cause, claimed)))), suspects=())


def _claim(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    for kind in all_kinds():
        found: Hazard | None = kind.function(suspect, step)
        if found is not None:
            trained = ("trained",) if step.trains(found.place.site) else ()
            return replace(found, kind=kind.name, traits=(*found.traits, *trained))
    return None


def hazard_of(
    suspect: Suspect,
    message: str,
    *traits: str,
    value: float | None = None,
    limit: float | None = None,
    consequence: float | None = None,
    site: str | None = None,
    op: str | None = None,
) -> Hazard:
    """What a kind claims of a suspect; empty traits are left out.

    `consequence`: if not what the suspect put into the gradients. `site`: a culprit that is no module (`optimizer`,
    `data:input`, a parameter). `op`: the operation to name, if it is another one.
    """
    harm = suspect.consequence if consequence is None else consequence
    return Hazard(
        kind="",
        op=op or suspect.op_name,
        place=suspect.place if site is None else replace(suspect.place, site=site),
        order=suspect.order,
        dtype=suspect.dtype,
        share=suspect.share,
        value=value,
        limit=limit,
        message=message,
        numbers=_numbers(suspect),
        traits=tuple(trait for trait in traits if trait),
        consequence=math.inf if suspect.destroyed else harm,
        in_reference=suspect.in_reference,
        exponents=suspect.exponents,
    )


def _numbers(suspect: Suspect) -> Mapping[str, Any]:
    numbers = {
        "own_error": suspect.own,
        "error": suspect.plain or None,
        "centred_error": suspect.centred or None,
        "kept": suspect.kept,
        "unchanged": suspect.unchanged,
        "reference_absmax": suspect.reference_absmax or None,
        "ruined": suspect.ruined or None if _ruins(suspect) else None,
        "reached": sorted(suspect.reached)[:8] or None,
        "then": suspect.then[:8] or None,
        **suspect.numbers,
    }
    return {key: value for key, value in numbers.items() if value is not None}


def _ruins(suspect: Suspect) -> bool:
    """Rounding ruins what is 0 but for rounding, in health too; a kernel that is mostly wrong by itself is another matter."""
    return suspect.trouble == "nonfinite" or (suspect.op in SCATTERS and (suspect.own or 0.0) > _MOSTLY_WRONG)


_MOSTLY_WRONG = 0.5


def _merge(hazards: Iterable[Hazard]) -> list[Hazard]:
    """The same kind, operation and place are one hazard; what stands still in one optimizer is one too."""
    groups: dict[tuple[Any, ...], list[Hazard]] = {}
    for one in hazards:
        place = one.place
        key = (one.kind, one.cause, *(() if one.kind in _TOGETHER else (one.op, place.site, place.phase, place.line)))
        groups.setdefault(key, []).append(one)
    out = []
    for group in groups.values():
        worst = max(group, key=lambda h: (h.consequence, -h.order))
        sites = list(dict.fromkeys(h.place.site for h in group))
        numbers = {**worst.numbers, "sites": sites[:16], "places": len(sites)} if len(sites) > 1 else worst.numbers
        out.append(replace(worst, calls=sum(h.calls for h in group), order=min(h.order for h in group), numbers=numbers))
    return out


_TOGETHER = frozenset(["update_lost", "state_still", "decay_lost"])


def _worst_first(hazards: list[Hazard]) -> list[Hazard]:
    """By consequence; of those that destroy, the first."""
    return sorted(hazards, key=lambda h: (h.in_reference, -h.consequence, h.order))
