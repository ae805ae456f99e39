"""An examined step as text: verdict, FP32 beside it, hazards worst first. Computes nothing."""

from __future__ import annotations

import math

from ..core.examination import Examination, FirstBad, Hazard, Place
from ..core.numbers import amount, deviation, duration, join_names, share, short
from ..show.tables import report_line
from ..show.term import DEFAULT_WIDTH, paint, wrap
from ..show.translation import translate

MOST_HAZARDS = 20


def render_examination(seen: Examination, colour: bool = False, width: int = DEFAULT_WIDTH, lang: str = "en") -> str:
    head = paint(translate(_head(seen), lang), "error" if seen.hazards else "good", colour)
    parts = [head, "\n".join(part for line in _beside(seen) for part in report_line(line, width, lang))]
    parts += [_hazard(i, one, colour, width, lang) for i, one in enumerate(seen.hazards[:MOST_HAZARDS], 1)]
    if len(seen.hazards) > MOST_HAZARDS:
        parts.append(translate(f"{len(seen.hazards) - MOST_HAZARDS} more hazards", lang))
    parts.append("\n".join(part for note in _notes(seen) for part in wrap(translate(f"note: {note}", lang), width, 2)))
    return "\n\n".join(part for part in parts if part)


def _head(seen: Examination) -> str:
    verdict = amount(len(seen.hazards), "numerical hazard") if seen.hazards else "no numerical hazards"
    took = f", {duration(seen.seconds)}" if seen.seconds is not None else ""
    precision = seen.amp_dtype or "FP32 only"
    return f"step {seen.step}: {verdict} in {amount(seen.operations, 'operation')} ({precision}{took})"


def _beside(seen: Examination) -> list[str]:
    lines = []
    if seen.loss is not None and seen.loss_reference is not None:
        lines.append(f"loss      {short(seen.loss, 6)}, FP32 {short(seen.loss_reference, 6)}")
    if seen.gradient_error is not None and seen.gradients:
        lines.append(f"gradient  {deviation(seen.gradient_error)} from what FP32 gives on this batch")
    bad = [g.name for g in seen.gradients if g.nonfinite]
    if bad:
        lines.append(f"gradient  not finite: {join_names(bad)}")
    for what, first in (("first", seen.first_bad), ("in FP32", seen.first_bad_reference)):
        if first is not None:
            lines.append(f"{what:9} {_first(first)}")
    return lines


def _first(first: FirstBad) -> str:
    made = "NaN" if first.nan else "infinity"
    expected = f"; FP32 gives {short(first.expected)}" if first.expected is not None else ""
    return f"{made} by {first.op} in {place_text(first.place)}{expected}"


def _hazard(number: int, one: Hazard, colour: bool, width: int, lang: str) -> str:
    head = f"{number}. {paint(one.kind, 'error', colour)} at {one.culprit}: {one.op}, {place_text(one.place)}"
    said = [one.message, "; ".join(part for part in (_consequence(one), _again(one)) if part)]
    said += [f"cause: {one.cause} (nanny rule {one.cause})"] if one.cause else []
    lines = [translate(line, lang) for line in said]
    lines += [f"{translate('fix:', lang)} {translate(one.remedy, lang)}"] if one.remedy else []
    return "\n".join([head, *(part for line in lines for part in wrap(f"   {line}", width, 3))])


def _consequence(one: Hazard) -> str:
    if one.in_reference:
        return "FP32 has it too: precision is not the reason"
    if math.isinf(one.consequence):
        return "destroys loss, gradients or weights"
    return (
        f"consequence {share(one.consequence)}"
        if one.consequence <= 1
        else f"consequence {short(one.consequence)} times the gradient"
    )


def _again(one: Hazard) -> str:
    others = one.numbers.get("places", 1) - 1
    return f"and {amount(others, 'other place')} alike" if others > 0 else f"{one.calls} times" if one.calls > 1 else ""


def place_text(place: Place) -> str:
    where = f"{place.module} " if place.module else ""
    line = f" ({place.file}:{place.line})" if place.file and place.line is not None else ""
    return f"{where}{place.phase}{line}"


def _notes(seen: Examination) -> list[str]:
    notes = [f"the FP32 twin starts anew at {what}, {amount(n, 'time')}" for what, n in list(seen.reseeds.items())[:5]]
    if seen.facts.get("left_out"):
        notes.append(f"left out: {seen.facts['left_out']}")
    if seen.facts.get("scale_overflow"):
        notes.append("gradients overflowed at this loss scale only; the GradScaler will find a smaller one")
    if seen.facts.get("failed"):
        notes.append(f"the examination ended early: {seen.facts['failed']}")
    return notes
