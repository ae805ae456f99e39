"""NaN and infinities: who made them, who only passed them on, and which ones a program wants (masks)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..core.examination import FirstBad, Place
from ..core.formats import FP16
from ..core.ops import BROKEN_BY_ZERO, CONSTANTS, MATMULS, PARTIAL, SINGULAR_AT_ONE, SINGULAR_AT_ZERO, SOFTMAXES
from ..watch.op_facts import is_collective, is_pure
from ..watch.places import Spot
from ..watch.tensors import short_dtype, tensors_in
from .measure import Extent, exponents_beside, extent, rms_of
from .records import Operand, Suspect
from .stored import fell_together
from .tags import Ledger, Tag, TaggedOp

_MOSTLY_WRONG = 0.5


def maker_of_nonfinite(
    ledger: Ledger, step: TaggedOp, value: Tensor, span: Extent, reference: bool
) -> tuple[Suspect | None, bool]:
    """The suspect behind the NaN or infinities of a value, and whether they are such as masks have; none if it is finite."""
    if span.finite:
        return None, False
    inherited = [(t.reference_bad, t.reference_quiet) if reference else (t.bad, t.quiet) for t in step.tags]
    loud = [bad for bad, quiet in inherited if bad is not None and not quiet]
    if loud:
        return loud[0], False
    still = [bad for bad, quiet in inherited if bad is not None and quiet]
    if still and not span.nan and span.only_minus_infinity:
        return still[0], True
    overflowed = [bad for bad in still if bad is not ledger.purpose]
    if overflowed and (step.name not in SOFTMAXES or overflowed[0].op in MATMULS):
        return overflowed[0], False
    if any(math.isinf(s) for s in step.scalars) and step.name in CONSTANTS | {"where"} and not span.nan:
        return ledger.purpose, True
    given = None if still else _bad_input(ledger, step)
    if given is not None and (given is not ledger.purpose or (span.only_minus_infinity and not span.nan)):
        return given, given is ledger.purpose
    found = next((s for s in ledger.suspects[-4:] if s.order == ledger.order and s.trouble == "nonfinite"), None)
    if found is None:
        found = ledger.suspect(step, "nonfinite")
        found.root = _root(ledger, step, value)
    return found, span.only_minus_infinity


def _bad_input(ledger: Ledger, step: TaggedOp) -> Suspect | None:
    """An input that was not finite before any operation touched it."""
    for tensor in step.inputs:
        if not tensor.is_floating_point() or ledger.tags.find(tensor) is not None or id(tensor) in step.written:
            continue
        span = extent(tensor)
        if span.finite:
            continue
        role, name = ledger.roles.find(tensor) or ("given", "")
        if not span.nan and role in ("given", "buffer", "input") and span.high < math.inf:
            ledger.stored_infinity |= tensor.dtype == torch.float16
            return ledger.purpose
        operands = (_nonfinite_operand(tensor, role, name),)
        numbers = {"constant": role == "given" and tensor.numel() == 1}
        return ledger.suspect(step, "given").note(
            operands=operands, nan=span.nan, dtype=short_dtype(tensor.dtype), numbers=numbers
        )
    return None


def _nonfinite_operand(tensor: Tensor, role: str, name: str) -> Operand:
    return Operand(role, name, nonfinite=True, dtype=short_dtype(tensor.dtype))


def check_given(ledger: Ledger, tensor: Tensor, role: str, name: str, spot: Spot) -> None:
    """Something from outside that is about to be added to."""
    span = extent(tensor)
    if span.finite:
        return
    operands = (_nonfinite_operand(tensor, role, name),)
    suspect = Suspect("given", "add", spot.place, ledger.order, operands=operands, nan=span.nan, spot=spot)
    ledger.suspects.append(suspect)
    ledger.tags.put(tensor, Tag(order=ledger.order, bad=suspect, reference_bad=suspect))


def poisoned_buffer(buffer: str) -> Suspect:
    """A buffer that was not finite before the step, and that nothing in it reads."""
    operands = (Operand("buffer", buffer, nonfinite=True),)
    return Suspect("given", "buffer", Place(buffer.rpartition(".")[0]), 0, operands=operands, destroyed=True)


def _root(ledger: Ledger, step: TaggedOp, value: Tensor) -> Suspect | None:
    """Division by a number that flushed, the root of a variance that cancelled: the first producer is to blame."""
    for tensor in arguments_that_break(step):
        tag = ledger.tags.find(tensor)
        if tag is not None and tag.zeros is not None and _breaks_at(0.0, step, tensor, value):
            return tag.zeros
    worst = max(step.tags, key=lambda t: t.level, default=None)
    return worst.origin if worst is not None and worst.origin is not None and worst.level >= _MOSTLY_WRONG else None


def arguments_that_break(step: TaggedOp) -> list[Tensor]:
    """Those whose zeros an operation cannot bear: of a quotient the divisor, whatever is divided."""
    at = BROKEN_BY_ZERO.get(step.name)
    there = {id(t) for t in tensors_in(step.op.args[at : at + 1])} if at is not None else set()
    return [t for t in step.inputs if id(t) in there]


def _breaks_at(edge: float, step: TaggedOp, tensor: Tensor, value: Tensor) -> bool:
    """The same elements: a tensor may hold flushed zeros and break by its large numbers."""
    if id(tensor) in step.written:
        return True  # overwritten: nothing to tell by
    try:
        there = (tensor.abs() == edge).broadcast_to(value.shape)
    except RuntimeError:
        return True
    return bool((there & ~torch.isfinite(value)).any())


def note_nonfinite(
    ledger: Ledger,
    step: TaggedOp,
    bad: Suspect,
    real: Tensor,
    twin: Tensor | None,
    span: Extent,
    wide: Extent,
    in_reference: bool,
) -> None:
    """The numbers of an operation that made NaN or infinities; one that only met them is noted with the maker."""
    if bad.order != ledger.order:
        bad.meets(step.name)
        bad.fed |= bad.trouble == "given" and step.spot.place.phase == "forward"
        if bad.trouble == "given" and step.name in SOFTMAXES and step.spot.place.phase == "forward":
            _masked_throughout(ledger, step, real)
        return
    if bad.count:
        return
    bad.note(
        share=1 - float(torch.isfinite(real).double().mean()),
        count=real.numel(),
        dtype=short_dtype(real.dtype),
        nan=span.nan,
        in_reference=in_reference,
        reference_absmax=wide.absmax if wide.finite else math.inf,
        reference_rms=rms_of(twin) if twin is not None else 0.0,
        operands=bad.operands if bad.trouble == "given" else ledger.sized_operands(step),  # the one that was bad, not the first
        exponents=exponents_beside(real, twin),
    )
    first = [a for a in step.op.args[:2] if isinstance(a, Tensor)]
    if len(first) == 2 and first[0] is first[1]:
        bad.numbers = {"of_itself": True}
    if step.name in SOFTMAXES and span.nan and isinstance(step.op.args[1], int):
        bad.numbers = {"masked_rows": _masked_rows(step)}
    if not is_pure(step.op.func) and not is_collective(step.op.func):
        bad.numbers = {"opaque": True}
    if in_reference and step.name in PARTIAL and any(_stored_over_the_edge(ledger, step, t, real) for t in step.inputs):
        together = any(fell_together(ledger, t, step.name) for t in step.inputs)
        bad.numbers = {**bad.numbers, "stored": True, "fell_together": together}


def _stored_over_the_edge(ledger: Ledger, step: TaggedOp, tensor: Tensor, value: Tensor) -> bool:
    """It breaks at numbers from 16 bits that are nearer to the edge than these lie apart: rounding may have put them there."""
    if step.name in SINGULAR_AT_ZERO | SINGULAR_AT_ONE and fell_together(ledger, tensor, step.name):
        return _breaks_at(1.0 if step.name in SINGULAR_AT_ONE else 0.0, step, tensor, value)
    spacing = ledger.spacing(tensor)
    edges: tuple[float, ...] = (1.0,) if step.name in SINGULAR_AT_ONE else (0.0,) if step.name in SINGULAR_AT_ZERO else (0.0, 1.0)
    if tensor.dtype == torch.bfloat16 and ledger.tags.find(tensor) is None:
        edges = tuple(edge for edge in edges if edge)  # bfloat16 itself flushes nothing: a zero was a zero
    if not spacing or not edges:
        return False
    try:
        near = torch.stack([(tensor.abs() - edge).abs() <= spacing for edge in edges]).any(0).broadcast_to(value.shape)
    except RuntimeError:
        return True
    return bool((near & ~torch.isfinite(value)).any())


def _masked_rows(step: TaggedOp) -> float:
    source, dim = step.op.args[:2]
    return float((source == -math.inf).all(dim).double().mean()) if isinstance(dim, int) else 0.0


def _masked_throughout(ledger: Ledger, step: TaggedOp, real: Tensor) -> None:
    """Weights are NaN already; rows that are masked throughout would be NaN with any weights, and may be what spoilt them."""
    rows = _masked_rows(step)
    if not rows or not any(s.trouble == "given" and s.operands[0].role == "parameter" for s in ledger.suspects):
        return
    ledger.suspect(step, "nonfinite").note(
        share=rows,
        count=real.numel(),
        dtype=short_dtype(real.dtype),
        nan=True,
        in_reference=True,
        numbers={"masked_rows": rows},
        destroyed=True,
        destroyed_reference=True,
    )


def first_bad(suspects: Iterable[Suspect]) -> FirstBad | None:
    made = [s.first() if s.first().trouble == "nonfinite" else s for s in suspects if s.trouble == "nonfinite"]
    if not made:
        return None
    first = min(made, key=lambda s: s.order)
    inputs: dict[str, float] = {}
    for i, operand in enumerate(o for o in first.operands if o.absmax or o.rms):
        inputs |= {f"absmax{i}": operand.absmax, f"absmin{i}": operand.absmin}
    return FirstBad(
        op=first.op_name,
        place=first.place if first.spot is None else first.spot.resolve(),
        order=first.order,
        nan=first.nan,
        inputs=inputs,
        expected=first.reference_absmax if not first.in_reference and math.isfinite(first.reference_absmax) else None,
        exponents=first.exponents,
    )


def overflowed_by_scale(suspect: Suspect, scale: float | None) -> bool:
    """In backward, and the unscaled value would fit."""
    if scale is None or scale <= 1 or not suspect.in_backward or suspect.dtype != "float16":
        return False
    return suspect.reference_absmax / scale < FP16.max
