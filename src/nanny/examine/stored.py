"""Numbers that were rounded to 16 bits before the step began: coordinates, tables, columns.

Their twins are as coarse as they are, so that no error is seen; what the program does with them tells. Angles that jump by a
radian from one such number to the next, while equal ones are to be mapped to different targets; columns of which a shift leaves
no more than the spacing of the format at their size. Numbers that the format holds exactly (a grid of 256 points, pixels, one-hot
rows) were not rounded: they do not use its last bit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..core.formats import format_of
from ..core.ops import DIFFERENCES, JOINS, LOOKUPS, MOVES, PERIODIC, SAME_VALUE, SINGULAR_AT_ONE
from ..watch.tensors import has_storage, short_dtype
from .measure import extent
from .tags import Ledger, Stored, TaggedOp

_MOST = 1 << 16  # elements that are looked at
_FEW = 16
_NEAR = 4  # spacings
_SURE, _FP32_ROUNDS = 0.25, 2.0**-22  # numbers whose spacing in 16 bits is a hundred times what FP32 itself is off at 1
_FORMATS = (torch.bfloat16, torch.float16)
_KEEPS = SAME_VALUE | MOVES


def stored_in(ledger: Ledger, tensor: Tensor) -> Stored | None:
    """What is known of a tensor as numbers from outside; None if they were not rounded, or have been computed with."""
    tag = ledger.tags.find(tensor) if has_storage(tensor) else None
    if tag is not None:
        return tag.stored
    return _as_stored(tensor) if _is_from_outside(ledger, tensor) else None


def _is_from_outside(ledger: Ledger, tensor: Tensor) -> bool:
    return not tensor.requires_grad and ledger.role(tensor)[0] in ("given", "input")


def _as_stored(tensor: Tensor) -> Stored | None:
    if not tensor.is_floating_point() or not _FEW <= tensor.numel() <= _MOST:
        return None
    if tensor.dtype in _FORMATS:
        return Stored(tensor.detach(), tensor.dtype, tensor.detach())
    if tensor.dtype != torch.float32:
        return None
    values = tensor.detach()
    dtype = next((d for d in _FORMATS if torch.equal(values.to(d).float(), values)), None)
    if dtype is None:
        return _as_rest_of_one(values)
    return Stored(values, dtype, values) if _is_rounded(values, dtype) else None


def _as_rest_of_one(values: Tensor) -> Stored | None:
    """sqrt(1 - x), or 1 - x, of a table x of numbers in 16 bits (a noise schedule), by its grid: by chance none lies on it."""
    if values.dim() != 1 or not bool(((values >= 0) & (values < 1)).all()) or bool(values.all()):
        return None
    for rest in (values.square(), values):
        table = 1 - rest
        sure = table[table >= _SURE]
        for dtype in _FORMATS:
            whole = table.to(dtype).float()
            if (
                len(sure) >= _FEW
                and bool(((sure - sure.to(dtype).float()).abs() <= _FP32_ROUNDS).all())
                and _is_rounded(whole, dtype)
            ):
                return Stored(values, dtype, whole, taken_from=1.0)
    return None


def stored_since(ledger: Ledger, step: TaggedOp, real: Tensor) -> Stored | None:
    """Of a result: the numbers were copied, moved, or multiplied by constants."""
    if step.spot.place.phase == "backward" or not step.inputs or step.written or real.numel() > _MOST:
        return None
    if step.name in JOINS:  # a batch is stacked of its rows
        return _as_stored(real) if not step.tags and all(_is_from_outside(ledger, t) for t in step.inputs) else None
    if step.name in _KEEPS:
        known = stored_in(ledger, step.inputs[0])
        if known is None or (not _is_raw(known) and step.name not in SAME_VALUE | LOOKUPS):
            return None
        return replace(known, values=real.detach()) if _is_raw(known) else known
    if step.name in DIFFERENCES and len(step.inputs) == 1 and step.scalars:
        known = stored_in(ledger, step.inputs[0])
        return replace(known, taken_from=step.scalars[0]) if known is not None and _is_raw(known) else None
    if step.name == "neg":
        return stored_in(ledger, step.inputs[0])
    if step.name == "sqrt":  # what was 0 is 0
        known = stored_in(ledger, step.inputs[0])
        return known if known is not None and known.taken_from is not None else None
    if step.name != "mul":
        return None
    known = next((s for t in step.inputs[:2] if (s := stored_in(ledger, t)) is not None), None)
    constants = [t for t in step.inputs[:2] if stored_in(ledger, t) is None]
    if known is None or len(constants) + len(step.scalars) != 1 or any(t.requires_grad for t in constants):
        return None
    factor = extent(constants[0]).absmax if constants else abs(step.scalars[0])
    return replace(known, stretch=known.stretch * factor)


def coarse_angle(ledger: Ledger, step: TaggedOp) -> None:
    """Sine or cosine of numbers whose neighbours in the format are too far apart."""
    known = stored_in(ledger, step.inputs[0]) if step.name in PERIODIC and step.inputs else None
    if known is None or any(values is known.values for values, _ in ledger.coarse):
        return
    spacing = float(_spacings(known.values, known.dtype).max())
    if spacing * known.stretch >= ledger.limits.stored_angle and _is_rounded(known.values, known.dtype):
        numbers = {"spacing": spacing, "angle": spacing * known.stretch}
        suspect = ledger.suspect(step, "stored").note(dtype=short_dtype(known.dtype), count=known.values.numel(), numbers=numbers)
        ledger.coarse.append((known.values, suspect))


def mark_unexplained(ledger: Ledger, wanted: Tensor) -> None:
    """Targets that differ although the positions are equal, as they were stored."""
    for values, suspect in ledger.coarse:
        if not wanted.dim() or not values.dim() or len(values) != len(wanted) or wanted.numel() > _MOST:
            continue
        _, group = values.float().reshape(len(values), -1).unique(dim=0, return_inverse=True)
        y = wanted.detach().double().reshape(len(wanted), -1)
        sizes = torch.bincount(group)
        mean = torch.zeros(len(sizes), y.shape[1], dtype=y.dtype).index_add_(0, group, y) / sizes[:, None]
        shared, varies = sizes[group] > 1, float((y - y.mean(0)).square().mean())
        if int(shared.sum()) < _FEW or not varies:
            continue
        within = float((y - mean[group])[shared].square().mean())
        suspect.numbers = {**suspect.numbers, "unexplained": math.sqrt(within / varies), "equal": float(shared.double().mean())}


def coarse_series(ledger: Ledger, step: TaggedOp, real: Tensor) -> None:
    """One number taken from many (a column of a table, a series in time): what that leaves is no more than their spacing."""
    if step.name != "sub" or step.spot.place.phase == "backward":
        return
    args = [a for a in step.op.args[:2] if isinstance(a, Tensor)]
    if len(args) < 2 or args[0].shape != real.shape or real.dim() < 2 or id(args[0]) in step.written:
        return
    table, shift = args
    one = (1,) * (real.dim() - shift.dim()) + tuple(shift.shape)
    along = [d for d in range(real.dim()) if one[d] == 1] if shift.numel() > 1 else [0]
    count = math.prod(real.shape[d] for d in along)
    known = stored_in(ledger, table) if count >= _FEW else None
    if known is None or not _is_raw(known):
        return

    def series(x: Tensor) -> Tensor:
        return x.detach().double().movedim(along, list(range(len(along)))).reshape(count, -1)

    values, form = series(table), format_of(known.dtype)
    left, apart = (x.square().mean(0).sqrt() for x in (series(real), _spacings(values, known.dtype)))
    varies = values.amin(0) != values.amax(0)
    exact = (values == values.round()).all(0) & (values.abs().amax(0) <= form.exact_integers)
    uses_last_bit = _last_bits(values, known.dtype).mean(0) >= ledger.limits.damage_last_bit
    coarse = varies & ~exact & uses_last_bit & (left < ledger.limits.stored_column * apart)
    lost, all_ = int(coarse.sum()), int(varies.sum())
    if not lost or lost < all_ * ledger.limits.stored_columns:
        return
    worst = int(torch.where(coarse, apart / left, 0.0).argmax())
    ledger.suspect(step, "stored").note(
        dtype=short_dtype(known.dtype),
        count=table.numel(),
        share=lost / all_,
        numbers={
            "series": worst,
            "size": float(values[:, worst].abs().max()),
            "spacing": float(apart[worst]),
            "spread": float(left[worst]),
            "lost": lost,
            "of": all_,
        },
    )


def fell_together(ledger: Ledger, tensor: Tensor, op: str = "") -> bool:
    """1 - x of a table that comes close to 1, in steps of its format, and is exactly 1 at several places: they were not equal.

    `op`: what takes the difference itself, as log1p does of -x.
    """
    known = stored_in(ledger, tensor)
    edge = known.taken_from if known is not None else None
    if known is not None and edge is None and op in SINGULAR_AT_ONE:
        edge = 1.0 if bool((known.whole == 1).any()) else -1.0
    if known is None or edge is None or not _is_rounded(known.whole, known.dtype):
        return False
    away = (known.whole.double() - edge).abs() / (format_of(known.dtype).eps * abs(edge) or 1.0)  # in spacings
    return int((away == 0).sum()) > 1 and int(((away > 0) & (away <= _NEAR)).sum()) > 1


def _is_raw(known: Stored) -> bool:
    """Moved at most."""
    return known.stretch == 1 and known.taken_from is None


def _spacings(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Between each number and its neighbour in the format."""
    exponent = torch.frexp(values.double()).exponent.double()
    return torch.where(values == 0, 0.0, format_of(dtype).unit_roundoff * 2.0**exponent)


def _last_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    return (torch.frexp(values.double()).mantissa.abs() / format_of(dtype).unit_roundoff) % 2


def _is_rounded(values: Tensor, dtype: torch.dtype) -> bool:
    """They use the last bit of the format; below half of the largest too, where a grid that it holds exactly does not."""
    size = values.abs().reshape(-1)
    low = size[(size > 0) & (size < size.max() / 2)]
    return len(low) >= _FEW and float((_last_bits(low, dtype) == 1).double().mean()) >= 0.25
