"""Follows damage through a step: which operation made it, and where it arrived.

Every tensor that low precision reached has a tag beside its storage: how far it is from its FP32 twin, and which earlier
operation (suspect) is to blame for that. An operation whose inputs are close to their twins and whose output is not becomes a
suspect; one that only passes damage on inherits the blame; where the damage fades, so does the blame. At the end the tags of
loss, gradients and weights tell what each suspect did to them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.formats import FP32, format_of
from ..core.ops import (
    ADD_UP,
    ADDITIVE,
    BATCH_NORMS,
    CHOICES,
    COUNT,
    DIFFERENCES,
    JOINS,
    LOOKUPS,
    LOSS_OPS,
    MATMULS,
    MOVES,
    PERIODIC,
    PRODUCTS,
    PROTECT,
    REDUCTIONS,
    ROOTS,
    SAME_VALUE,
    SCALINGS,
    SCATTERS,
    SHAPED_ALIKE,
    SHIFTS,
    TWO_TERMS,
    UNWRITTEN,
    bare_op,
)
from ..watch.op_facts import is_collective
from ..watch.op_stream import Op
from ..watch.places import Spot
from ..watch.storages import key_of, whole_storage
from ..watch.tensors import LOW, has_storage, short_dtype, tensors_in
from ..watch.twins import Operation, saturates_as
from .measure import (
    EXACT,
    SPOILED,
    ErrorLevel,
    Extent,
    absorption,
    bias_of,
    exponents_beside,
    extent,
    flips,
    flush_numbers,
    level_of,
    lost_to_zero,
    own_error,
    rms_of,
    tied_rows,
    whole_numbers_lost,
)
from .nonfinite import arguments_that_break, maker_of_nonfinite, note_nonfinite
from .records import Suspect
from .stored import coarse_angle, coarse_series, mark_unexplained, stored_since
from .tags import Ledger, Tag, TaggedOp

_MANY_NUMBERS = 4  # as many different ones are ids, not a mark or two
_ADD_PRODUCTS = REDUCTIONS | PRODUCTS | MATMULS
_KEEPS_ZEROS = SAME_VALUE | MOVES | ROOTS
_KEEPS_SPACING = SAME_VALUE | MOVES | SHIFTS
_CARRIES_ADDENDS = SAME_VALUE | TWO_TERMS
_Line = tuple[str, Any, int, str]


class Follower:
    """`see` every operation of a step, in order."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lines: Counter[_Line] = Counter()
        self._chains: dict[_Line, int] = {}  # how often in a row it has gone on from what it made itself
        self._last_at: dict[_Line, int] = {}  # line -> the operation that ran there last
        self._sums: dict[_Line, Suspect] = {}  # line of a running sum -> its suspect

    def see(self, op: Operation, spot: Spot, overwritten: Mapping[int, Tensor]) -> None:
        """`overwritten`: values of low-precision tensors as they were before this operation wrote into them."""
        self._ledger.order += 1
        name = bare_op(op.name)
        self._ledger.names.append(name)
        if op.is_view or name in UNWRITTEN:
            return
        outs, twins = self._results(op)
        # what beta multiplies with 0 may be memory that nobody wrote
        inputs = op.stored if op.kwargs.get("beta") != 0 else [t for t in op.stored if t is not op.args[0]]
        tags = [tag for t in inputs if (tag := self._ledger.tags.find(t)) is not None] if name not in SHAPED_ALIKE else []
        concerned = op.twin_out is not op.out and any(o is not t for o, t in zip(outs, twins))
        self._ledger.note_computed(inputs, outs)
        self._ledger.note_difference(op, name)
        self._ledger.note_decay(op, name)
        if not concerned and not tags and not outs:
            return
        line = self._line(spot, name)
        step = TaggedOp(op, name, spot, inputs, tags, overwritten, self._lines[line] + 1, self._last_at.get(line, -1))
        if name in TWO_TERMS and spot.place.phase != "backward":  # micro-batches run the same line again, and begin anew
            step.repeats = self._chains.get(line, 0) + 1 if step.continues else 1
            self._chains[line] = step.repeats
        if step.written:
            self._ledger.note_updated(t for t in inputs if id(t) in step.written)
        if concerned:
            self._lines[line] += 1
            if line in self._sums and step.continues:
                self._sums[line].repeats = step.repeats
            if name not in SAME_VALUE:
                self._last_at[line] = self._ledger.order
        ids = next((tag.ids for tag in tags if tag.ids is not None), None)
        if ids is not None and name in LOOKUPS:
            ids.meets(name)
        if (concerned or self._ledger.coarse) and (wanted := self._find_target(step)) is not None:
            coarse_target(self._ledger, step, wanted)
            mark_unexplained(self._ledger, wanted)
        if spot.place.phase != "backward":
            coarse_angle(self._ledger, step)
        for real, twin in zip(outs, twins):
            if real.is_floating_point():
                self._follow_floats(step, real, twin)
            elif concerned and twin is not None and not real.is_complex() and real.numel():
                decision(self._ledger, step, real, twin)
                stored_numbers(self._ledger, step, real)
            elif ids is not None:
                self._ledger.tags.put(real, Tag(name, order=self._ledger.order, ids=ids))

    def pass_on(self, op: Op) -> None:
        """A collective, which is not run twice: NaN and infinities that went in come out of it, and who made them is the same."""
        tags = [tag for t in op.inputs if has_storage(t) and (tag := self._ledger.tags.find(t)) is not None]
        maker = next((tag.bad for tag in tags if tag.bad is not None and not tag.quiet), None)
        for out in (*op.written, *tensors_in(op.out)) if maker is not None and is_collective(op.func) else ():
            if has_storage(out):
                self._ledger.tags.put(out, Tag(order=self._ledger.order, bad=maker, reference_bad=self._ledger.taken_over))

    @staticmethod
    def _line(spot: Spot, name: str) -> _Line:
        return (spot.place.site, spot.code, spot.instruction, name)

    def _results(self, op: Operation) -> tuple[list[Tensor], list[Tensor | None]]:
        outs = op.made
        if outs or op.out is not None:
            made = [t for t in tensors_in(op.twin_out) if has_storage(t)] if op.twin_out is not None else []
            return outs, [*made] if len(made) == len(outs) else [None] * len(outs)
        outs = [t for t in op.written if has_storage(t)]
        return outs, [self._ledger.twin_of(t) for t in outs]

    def _follow_floats(self, step: TaggedOp, real: Tensor, twin: Tensor | None) -> None:
        if real.dtype in LOW:
            self._ledger.low_dtype = real.dtype
        span = extent(real)
        same = twin is real
        wide = span if same or twin is None else extent(twin)
        coarse_series(self._ledger, step, real)
        stored = stored_since(self._ledger, step, real)
        if same and span.finite and not step.tags and stored is None:
            return
        bad, quiet = maker_of_nonfinite(self._ledger, step, real, span, reference=False)
        if same:
            reference_bad, reference_quiet = bad, quiet
        else:
            reference_bad, reference_quiet = maker_of_nonfinite(
                self._ledger, step, twin if twin is not None else real, wide, reference=True
            )
        if bad is not None and bad is not self._ledger.purpose:
            note_nonfinite(self._ledger, step, bad, real, twin, span, wide, reference_bad is not None)
        tag = Tag(
            producer=self._ledger.producer(step),
            source=self._ledger.role(step.inputs[0]) if step.name in SAME_VALUE and step.inputs else ("", ""),
            order=self._ledger.order,
            made=self._ledger.order_made(step),
            factor=step.factor,
            of_gradient=step.spot.place.phase == "loop" and any(self._ledger.role(t)[0] == "gradient" for t in step.inputs),
            bad=bad,
            quiet=quiet,
            reference_bad=reference_bad,
            reference_quiet=reference_quiet,
            ancestors=self._ledger.ancestors(step),
            spacing=stored_spacing(self._ledger, step),
            stored=stored,
            whole=next((t.whole for t in step.tags if t.whole is not None), None),
            choice=not step.is_learned and any(t.choice for t in step.tags),
        )
        if not same and twin is not None and real.numel():
            tag = self._compare(step, real, twin, span, tag)
        self._ledger.tags.put(real, tag)

    def _compare(self, step: TaggedOp, real: Tensor, twin: Tensor, span: Extent, tag: Tag) -> Tag:
        if step.spot.place.phase == "optimizer" and step.name in ("addcdiv", "div"):
            divided_by_zeros(self._ledger, step)
        if step.spot.place.phase == "optimizer" and real.dtype not in LOW:
            return replace(tag, zeros=zeros(self._ledger, step, real, twin))
        spoiled = tag.bad is not None and tag.reference_bad is None and not tag.quiet
        level = SPOILED if spoiled else level_of(real, twin) if span.finite or tag.quiet else EXACT
        graded = self._ledger.grade(level, real.dtype)
        if step.name in JOINS and not spoiled:
            graded = max((t.level for t in step.tags), default=0.0)
        lost = zeros(self._ledger, step, real, twin)
        whole = tag.whole or whole_numbers(self._ledger, step, real, twin)
        missing = self._find_missing(step, real)
        origin = None
        if spoiled:
            origin = tag.bad
        elif graded > self._ledger.threshold(real.dtype) / self._ledger.limits.damage_fades:
            origin = self._blame(step, real, twin, level, graded, whole or missing)
        faded = self._find_faded(step, origin)
        return replace(
            tag, level=graded, error=level.error, origin=origin, zeros=lost, whole=whole, absorbed=missing, faded=faded
        )

    def _find_faded(self, step: TaggedOp, origin: Suspect | None) -> Suspect | None:
        made = origin if origin is not None and origin.jumped(self._ledger.limits.damage_made) else None
        return made or next((t.faded for t in step.tags if t.faded is not None), None)

    def _find_missing(self, step: TaggedOp, real: Tensor) -> Suspect | None:
        """An addend that did not arrive, here or in a sum that this one continues."""
        if step.spot.place.phase == "backward" or step.name not in _CARRIES_ADDENDS:
            return None
        before = next((t.absorbed for t in step.tags if t.absorbed is not None), None)
        here = find_absorbed(self._ledger, step, real) if real.dtype in LOW and step.name in TWO_TERMS else None
        return before or here

    def _blame(
        self, step: TaggedOp, real: Tensor, twin: Tensor, level: ErrorLevel, graded: float, behind: Suspect | None
    ) -> Suspect | None:
        given = [t for t in step.tags if t.origin is not None]
        for tag in given:
            assert tag.origin is not None
            tag.origin.meets(step.name)
            if tag.choice and step.spot.place.phase != "backward":
                tag.origin.target |= step.name in LOSS_OPS
                tag.origin.chose |= step.name not in LOSS_OPS and step.is_learned
        if step.name in DIFFERENCES and self._cancels(step, twin):
            for tag in given:
                assert tag.origin is not None
                # of a sum of products the difference is what matters, of other numbers what varies in them
                before = tag.origin.plain if tag.origin.op in _ADD_PRODUCTS else tag.origin.centred
                tag.origin.cancelled |= level.plain > self._ledger.limits.damage_made * before
        wanted = self._find_target(step)
        aim = self._ledger.tags.find(wanted) if wanted is not None else None
        if aim is not None and aim.origin is not None:
            aim.origin.target = True
        if given and not self._made_by_kernel(step, real, level):
            additive, made = step.name in ADDITIVE, self._ledger.limits.damage_made
            worst = max(given, key=lambda t: t.error if additive else t.level)
            if worst.origin is not None and (worst.level >= graded / made or worst.origin.jumped(made)):
                return worst.origin
        elif not given and (behind_all := self._faded_before(step, real, level)) is not None:
            return behind_all
        if graded <= self._ledger.threshold(real.dtype) or _subtracts_itself(step, twin):
            return None
        same = next((s for s in self._ledger.suspects[-4:] if s.order == self._ledger.order and s.trouble == "error"), None)
        return same or self._error_suspect(step, real, twin, level, graded, behind)

    def _faded_before(self, step: TaggedOp, real: Tensor, level: ErrorLevel) -> Suspect | None:
        """Who damaged what a sum of backward lays bare again: in many small numbers beside a few large ones it was not seen."""
        before = next((t.faded for t in step.tags if t.faded is not None), None)
        if before is None or step.name not in ADD_UP or step.spot.place.phase != "backward" or step.written:
            return None
        own = own_error(step.op.func, step.op.args, step.op.kwargs, [real])
        return before if own is not None and own * self._ledger.limits.damage_made < level.plain else None

    def _cancels(self, step: TaggedOp, twin: Tensor) -> bool:
        """A difference of which little is left; not one of a prediction and its target, which is to become small."""
        args = [a for a in step.op.args[:2] if isinstance(a, Tensor)]
        if len(args) < 2 or step.spot.place.phase == "backward" or args[0].requires_grad != args[1].requires_grad:
            return False
        return rms_of(twin) * self._ledger.limits.damage_bits_lost <= max(map(rms_of, args))

    def _made_by_kernel(self, step: TaggedOp, real: Tensor, level: ErrorLevel) -> bool:
        """A scatter that adds up in 16 bits is wrong by itself, whatever the error of what it adds."""
        if step.name not in SCATTERS or real.dtype not in LOW or step.written:
            return False
        own = own_error(step.op.func, step.op.args, step.op.kwargs, [real])
        return own is not None and own >= max(self._ledger.threshold(real.dtype), level.plain / self._ledger.limits.damage_made)

    def _find_target(self, step: TaggedOp) -> Tensor | None:
        """What a loss compares a prediction with: it carries no gradient, the prediction does."""
        args = [a for a in step.op.args[:2] if isinstance(a, Tensor) and a.is_floating_point() and has_storage(a)]
        by_hand = step.name == "sub" and step.spot.place.phase == "loop"
        if len(args) < 2 or not (step.name in LOSS_OPS or by_hand) or args[0].requires_grad == args[1].requires_grad:
            return None
        wanted = args[args[0].requires_grad]
        tag = self._ledger.tags.find(wanted)
        logs = tag is not None and tag.origin is not None and "log_softmax" in tag.origin.after
        return None if by_hand and logs else wanted  # a margin of two policies has no target

    def _is_residual(self, step: TaggedOp) -> bool:
        """The smaller addend was computed from the larger one."""
        pairs = [(rms_of(t), self._ledger.tags.find(t) or Tag()) for t in step.inputs[:2]]
        (_, small), (_, large) = sorted(pairs, key=lambda pair: pair[0]) if len(pairs) == 2 else ((0.0, Tag()), (0.0, Tag()))
        return large.made > 0 and large.made in small.ancestors

    def _error_suspect(
        self, step: TaggedOp, real: Tensor, twin: Tensor, level: ErrorLevel, graded: float, behind: Suspect | None
    ) -> Suspect:
        saturates = saturates_as(step.op.args) if step.name == "clamp" else None
        suspect = self._ledger.suspect(step, "saturated" if saturates else "error")
        if step.name in TWO_TERMS:
            self._sums[self._line(step.spot, step.name)] = suspect
        missing = next((t.absorbed for t in step.tags if t.absorbed is not None), None)
        suspect.root = behind or missing or zeros_behind(self._ledger, step)
        outs = [t for t in tensors_in(step.op.out) if t.is_floating_point()]
        seeded = torch.Tag.nondeterministic_seeded in step.op.func.tags
        numbers = flush_numbers(real, twin)
        numbers |= {"bias": b} if (b := bias_of(real, twin)) is not None else {}
        if step.name in PERIODIC and step.inputs:
            suspect.wide_angle = step.inputs[0].dtype not in LOW
            # not the median: of frequencies that span decades only the fast ones turn far enough to go wrong
            numbers["phase_error"] = rms_of(step.inputs[0].double() - self._ledger.twin_of(step.inputs[0]).double())
        if step.name in BATCH_NORMS and step.inputs[0].dim() > 1:
            numbers["samples"] = step.inputs[0].numel() / step.inputs[0].shape[1]
        return suspect.note(
            dtype=saturates or short_dtype(real.dtype),
            count=real.numel(),
            plain=level.plain,
            centred=level.centred,
            level=graded,
            input_level=max((t.level for t in step.tags), default=0.0),
            reference_absmax=extent(twin).absmax,
            reference_rms=rms_of(twin),
            own=None if step.written or seeded else own_error(step.op.func, step.op.args, step.op.kwargs, outs),
            operands=self._ledger.sized_operands(step),
            residual=step.name in TWO_TERMS and self._is_residual(step),
            numbers=numbers,
        )


