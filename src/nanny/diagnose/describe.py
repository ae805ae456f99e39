"""How a cause tells what was seen: the same numbers in the same words, whichever cause they speak for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..core.examination import Examination, FirstBad, Hazard
from ..core.formats import FP16
from ..core.numbers import number, share, short
from .records import Diagnosis
from .registry import CERTAIN, LIKELY, POSSIBLE, less_sure
from .signs import Signs


def by_first_bad(signs: Signs, at: FirstBad, confidence: float, *more: str, culprit: str = "") -> Diagnosis:
    """What the first bad number proves."""
    where = culprit or (at.hazard.culprit if at.hazard is not None and at.hazard.cause else at.culprit)
    return Diagnosis(
        culprit=where,
        confidence=confidence,
        evidence=(*_maker(at), *more, *_in_fp32(at), *_of_second_run(signs, at), *_harm(signs)),
        chain=chain_of(signs, at, where),
        step=at.step,
        where=at.place.where,
        source=at.place.source,
        precision_caused=None if at.in_reference is None else not at.in_reference,
    )


def _maker(at: FirstBad) -> Iterator[str]:
    if at.source == "batch":
        return
    what = "NaN" if at.nan else "infinity"
    maker = f"`{at.op}`" if at.op else "an operation"
    if _came_in(at):
        yield f"step {at.step}: the batch holds {what}; the first operation that meets it is {maker}"
        return
    inside = f" in `{at.culprit}`" if at.place.site and not at.place.is_data else ""
    largest = at.inputs.get("absmax")
    came = f" from inputs up to {number(largest)}" if largest else ""
    yield f"step {at.step}: the first {what} comes out of {maker}{inside}" + (f" ({at.dtype})" if at.dtype else "") + came
    if at.expected is not None and math.isfinite(at.expected):
        over = f", beyond the {number(FP16.max)} of fp16" if at.expected > FP16.max else ""
        yield f"in FP32 the same result reaches {number(at.expected)}{over}"
    if at.hazard is not None and at.hazard.message:
        yield at.hazard.message
    if at.source == "graph" and at.inputs.get("absmin1") == 0:
        yield "what it divides by is exactly 0"


def _came_in(at: FirstBad) -> bool:
    """It was bad before the first operation: what its result would be, or in FP32, is beside the point."""
    return at.from_data and at.source != "factor" and (at.nan or at.dtype != "float16")


def _in_fp32(at: FirstBad) -> Iterator[str]:
    if at.in_reference is True and at.source == "factor":
        yield f"it was computed in {at.dtype}: precision is not the reason"
    elif at.in_reference is True:
        yield "the FP32 twin of the same step breaks there too: precision is not the reason"
    elif at.in_reference is False and at.stored:
        yield "the twin begins with the rounded numbers; those that they stand for are on the other side of the edge"
    elif at.in_reference is False and at.source == "examination":
        yield "the FP32 twin of the same step stays finite there"


def _of_second_run(signs: Signs, at: FirstBad) -> Iterator[str]:
    if any(exam.step == at.step for exam, _ in signs.fact("other_bits")):
        yield "run again on the same inputs, the step gave other bits: the model keeps a state, or a kernel is not deterministic"


def _harm(signs: Signs) -> Iterator[str]:
    facts = signs.facts
    total, _, at_end = signs.skips
    if at_end and at_end == total and total > 1:
        yield f"{total} of {facts.steps} steps skipped, none after it succeeded"
    elif total:
        yield f"{total} of {facts.steps} steps skipped"
    elif facts.bad_steps:
        yield f"{facts.bad_steps} of {facts.steps} steps with a non-finite loss or gradient"


def chain_of(signs: Signs, at: FirstBad, culprit: str) -> tuple[str, ...]:
    what = "NaN" if at.nan else "inf"
    links = [f"{culprit}: {what}" + (" in the batch" if _came_in(at) else f" out of {at.op}" if at.op else "")]
    incident = next((i for i in signs.facts.incidents if i.step >= at.step), None)
    if incident is not None:
        passed = [c.site for c in incident.bad_calls if c.site not in (culprit, signs.facts.latest.root_site)]
        links += [f"passed on by `{passed[0]}`"] if passed else []
        if incident.loss is not None and not math.isfinite(incident.loss):
            links.append(f"loss {short(incident.loss)}")
        if incident.bad_grads:
            links.append(f"gradients {'NaN' if incident.nan_grads else 'Inf'}")
        links.append("optimizer step skipped" if incident.skipped else "weights spoilt" if incident.bad_grads else "")
    return tuple(link for link in links if link)


def by_hazard(signs: Signs, name: str) -> Iterator[Diagnosis]:
    """The worst hazard that speaks for a cause by itself; earlier operations of the step before later ones."""
    found = [(e, h) for e, h in signs.hazards(name) if h.consequence > 0]
    if not found:
        return
    worst = max(h.consequence for _, h in found)
    exam, hazard = next((e, h) for e, h in sorted(found, key=lambda p: (p[0].step, p[1].order)) if h.consequence >= 0.25 * worst)
    seen = len({e.step for e, _ in found})
    ruined = _ruined_share(found) if seen == len(signs.evidence.examinations) else 0.0
    often = seen >= max(2.0, 0.5 * len(signs.evidence.examinations))
    if worst < signs.limits.damage_consequence and not ruined and (signs.learns or not often):
        return  # little, and now and then, or in a run that learns: a gradient that is 0 but for rounding is always wrong
    if signs.learns and 2 * seen < len(signs.evidence.examinations) and _passes(signs, found):
        return
    if signs.converged and worst < _MOSTLY_WRONG and not ruined:
        return  # the loss has gone where it was to go, whatever rounding did to the gradients
    times = f"seen in {seen} of {len(signs.evidence.examinations)} examined steps"
    in_gradients = hazard.place.phase != "optimizer" and hazard.kind not in _BESIDE and _is_measured(exam.gradient_error)
    error = f"gradients {share(exam.gradient_error)} off FP32 at this step" if in_gradients else ""
    confidence = LIKELY if hazard.consequence >= 0.1 or ruined else POSSIBLE
    if name == signs.lead and max(worst, ruined) >= 0.5:
        confidence = CERTAIN
    elif hazard.kind == "coarse_input" and signs.learns:
        confidence = POSSIBLE  # what was lost may not be what matters
    yield Diagnosis(
        culprit=hazard.culprit,
        confidence=less_sure(confidence) if hazard.in_reference else confidence,
        evidence=tuple(t for t in (f"step {exam.step}: {hazard.message}", error, times) if t),
        chain=(f"{hazard.culprit}: {hazard.kind} in {hazard.op}", *(("wrong gradients",) if error else ())),
        step=exam.step,
        where=hazard.place.where,
        source=hazard.place.source,
        precision_caused=not hazard.in_reference,
    )


def _ruined_share(found: Sequence[tuple[Examination, Hazard]]) -> float:
    """The share of all parameters that lose their gradient to this, in the step where it is largest: no two hazards
    of a step ruin the same ones."""
    shares: dict[int, float] = {}
    for exam, hazard in found:
        shares[exam.step] = shares.get(exam.step, 0.0) + hazard.numbers.get("ruined", 0.0)
    return max(shares.values())


_MOSTLY_WRONG = 0.5  # of a gradient
_BESIDE = ("average", "coarse_target", "coarse_input")  # no gradient goes through it, or the twin begins with it


def _passes(signs: Signs, found: Sequence[tuple[Examination, Hazard]]) -> bool:
    """What is nearly constant in some batches is mostly rounding there: no fault, if the loss falls and it is gone again."""
    errors = [e.gradient_error for e in signs.evidence.examinations if e.gradient_error is not None]
    if 2 * sum(error < signs.limits.damage_consequence for error in errors) < len(errors):
        return False  # mostly the gradients are not those of FP32
    last = signs.clean_exams[-1].step if signs.clean_exams else math.inf
    gone = all(h.kind in ("amplification", "absorption") and e.step < last for e, h in found)
    return gone or all(h.kind == "amplification" for _, h in found)


def _is_measured(error: float | None) -> bool:
    return error is not None and math.isfinite(error) and error > 0
