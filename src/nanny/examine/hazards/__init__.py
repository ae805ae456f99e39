"""From the suspects of an examined step to hazards: what it is, what it did, why, and what to change. No torch.

A kind of hazard is one decorated function in this folder. It takes a suspect and the step, and returns a `Verdict` if the
suspect is of its kind *and* did harm; the first kind that claims a suspect has it. Count is not consequence: what healthy nets
do all the time (tails that flush, masks of -inf, near-ties) is claimed only if loss, gradients or state suffer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.examination import Examination, Hazard
from ...core.formats import FORMATS, Format, format_of
from ...core.limits import Limits
from ...core.registry import import_all
from ..records import Suspect


@dataclass(frozen=True)
class Verdict:
    message: str
    cause: str = ""
    remedy: str = ""
    value: float | None = None
    limit: float | None = None
    consequence: float | None = None  # default: what the suspect put into the gradients
    site: str | None = None  # a culprit that is no module: `optimizer`, `data:input`, a parameter
    op: str | None = None  # the operation to name, if it is another one


@dataclass(frozen=True)
class Step:
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

    def harmful(self, suspect: Suspect, certain: bool = False) -> bool:
        """`certain`: the mechanism is proved at the operation itself, so that less harm is needed."""
        return suspect.consequence >= (self.limits.damage_certain if certain else self.limits.damage_consequence)

    def from_the_scale(self, suspect: Suspect) -> bool:
        """An overflow in backward that a smaller loss scale cures: a GradScaler finds it by itself."""
        if self.scale is None or self.scale <= 1 or not suspect.in_backward:
            return False
        return suspect.reference_absmax / self.scale < self.format_of(suspect).max


@dataclass(frozen=True)
class Kind:
    name: str
    rank: int
    claim: Callable[[Suspect, Step], Verdict | None]

    @property
    def title(self) -> str:
        return (self.claim.__doc__ or "").strip().partition("\n")[0]


KINDS: dict[str, Kind] = {}


def hazard(name: str, rank: int) -> Callable[[Any], Any]:
    """Kinds of lower rank are asked first."""

    def register(function: Any) -> Any:
        KINDS[name] = Kind(name, rank, function)
        return function

    return register


def all_kinds() -> list[Kind]:
    import_all(sys.modules[__name__])
    return sorted(KINDS.values(), key=lambda kind: kind.rank)


def judged(examination: Examination, limits: Limits | None = None) -> Examination:
    """The examination with its hazards, worst first; the suspects are spent."""
    step = Step(examination, limits or Limits())
    kinds = all_kinds()
    claimed = [found for suspect in examination.suspects if (found := _claimed(suspect, step, kinds)) is not None]
    return replace(examination, hazards=tuple(_ranked(_merged(claimed))), suspects=())


def _claimed(suspect: Suspect, step: Step, kinds: Iterable[Kind]) -> Hazard | None:
    for kind in kinds:
        verdict = kind.claim(suspect, step)
        if verdict is not None:
            return _hazard(kind.name, suspect, verdict)
    return None


def _hazard(kind: str, suspect: Suspect, verdict: Verdict) -> Hazard:
    consequence = suspect.consequence if verdict.consequence is None else verdict.consequence
    return Hazard(
        kind=kind,
        op=verdict.op or _NAMES.get(suspect.op, suspect.op),
        place=suspect.place if verdict.site is None else replace(suspect.place, site=verdict.site),
        order=suspect.order,
        dtype=suspect.dtype,
        share=suspect.share,
        value=verdict.value,
        limit=verdict.limit,
        message=verdict.message,
        numbers=_numbers(suspect),
        consequence=math.inf if suspect.destroyed else consequence,
        cause=verdict.cause,
        remedy=verdict.remedy,
        in_reference=suspect.in_reference,
    )


def _numbers(suspect: Suspect) -> Mapping[str, Any]:
    numbers = {
        "own_error": suspect.own,
        "error": suspect.plain or None,
        "centred_error": suspect.centred or None,
        "kept": suspect.kept,
        "unchanged": suspect.unchanged,
        "reference_absmax": suspect.reference_absmax or None,
        "reached": sorted(suspect.reached)[:8] or None,
        "then": suspect.then[:8] or None,
        **suspect.numbers,
    }
    return {key: value for key, value in numbers.items() if value is not None}


def _merged(hazards: Iterable[Hazard]) -> list[Hazard]:
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


_NAMES = {"to_copy": "to"}  # as the user wrote it
_TOGETHER = frozenset(["update_lost", "state_still", "decay_lost"])


def _ranked(hazards: list[Hazard]) -> list[Hazard]:
    """By consequence; of those that destroy, the first."""
    return sorted(hazards, key=lambda h: (h.in_reference, -h.consequence, h.order))