def _subtracts_itself(step: TaggedOp, twin: Tensor) -> bool:
    """x - x: what is left is the rounding that the program asked for (a quantiser with a straight-through gradient)."""
    sizes = [rms_of(t) for t in step.inputs[:2]] if step.name in DIFFERENCES and not step.written else []
    return len(sizes) == 2 and rms_of(twin) <= FP32.unit_roundoff * max(sizes)


# clues at single operations: zeros and whole numbers that are lost, addends that vanish, decisions that flip


def zeros_behind(ledger: Ledger, step: TaggedOp) -> Suspect | None:
    tags = (ledger.tags.find(t) for t in arguments_that_break(step))
    return next((t.zeros for t in tags if t is not None and t.zeros is not None), None)


def zeros(ledger: Ledger, step: TaggedOp, real: Tensor, twin: Tensor) -> Suspect | None:
    inherited = next((t.zeros for t in step.tags if t.zeros is not None), None) or _flushed_before(ledger, step)
    if real.dtype not in LOW and inherited is None:
        return None
    if inherited is not None and inherited.numbers.get("flushed"):  # the twin has them too
        kept = step.name in _KEEPS_ZEROS and step.spot.place.phase != "backward" and not bool(real.all())
        return inherited if kept else None
    if _protects_with_zero(ledger, step, real):
        numbers = {"constant": 0.0, "stored": True}
        return ledger.suspect(step, "zeros").note(
            dtype=short_dtype(real.dtype), count=real.numel(), operands=ledger.operands(step), numbers=numbers
        )
    if lost_to_zero(real, twin) <= 0:
        return inherited if step.name in PROTECT and step.scalars else None  # a zero plus eps is still no number to divide by
    tiny = _tiny_constant(ledger, step, real)
    if inherited is not None and tiny is None and not _flushes_itself(step, real, twin):
        return inherited
    overflowed = next((t.bad for t in step.tags if t.bad is not None and t.reference_bad is None and not t.quiet), None)
    if overflowed is not None:
        return overflowed  # divided by an infinity
    numbers = flush_numbers(real, twin)
    if numbers["flushed_absmax"] <= _noise_of_a_sum(ledger, step, twin):
        return None  # terms that add up to nothing: what FP32 has there is its own rounding
    return ledger.suspect(step, "zeros").note(
        dtype=short_dtype(real.dtype),
        count=real.numel(),
        operands=ledger.operands(step),
        numbers=numbers | ({"constant": tiny} if tiny is not None else {}),
        exponents=exponents_beside(real, twin),
    )


