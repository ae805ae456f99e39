"""Follows damage through a step: which operation made it, and where it arrived.

Every tensor that low precision reached has a tag beside its storage: how far it is from its FP32 twin, and which earlier
operation (suspect) is to blame for that. An operation whose inputs are close to their twins and whose output is not becomes a
suspect; one that only passes damage on inherits the blame; where the damage fades, so does the blame. At the end the tags of
loss, gradients and weights tell what each suspect did to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.ops import ADDITIVE, JOINS, LOOKUPS, LOSS_OPS, SAME_VALUE, SCATTERS, UNWRITTEN, bare_op
from ..watch.op_facts import written_by
from ..watch.places import Spot
from ..watch.tensors import LOW, has_storage, short_dtype, tensors_in
from ..watch.twins import Operation
from .damage_bad import badness, settle
from .damage_clues import absorbed, decision, stored_numbers, whole_numbers, zeros, zeros_behind
from .damage_ledger import Ledger
from .damage_numbers import (
    EXACT,
    SPOILED,
    Extent,
    Level,
    bias_of,
    extent,
    flush_numbers,
    level_of,
    own_error,
    rms_of,
)
from .damage_tags import Doing, Seen, Tag

_ADDITIONS = ("add", "sub")
_Line = tuple[str, Any, int, str]


class Follower:
    """`see` every operation of a step, in order."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lines: Counter[_Line] = Counter()
        self._last_at: dict[_Line, int] = {}  # line -> the operation that ran there last
        self._sums: dict[_Line, Doing] = {}  # line of a running sum -> its suspect

    def see(self, op: Operation, spot: Spot, overwritten: Mapping[int, Tensor]) -> None:
        """`overwritten`: values of low-precision tensors as they were before this operation wrote into them."""
        self._ledger.order += 1
        name = bare_op(op.name)
        self._ledger.names.append(name)
        if op.is_view or name in UNWRITTEN:
            return
        outs, twins = self._results(op)
        inputs = [t for t in tensors_in((op.args, dict(op.kwargs))) if has_storage(t)]
        tags = [tag for t in inputs if (tag := self._ledger.tags.find(t)) is not None]
        concerned = op.twin_out is not op.out and any(o is not t for o, t in zip(outs, twins))
        if not concerned and not tags and not outs:
            return
        line = self._line(spot, name)
        step = Seen(op, name, spot, inputs, tags, overwritten, self._lines[line] + 1, self._last_at.get(line, -1))
        if concerned:
            self._lines[line] += 1
            if line in self._sums and step.continues:
                self._sums[line].facts["repeats"] = step.repeats
            if name not in SAME_VALUE:
                self._last_at[line] = self._ledger.order
        ids = next((tag.ids for tag in tags if tag.ids is not None), None)
        if ids is not None and name in LOOKUPS:
            ids.meets(name)
        for real, twin in zip(outs, twins):
            if real.is_floating_point():
                self._floating(step, real, twin)
            elif concerned and twin is not None and not real.is_complex() and real.numel():
                decision(self._ledger, step, real, twin)
                stored_numbers(self._ledger, step, real)
            elif ids is not None:
                self._ledger.tags.put(real, Tag(name, order=self._ledger.order, ids=ids))

    @staticmethod
    def _line(spot: Spot, name: str) -> _Line:
        return (spot.place.site, spot.code, spot.instruction, name)

    def _results(self, op: Operation) -> tuple[list[Tensor], list[Tensor | None]]:
        outs = [t for t in tensors_in(op.out) if has_storage(t)]
        if outs or op.out is not None:
            made = [t for t in tensors_in(op.twin_out) if has_storage(t)] if op.twin_out is not None else []
            return outs, [*made] if len(made) == len(outs) else [None] * len(outs)
        outs = [t for t in written_by(op.func, op.args, op.kwargs) if has_storage(t)]
        return outs, [self._ledger.twin_of(t) for t in outs]

    def _floating(self, step: Seen, real: Tensor, twin: Tensor | None) -> None:
        if real.dtype in LOW:
            self._ledger.low_dtype = real.dtype
        span = extent(real)
        same = twin is real
        wide = span if same or twin is None else extent(twin)
        if same and span.finite and not step.tags:
            return
        bad, quiet = badness(self._ledger, step, real, span, reference=False)
        if same:
            reference_bad, reference_quiet = bad, quiet
        else:
            reference_bad, reference_quiet = badness(self._ledger, step, twin if twin is not None else real, wide, reference=True)
        if bad is not None and not bad.on_purpose:
            settle(self._ledger, step, bad, real, twin, span, wide, reference_bad is not None)
        tag = Tag(
            producer=self._ledger.producer(step),
            source=self._ledger.role(step.inputs[0]) if step.name in SAME_VALUE and step.inputs else ("", ""),
            order=self._ledger.order,
            made=self._ledger.made(step),
            factor=step.factor,
            of_gradient=step.spot.place.phase == "loop" and any(self._ledger.role(t)[0] == "gradient" for t in step.inputs),
            bad=bad,
            quiet=quiet,
            reference_bad=reference_bad,
            reference_quiet=reference_quiet,
            ancestors=self._ledger.ancestors(step),
            whole=next((t.whole for t in step.tags if t.whole is not None), None),
        )
        if not same and twin is not None and real.numel():
            tag = self._beside(step, real, twin, span, tag)
        self._ledger.tags.put(real, tag)

    def _beside(self, step: Seen, real: Tensor, twin: Tensor, span: Extent, tag: Tag) -> Tag:
        if step.spot.place.phase == "optimizer" and real.dtype not in LOW:
            return tag
        spoiled = tag.bad is not None and tag.reference_bad is None and not tag.quiet
        level = SPOILED if spoiled else level_of(real, twin) if span.finite or tag.quiet else EXACT
        graded = self._ledger.graded(level, real.dtype)
        if step.name in JOINS and not spoiled:
            graded = max((t.level for t in step.tags), default=0.0)
        lost = zeros(self._ledger, step, real, twin)
        whole = tag.whole or whole_numbers(self._ledger, step, real, twin)
        missing = self._missing(step, real)
        origin = None
        if spoiled:
            origin = tag.bad
        elif graded > self._ledger.threshold(real.dtype) / self._ledger.limits.damage_fades:
            origin = self._blame(step, real, twin, level, graded, whole or missing)
        return replace(tag, level=graded, error=level.error, origin=origin, zeros=lost, whole=whole, absorbed=missing)

    def _missing(self, step: Seen, real: Tensor) -> Doing | None:
        """An addend that did not arrive, here or in a sum that this one continues."""
        if step.spot.place.phase == "backward" or step.name not in SAME_VALUE | _ADDITIONS:
            return None
        before = next((t.absorbed for t in step.tags if t.absorbed is not None), None)
        here = absorbed(self._ledger, step, real) if real.dtype in LOW and step.name in _ADDITIONS else None
        return before or here

    def _blame(self, step: Seen, real: Tensor, twin: Tensor, level: Level, graded: float, behind: Doing | None) -> Doing | None:
        given = [t for t in step.tags if t.origin is not None]
        for tag in given:
            assert tag.origin is not None
            tag.origin.meets(step.name)
            if tag.choice and step.spot.place.phase != "backward":
                tag.origin.met["target" if step.name in LOSS_OPS else "choice"] = None
        wanted = self._wanted(step)
        if wanted is not None and wanted.origin is not None:
            wanted.origin.met["target"] = None
        if given and not self._made_by_kernel(step, real, level):
            additive, jump = step.name in ADDITIVE, self._ledger.limits.damage_jump
            worst = max(given, key=lambda t: t.error if additive else t.level)
            passes_on = worst.level >= graded / jump or (additive and worst.error >= level.error / jump)
            if worst.origin is not None and (passes_on or worst.origin.jumped(self._ledger.limits.damage_made)):
                return worst.origin
        if graded <= self._ledger.threshold(real.dtype):
            return None
        same = next((s for s in self._ledger.suspects[-4:] if s.order == self._ledger.order and s.trouble == "error"), None)
        return same or self._error_suspect(step, real, twin, level, graded, behind)

    def _made_by_kernel(self, step: Seen, real: Tensor, level: Level) -> bool:
        """A scatter that adds up in 16 bits is wrong by itself, whatever the error of what it adds."""
        if step.name not in SCATTERS or real.dtype not in LOW or step.written:
            return False
        own = own_error(step.op.func, step.op.args, step.op.kwargs, [real])
        return own is not None and own >= max(self._ledger.threshold(real.dtype), level.plain / self._ledger.limits.damage_made)

    def _wanted(self, step: Seen) -> Tag | None:
        """What a loss compares a prediction with: it carries no gradient, the prediction does."""
        args = [a for a in step.op.args[:2] if isinstance(a, Tensor) and a.is_floating_point() and has_storage(a)]
        by_hand = step.name == "sub" and step.spot.place.phase == "loop"
        if len(args) < 2 or not (step.name in LOSS_OPS or by_hand) or args[0].requires_grad == args[1].requires_grad:
            return None
        tag = self._ledger.tags.find(args[args[0].requires_grad])
        logs = tag is not None and tag.origin is not None and "log_softmax" in tag.origin.facts.get("after", ())
        return None if by_hand and logs else tag  # a margin of two policies has no target

    def _is_residual(self, step: Seen) -> bool:
        """The smaller addend was computed from the larger one."""
        pairs = [(rms_of(t), self._ledger.tags.find(t) or Tag()) for t in step.inputs[:2]]
        (_, small), (_, large) = sorted(pairs, key=lambda pair: pair[0]) if len(pairs) == 2 else ((0.0, Tag()), (0.0, Tag()))
        return large.made > 0 and large.made in small.ancestors

    def _error_suspect(self, step: Seen, real: Tensor, twin: Tensor, level: Level, graded: float, behind: Doing | None) -> Doing:
        doing = self._ledger.suspect(step, "error")
        if step.name in _ADDITIONS:
            self._sums[self._line(step.spot, step.name)] = doing
        missing = next((t.absorbed for t in step.tags if t.absorbed is not None), None)
        doing.root = behind or missing or zeros_behind(step)
        outs = [t for t in tensors_in(step.op.out) if t.is_floating_point()]
        seeded = torch.Tag.nondeterministic_seeded in step.op.func.tags
        numbers = flush_numbers(real, twin)
        numbers |= {"bias": b} if (b := bias_of(real, twin)) is not None else {}
        if step.name in ("sin", "cos") and step.inputs:
            if step.inputs[0].dtype not in LOW:
                doing.met["wide angle"] = None
            # not the median: of frequencies that span decades only the fast ones turn far enough to go wrong
            numbers["phase_error"] = rms_of(step.inputs[0].double() - self._ledger.twin_of(step.inputs[0]).double())
        doing.facts |= {
            "dtype": short_dtype(real.dtype),
            "count": real.numel(),
            "plain": level.plain,
            "centred": level.centred,
            "level": graded,
            "input_level": max((t.level for t in step.tags), default=0.0),
            "absmax": extent(real).absmax,
            "reference_absmax": extent(twin).absmax,
            "reference_rms": rms_of(twin),
            "own": None if step.written or seeded else own_error(step.op.func, step.op.args, step.op.kwargs, outs),
            "operands": self._ledger.operands(step),
            "residual": step.name in _ADDITIONS and self._is_residual(step),
            "numbers": numbers,
        }
        return doing
