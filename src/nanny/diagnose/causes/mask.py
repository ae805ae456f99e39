"""Masks."""

from __future__ import annotations

from collections.abc import Iterator

from ..choose import first_bad_cause
from ..describe import by_first_bad, by_hazard
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, cause
from ..signs import Signs


@cause("mask_inf_full_row", family="mask", precision=None)
def mask_inf_full_row(signs: Signs) -> Iterator[Diagnosis]:
    """A whole row of a softmax is masked with -inf (or a constant that is -inf in this format): 0/0 is NaN."""
    at = signs.first_bad
    if at is not None and first_bad_cause(at, signs) == "mask_inf_full_row":
        yield by_first_bad(signs, at, CERTAIN if at.source == "examination" else LIKELY)
    elif at is None:
        yield from by_hazard(signs, "mask_inf_full_row")