def _flushes_itself(step: TaggedOp, real: Tensor, twin: Tensor) -> bool:
    """In an optimizer: squares of gradients are 0 where these, some of which had flushed before, are not."""
    factors = [t for t in step.inputs if t.shape == real.shape and id(t) not in step.written]
    if step.spot.place.phase != "optimizer" or not factors:
        return False
    return bool(((real == 0) & (twin != 0) & torch.stack([t != 0 for t in factors]).all(0)).any())


def _noise_of_a_sum(ledger: Ledger, step: TaggedOp, result: Tensor) -> float:
    """What rounding in FP32 leaves of terms whose sum is 0."""
    if step.name not in REDUCTIONS or not step.inputs or not result.numel():
        return 0.0
    terms = ledger.twin_of(step.inputs[0])
    return torch.finfo(torch.float32).eps * float(terms.abs().sum(dtype=torch.float64)) / result.numel()


def divided_by_zeros(ledger: Ledger, step: TaggedOp) -> None:
    """How many times as long an update is because its divisor was zero, whatever eps that got since."""
    over, under = (*step.op.args[-2:],) if step.name == "addcdiv" else step.op.args[:2]
    tag = ledger.tags.find(under) if isinstance(under, Tensor) and has_storage(under) else None
    if tag is None or tag.zeros is None or not isinstance(over, Tensor):
        return
    divisor = ledger.twin_of(under)
    twin = ledger.twin_of(over) / divisor
    # elsewhere it may be longer as well: of gradients that are nothing but rounding, low precision has more
    real = torch.where(under.abs() < divisor.abs() / 2, (over / under).to(twin.dtype), twin)
    meant, taken = rms_of(twin), rms_of(real)
    if meant and extent(real).finite and taken / meant > tag.zeros.numbers.get("times", 1.0):
        tag.zeros.numbers = {**tag.zeros.numbers, "times": taken / meant}


