"""Small conclusions at the end of an examined step."""

from __future__ import annotations

import math

import torch

from ..core.examination import FirstBad, Place
from ..core.formats import format_of
from ..watch.places import Spot
from ..watch.tensors import short_dtype
from .damage_tags import Doing
from .records import Operand


def overflowed_by_scale(doing: Doing, scale: float | None) -> bool:
    """In backward, and the unscaled value would fit."""
    if scale is None or scale <= 1 or doing.spot.place.phase != "backward" or doing.facts.get("dtype") not in _RANGE:
        return False
    expected = doing.facts.get("reference_absmax", math.inf)
    return bool(expected / scale < _RANGE[doing.facts["dtype"]])


_RANGE = {short_dtype(d): format_of(d).max for d in (torch.float16,)}


def poisoned_buffer(buffer: str) -> Doing:
    """A buffer that was not finite before the step, and that nothing in it reads."""
    doing = Doing("given", "buffer", Spot(Place(buffer.rpartition(".")[0]), ""), 0, destroyed=True)
    doing.facts = {"operands": (Operand("buffer", buffer, nonfinite=True),)}
    return doing


def first_bad(doings: list[Doing]) -> FirstBad | None:
    made = [d for d in doings if d.trouble == "nonfinite"]
    if not made:
        return None
    first = min(made, key=lambda d: d.order)
    operands = [o for o in first.facts.get("operands", ()) if o.absmax or o.rms]
    expected = first.facts.get("reference_absmax", math.inf)
    inputs: dict[str, float] = {}
    for i, operand in enumerate(operands):
        inputs |= {f"absmax{i}": operand.absmax, f"absmin{i}": operand.absmin}
    return FirstBad(
        op={"to_copy": "to"}.get(first.op, first.op),
        place=first.spot.resolved(),
        order=first.order,
        nan=bool(first.facts.get("nan")),
        inputs=inputs,
        expected=expected if math.isfinite(expected) else None,
    )
