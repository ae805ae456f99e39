"""NaN and infinities: who made them, who only passed them on, and which ones a program wants (masks)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.ops import CONSTANTS, MATMULS, SINGULAR_AT_ZERO, SOFTMAXES
from ..watch.places import Spot
from ..watch.tensors import short_dtype
from .damage_ledger import Ledger
from .damage_numbers import Extent, extent, rms_of
from .damage_tags import Doing, Seen, Tag
from .records import Operand

_MOSTLY_WRONG = 0.5


def badness(ledger: Ledger, step: Seen, value: Tensor, span: Extent, reference: bool) -> tuple[Doing | None, bool]:
    if span.finite:
        return None, False
    inherited = [(t.reference_bad, t.reference_quiet) if reference else (t.bad, t.quiet) for t in step.tags]
    loud = [bad for bad, quiet in inherited if bad is not None and not quiet]
    if loud:
        return loud[0], False
    still = [bad for bad, quiet in inherited if bad is not None and quiet]
    if still and not span.nan and span.only_minus_infinity:
        return still[0], True
    overflowed = [bad for bad in still if not bad.on_purpose]
    if overflowed and (step.name not in SOFTMAXES or overflowed[0].op in MATMULS):
        return overflowed[0], False
    if any(math.isinf(s) for s in step.scalars) and step.name in CONSTANTS | {"where"} and not span.nan:
        return ledger.purpose, True
    given = None if still else _given(ledger, step)
    if given is not None:
        return given, given.on_purpose
    found = next((s for s in ledger.suspects[-4:] if s.order == ledger.order and s.trouble == "nonfinite"), None)
    if found is None:
        found = ledger.suspect(step, "nonfinite")
        found.root = _root(ledger, step, value)
    return found, span.only_minus_infinity


def _given(ledger: Ledger, step: Seen) -> Doing | None:
    """An input that was not finite before any operation touched it."""
    for tensor in step.inputs:
        if not tensor.is_floating_point() or ledger.tags.find(tensor) is not None or id(tensor) in step.written:
            continue
        span = extent(tensor)
        if span.finite:
            continue
        role, name = ledger.roles.find(tensor) or ("given", "")
        if not span.nan and role in ("given", "buffer", "input") and span.high < math.inf:
            return ledger.purpose
        doing = ledger.suspect(step, "given")
        doing.facts |= {"operands": (Operand(role, name, nonfinite=True, dtype=short_dtype(tensor.dtype)),), "nan": span.nan}
        return doing
    return None


def check_given(ledger: Ledger, tensor: Tensor, role: str, name: str, spot: Spot) -> None:
    """Something from outside that is about to be added to."""
    span = extent(tensor)
    if span.finite:
        return
    doing = Doing("given", "add", spot, ledger.order)
    doing.facts = {"operands": (Operand(role, name, nonfinite=True, dtype=short_dtype(tensor.dtype)),), "nan": span.nan}
    ledger.suspects.append(doing)
    ledger.tags.put(tensor, Tag(order=ledger.order, bad=doing, reference_bad=doing))


def _root(ledger: Ledger, step: Seen, value: Tensor) -> Doing | None:
    """Division by a number that flushed, the root of a variance that cancelled: the first producer is to blame."""
    if step.name in SINGULAR_AT_ZERO:
        for tensor in step.inputs:
            tag = ledger.tags.find(tensor)
            if tag is not None and tag.zeros is not None and _breaks_where_zero(step, tensor, value):
                return tag.zeros
    worst = max(step.tags, key=lambda t: t.level, default=None)
    return worst.origin if worst is not None and worst.origin is not None and worst.level >= _MOSTLY_WRONG else None


def _breaks_where_zero(step: Seen, tensor: Tensor, value: Tensor) -> bool:
    """The same elements: a tensor may hold flushed zeros and break by its large numbers."""
    if id(tensor) in step.written:
        return True  # overwritten: nothing to tell by
    try:
        zero = (tensor == 0).broadcast_to(value.shape)
    except RuntimeError:
        return True
    return bool((zero & ~torch.isfinite(value)).any())


def settle(
    ledger: Ledger, step: Seen, bad: Doing, real: Tensor, twin: Tensor | None, span: Extent, wide: Extent, in_reference: bool
) -> None:
    if bad.order != ledger.order:
        bad.meets(step.name)
        if bad.trouble == "given" and step.name in SOFTMAXES and step.spot.place.phase == "forward":
            _masked_throughout(ledger, step, real)
        return
    if "share" in bad.facts:
        return
    finite = torch.isfinite(real)
    bad.facts |= {
        "share": 1 - float(finite.double().mean()),
        "count": real.numel(),
        "dtype": short_dtype(real.dtype),
        "nan": span.nan,
        "in_reference": in_reference,
        "reference_absmax": wide.absmax if wide.finite else math.inf,
        "reference_rms": rms_of(twin) if twin is not None else 0.0,
        "operands": ledger.operands(step),
    }
    first = [a for a in step.op.args[:2] if isinstance(a, Tensor)]
    if len(first) == 2 and first[0] is first[1]:
        bad.facts["numbers"] = {"of_itself": True}
    if step.name in SOFTMAXES and span.nan and isinstance(step.op.args[1], int):
        source = step.op.args[0]
        bad.facts["numbers"] = {
            "masked_rows": _masked_rows(step),
            "plus_infinity": bool((source == math.inf).any()),
            "nan_in": bool(source.isnan().any()),
        }


def _masked_rows(step: Seen) -> float:
    source, dim = step.op.args[:2]
    return float((source == -math.inf).all(dim).double().mean()) if isinstance(dim, int) else 0.0


def _masked_throughout(ledger: Ledger, step: Seen, real: Tensor) -> None:
    """Weights are NaN already; rows that are masked throughout would be NaN with any weights, and may be what spoilt them."""
    rows = _masked_rows(step)
    if not rows or not any(d.trouble == "given" and d.facts["operands"][0].role == "parameter" for d in ledger.suspects):
        return
    doing = ledger.suspect(step, "nonfinite")
    doing.facts |= {"share": rows, "count": real.numel(), "dtype": short_dtype(real.dtype), "nan": True, "in_reference": True}
    doing.facts["numbers"] = {"masked_rows": rows}
    doing.destroyed = doing.destroyed_reference = True