def _flushed_before(ledger: Ledger, step: TaggedOp) -> Suspect | None:
    """Zeros in an fp16 tensor from before the step whose other numbers go down to the end of the format: they did not fit."""
    if step.name not in _KEEPS_ZEROS or not step.inputs or step.spot.place.phase == "backward":
        return None
    source = step.inputs[0]
    if source.dtype != torch.float16 or source.requires_grad or ledger.tags.find(source) is not None:
        return None
    if ledger.role(source)[0] not in ("given", "buffer") or not whole_storage(source).numel() > 1:
        return None
    size = whole_storage(source).abs()
    above = size[size > 0]  # none of NaN is
    smallest = float(above.min()) if above.numel() else math.inf
    form = format_of(source.dtype)
    if bool(size.all()) or not smallest < form.min_normal:
        return None
    numbers = {"stored": True, "flushed": True, "smallest": smallest, "flushed_absmax": form.flush_at}
    return ledger.suspect(step, "zeros").note(
        dtype=short_dtype(source.dtype), count=source.numel(), operands=ledger.operands(step), numbers=numbers
    )


def _protects_with_zero(ledger: Ledger, step: TaggedOp, real: Tensor) -> bool:
    """An eps that was 0 in this format before the step began: one number from outside, added to what is zero in places."""
    if step.name not in ("add", "clamp_min", "maximum") or real.dtype not in LOW or real.numel() < 2:
        return False
    single = [
        t for t in step.inputs if t.numel() == 1 and t.dtype in LOW and not t.requires_grad and ledger.role(t) == ("given", "")
    ]
    return any(not bool(t.any()) for t in single) and not bool(real.all())


