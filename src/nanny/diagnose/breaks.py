"""Where a finite computation first became NaN or infinite, as an examined step tells it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.examination import Examination, FirstBad, Hazard, Place

STEP_HAPPENS = ("backward", "optimizer")


@dataclass(frozen=True)
class Break:
    """Where a finite computation first became NaN or infinite, from whatever source tells it best."""

    step: int
    op: str  # without leading underscore: softmax, bmm, to_copy
    culprit: str
    phase: str  # forward, backward, optimizer, loop
    nan: bool
    dtype: str = ""
    where: str = ""
    module: str = ""  # class
    in_reference: bool | None = None  # FP32 breaks there too
    expected: float | None = None  # magnitude in FP32
    input_absmax: float | None = None
    hint: str = ""  # the cause that the examined operations suggest
    from_data: bool = False
    order: int = 0
    source: str = "examination"
    hazard: Hazard | None = None

    @property
    def in_forward(self) -> bool:
        return self.phase in ("forward", "loop") and self.phase not in STEP_HAPPENS


def where_of(place: Place) -> str:
    return "" if not place.file else place.file if place.line is None else f"{place.file}:{place.line}"


def break_of(exam: Examination) -> Break:
    first = exam.first_bad
    assert first is not None
    hazard = hazard_at(exam, first)
    return Break(
        step=exam.step,
        op=first.op.lstrip("_"),
        culprit=first.place.site or f"op:{first.op.lstrip('_')}",
        phase=first.place.phase,
        nan=first.nan,
        dtype=hazard.dtype if hazard is not None else "",
        where=where_of(first.place),
        module=first.place.module,
        in_reference=in_reference(exam, first),
        expected=first.expected,
        input_absmax=first.inputs.get("absmax"),
        hint=hazard.cause if hazard is not None else "",
        order=first.order,
        hazard=hazard,
    )


def hazard_at(exam: Examination, first: FirstBad) -> Hazard | None:
    """The hazard that the first bad number is, or that led to it: the nearest at or before it with a consequence."""
    exact = [h for h in exam.hazards if h.order == first.order]
    if exact:
        return max(exact, key=lambda h: h.consequence)
    before = [h for h in exam.hazards if h.order < first.order and math.isinf(h.consequence)]
    return max(before, key=lambda h: h.order, default=None)


def in_reference(exam: Examination, first: FirstBad) -> bool:
    """Would FP32 have broken at the same place?"""
    other = exam.first_bad_reference
    if other is None:
        return False
    return other.order <= first.order or (other.op == first.op and other.place.site == first.place.site)
