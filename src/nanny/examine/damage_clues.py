"""Clues at single operations: zeros and whole numbers that are lost, addends that vanish, decisions that flip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.formats import format_of
from ..core.ops import CHOICES, COUNT, PROTECT, SINGULAR_AT_ZERO
from ..watch.storages import key_of
from ..watch.tensors import LOW, has_storage, short_dtype
from .damage_ledger import Ledger
from .damage_numbers import absorption, flips, flush_numbers, lost_to_zero, tied_rows, whole_numbers_lost
from .damage_tags import Doing, Seen, Tag

_MANY_NUMBERS = 8  # as many different ones are ids, not a single mark


def zeros_behind(step: Seen) -> Doing | None:
    return next((t.zeros for t in step.tags if t.zeros is not None), None) if step.name in SINGULAR_AT_ZERO else None


def zeros(ledger: Ledger, step: Seen, real: Tensor, twin: Tensor) -> Doing | None:
    inherited = next((t.zeros for t in step.tags if t.zeros is not None), None)
    if real.dtype not in LOW and inherited is None:
        return None
    if lost_to_zero(real, twin) <= 0:
        return inherited if step.name in PROTECT and step.scalars else None  # a zero plus eps is still no number to divide by
    tiny = _tiny_constant(ledger, step, real)
    if inherited is not None and tiny is None:
        return inherited
    doing = ledger.suspect(step, "zeros")
    doing.facts |= {"dtype": short_dtype(real.dtype), "count": real.numel(), "operands": ledger.named(step)}
    doing.facts["numbers"] = flush_numbers(real, twin) | ({"constant": tiny} if tiny is not None else {})
    return doing


def _tiny_constant(ledger: Ledger, step: Seen, real: Tensor) -> float | None:
    """A number given to protect from zero that is itself zero in this format."""
    if step.name not in PROTECT or real.dtype not in LOW:
        return None
    smallest = format_of(real.dtype).flush_at
    return next((s for s in step.scalars if 0 < abs(s) <= smallest), None)


def whole_numbers(ledger: Ledger, step: Seen, real: Tensor, twin: Tensor) -> Doing | None:
    if real.dtype not in LOW or step.name not in COUNT or step.spot.place.phase == "backward":
        return None
    lost = whole_numbers_lost(real, twin)
    return None if lost is None else _integers(ledger, step, real, lost)


def _whole_numbers_cast(ledger: Ledger, step: Seen) -> Doing | None:
    """Read back as integers: they were meant to be whole, whatever they were stored with."""
    source = step.inputs[0]
    lost = whole_numbers_lost(source, ledger.twin_of(source)) if source.dtype in LOW else None
    return None if lost is None else _integers(ledger, step, source, lost)


def stored_numbers(ledger: Ledger, step: Seen, real: Tensor) -> None:
    """Whole numbers that were stored in 16 bits before the step, beyond what these count, and are read back as integers."""
    source = step.inputs[0] if step.inputs else real
    if step.name != "to_copy" or source.dtype not in LOW or real.dtype not in (torch.int64, torch.int32):
        return
    if ledger.tags.find(real) is not None:  # rounded within the step: that has its suspect
        return
    beyond = source.abs() > format_of(source.dtype).exact_integers
    share = float(beyond.double().mean())
    if not share or not bool((source == source.round()).all()) or not _are_rounded(source[beyond], ledger):
        return
    numbers = {"largest": float(source.abs().max()), "stored": True, "collisions": 0.0}
    doing = _integers(ledger, step, source, {"changed": share, **numbers})
    ledger.tags.put(real, Tag("to_copy", order=ledger.order, ids=doing))


def _are_rounded(numbers: Tensor, ledger: Ledger) -> bool:
    """Ids use the last bit of the format half of the time; multiples of a power of two, which it holds exactly, never."""
    last_bits = torch.frexp(numbers.float()).mantissa.abs() / format_of(numbers.dtype).unit_roundoff % 2
    return len(numbers.unique()) >= _MANY_NUMBERS and float(last_bits.mean()) >= ledger.limits.damage_last_bit


def _integers(ledger: Ledger, step: Seen, real: Tensor, lost: dict[str, Any]) -> Doing:
    doing = ledger.suspect(step, "integers")
    doing.facts |= {"dtype": short_dtype(real.dtype), "count": real.numel(), "share": lost["changed"], "numbers": lost}
    doing.facts["operands"] = ledger.named(step)
    return doing


def absorbed(ledger: Ledger, step: Seen, real: Tensor) -> Doing | None:
    """An addition of which less than half of the smaller addend arrives."""
    args = [a for a in step.op.args[:2] if isinstance(a, Tensor) and a.is_floating_point()]
    if len(args) < 2 or not has_storage(args[0]) or not has_storage(args[1]):
        return None
    values = [step.overwritten.get(key_of(a), a) if id(a) in step.written else a for a in args]
    if any(id(a) in step.written and key_of(a) not in step.overwritten for a in args):
        return None
    tags = [ledger.tags.find(a) or Tag() for a in args]
    for large, small in ((0, 1), (1, 0)):
        if values[large].shape != real.shape:
            continue
        sign = -1.0 if step.name == "sub" and small == 1 else 1.0
        alpha = float(step.op.kwargs.get("alpha", 1)) if small == 1 else 1.0
        lost = absorption(values[large], values[small].float() * (sign * alpha), real)
        if lost is None or lost.kept >= ledger.limits.damage_kept:
            continue
        doing = ledger.suspect(step, "absorbed")
        doing.facts |= {
            "dtype": short_dtype(real.dtype),
            "count": real.numel(),
            "share": lost.unchanged,
            "kept": lost.kept,
            "unchanged": lost.unchanged,
            "repeats": step.repeats if tags[large].made == step.previous else 1,
            "residual": tags[large].made in tags[small].ancestors and tags[large].made > 0,
            "operands": ledger.operands(step),
            "numbers": {"ratio": lost.ratio, "factor": tags[large].factor, "in_place": bool(step.written)},
        }
        return doing
    return None


def decision(ledger: Ledger, step: Seen, real: Tensor, twin: Tensor) -> None:
    count = 0 if twin is real else flips(real, twin)
    if not count:
        return
    worst = max(step.tags, key=lambda t: t.level, default=None)
    origin = worst.origin if worst is not None else None
    if origin is not None:
        origin.meets(step.name)
    chooses = step.name in CHOICES or step.name == "to_copy"
    if origin is None and (not (chooses or real.dtype == torch.bool) or step.spot.place.phase == "backward"):
        return
    if origin is None and step.name == "to_copy":
        origin = next((t.whole for t in step.tags if t.whole is not None), None) or _whole_numbers_cast(ledger, step)
    if origin is None:
        origin = ledger.suspect(step, "decision")
        origin.facts |= {
            "dtype": short_dtype(step.inputs[0].dtype) if step.inputs else "",
            "count": real.numel(),
            "share": count / real.numel(),
            "input_level": worst.level if worst is not None else 0.0,
            "operands": ledger.named(step),
            "numbers": {"flips": count, "ties": _ties(ledger, step)},
        }
    ledger.tags.put(
        real,
        Tag(
            ledger.producer(step),
            order=ledger.order,
            level=count / real.numel(),
            error=count,
            origin=origin,
            choice=chooses or any(t.choice for t in step.tags),
        ),
    )


def _ties(ledger: Ledger, step: Seen) -> float:
    if step.name not in ("argmax", "topk") or not step.inputs or not step.inputs[0].dim():
        return 0.0
    values, args = step.inputs[0], step.op.args
    if step.name == "topk":
        k, dim = int(args[1]), int(args[2]) if len(args) > 2 else -1
    else:
        k, dim = 1, int(args[1]) if len(args) > 1 and args[1] is not None else -1
    return tied_rows(values, ledger.twin_of(values), dim, k)