def _tiny_constant(ledger: Ledger, step: TaggedOp, real: Tensor) -> float | None:
    """A number given to protect from zero that is itself zero in this format."""
    if step.name not in PROTECT or real.dtype not in LOW:
        return None
    smallest = format_of(real.dtype).flush_at
    return next((s for s in step.scalars if 0 < abs(s) <= smallest), None)


def whole_numbers(ledger: Ledger, step: TaggedOp, real: Tensor, twin: Tensor) -> Suspect | None:
    if real.dtype not in LOW or step.name not in COUNT or step.spot.place.phase == "backward":
        return None
    lost = whole_numbers_lost(real, twin)
    return None if lost is None else _integers(ledger, step, real, lost)


def _whole_numbers_cast(ledger: Ledger, step: TaggedOp) -> Suspect | None:
    """Read back as integers: they were meant to be whole, whatever they were stored with."""
    source = step.inputs[0]
    lost = whole_numbers_lost(source, ledger.twin_of(source)) if source.dtype in LOW else None
    return None if lost is None else _integers(ledger, step, source, lost)


def stored_numbers(ledger: Ledger, step: TaggedOp, real: Tensor) -> None:
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
    suspect = _integers(ledger, step, source, {"changed": share, **numbers})
    ledger.tags.put(real, Tag("to_copy", order=ledger.order, ids=suspect))


