"""Masks."""

from __future__ import annotations

from collections.abc import Iterator

from ..accounts import by_break, by_hazard
from ..producers import cause_of
from ..registry import CERTAIN, LIKELY, Suspicion, cause
from ..signs import Signs


@cause("mask_inf_full_row", "mask", precision=None)
def mask_inf_full_row(signs: Signs) -> Iterator[Suspicion]:
    """A whole row of a softmax is masked with -inf (or a constant that is -inf in this format): 0/0 is NaN.

    Fix: a boolean mask with scaled_dot_product_attention (which gives 0 for empty rows), a finite constant that fits the format
    (torch.finfo(dtype).min), or one key that every row may see.

    Confirm: find a row of the mask without any allowed key: it is a padded query.
    """
    at = signs.break_
    if at is not None and cause_of(at, signs) == "mask_inf_full_row":
        yield by_break(signs, at, CERTAIN + 0.02 if at.source == "examination" else LIKELY)
    elif at is None:
        yield from by_hazard(signs, "mask_inf_full_row")