def _are_rounded(numbers: Tensor, ledger: Ledger) -> bool:
    """Ids use the last bit of the format half of the time; multiples of a power of two, which it holds exactly, never."""
    last_bits = torch.frexp(numbers.float()).mantissa.abs() / format_of(numbers.dtype).unit_roundoff % 2
    return len(numbers.unique()) >= _MANY_NUMBERS and float(last_bits.mean()) >= ledger.limits.damage_last_bit


def _integers(ledger: Ledger, step: TaggedOp, real: Tensor, lost: dict[str, Any]) -> Suspect:
    return ledger.suspect(step, "integers").note(
        dtype=short_dtype(real.dtype),
        count=real.numel(),
        share=lost["changed"],
        operands=ledger.operands(step),
        numbers=lost,
    )


def stored_spacing(ledger: Ledger, step: TaggedOp) -> float:
    """Of numbers that came in 16 bits, and were copied, shifted or stretched since."""
    if step.spot.place.phase == "backward" or step.name not in _KEEPS_SPACING or not step.inputs:
        return 0.0
    source = step.inputs[0]
    if any(t.numel() > 1 and t.is_floating_point() for t in step.inputs[1:]) or id(source) in step.written:
        return 0.0
    spacing = ledger.spacing(source)
    if step.name in SCALINGS and step.scalars and step.scalars[0]:
        return spacing * abs(step.scalars[0] if step.name == "mul" else 1 / step.scalars[0])
    return spacing


def coarse_target(ledger: Ledger, step: TaggedOp, wanted: Tensor) -> None:
    """What a loss compares with was stored in 16 bits, and differs by less than its spacing there: most of it is rounding."""
    spacing = ledger.spacing(wanted)
    spread = float(wanted.detach().double().std()) if spacing and wanted.numel() > 1 else 0.0
    if 0 < spread < ledger.limits.target_spacing * spacing:
        ledger.suspect(step, "coarse").note(
            dtype=short_dtype(ledger.low_dtype or wanted.dtype),
            count=wanted.numel(),
            numbers={"spacing": spacing, "spread": spread},
        )


def find_absorbed(ledger: Ledger, step: TaggedOp, real: Tensor) -> Suspect | None:
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
        return ledger.suspect(step, "absorbed").note(
            root=_overflow_behind(tags[small]),
            dtype=short_dtype(real.dtype),
            count=real.numel(),
            share=lost.unchanged,
            kept=lost.kept,
            unchanged=lost.unchanged,
            repeats=step.repeats if tags[large].made == step.previous else 1,
            residual=tags[large].made in tags[small].ancestors and tags[large].made > 0,
            operands=ledger.sized_operands(step),
            numbers={
                "ratio": lost.ratio,
                "factor": tags[large].factor or _decay_of_difference(ledger, args[large], args[small], -sign * alpha),
            },
        )
    return None


def _overflow_behind(addend: Tag) -> Suspect | None:
    """What is added may be small only because something before it overflowed: one over infinity is 0."""
    return addend.origin if addend.origin is not None and addend.origin.trouble == "nonfinite" else None


def _decay_of_difference(ledger: Ledger, moved: Tensor, by: Tensor, times: float) -> float | None:
    """1 - c of s - c * (s - p): the decay of an average that is written as a difference."""
    known = ledger.towards.find(by)
    return 1 - abs(known[1] * times) if known is not None and key_of(moved) in known[0] else None


def decision(ledger: Ledger, step: TaggedOp, real: Tensor, twin: Tensor) -> None:
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
        origin.note(
            dtype=short_dtype(step.inputs[0].dtype) if step.inputs else "",
            count=real.numel(),
            share=count / real.numel(),
            input_level=worst.level if worst is not None else 0.0,
            operands=ledger.operands(step),
            numbers={"flips": count, "ties": _ties(ledger, step)},
        )
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


def _ties(ledger: Ledger, step: TaggedOp) -> float:
    if step.name not in ("argmax", "topk") or not step.inputs or not step.inputs[0].dim():
        return 0.0
    values, args = step.inputs[0], step.op.args
    if step.name == "topk":
        k, dim = int(args[1]), int(args[2]) if len(args) > 2 else -1
    else:
        k, dim = 1, int(args[1]) if len(args) > 1 and args[1] is not None else -1
    return tied_rows(values, ledger.twin_of(values), dim, k)
