"""Remedies tried on the very step, beside it: what loss, outputs and gradients would be with one change.

A `Lane` is the program run beside itself, as twins are, but in its own precision and with one change at one operation. It
begins where an operation makes NaN or infinity of finite numbers, and follows what descends from there: through the loss, the
backward pass and into gradients, which nobody else ever sees. The changes:

    fp32          this operation in FP32, and those behind it until the next matrix product, as autocast would; the same
                  wherever the range is left again
    scaled_first  the first factor of a product is divided before it, by what the program divides the result by
    on_logits     a probability whose logarithm is taken is the FP32 one, as in a loss that takes logits
    larger_eps    the zero that is divided by, or whose logarithm or root is taken, gets an eps that its format can hold

and, without a lane:

    master_weights  the update on a copy of 16-bit weights in FP32, which the twin of the optimizer's step is
    rows_left_out   the calls of the model again, without the rows of the batch that are not finite (examine/again.py)
    smaller_scale   backward again from smaller gradients of the outputs (examine/again.py)

What cannot be followed to the end (an operator of the program's own, a layout that the kernel refuses) is not told at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.examination import Place, Trial
from ..core.formats import format_of
from ..core.ops import (
    ATTENTIONS,
    BROKEN_BY_ZERO,
    CASTS,
    DIVISIONS,
    FACTORS,
    LOGARITHMS,
    MATMULS,
    PROBABILITIES,
    RECURRENT,
    SAME_VALUE,
    SCALINGS,
    bare_op,
)
from ..watch.op_stream import Op, join_beside, leave
from ..watch.places import Spot
from ..watch.storages import StorageMap, key_of, whole_storage
from ..watch.tensors import LOW, has_storage, map_leaves, outside_program, tensors_in
from ..watch.twins import Operation, Twins
from ..watch.without_warnings import run_without_warnings
from .measure import Extent, GradientNumbers, extent, gradient_errors, gradient_numbers

_LOWER = MATMULS | ATTENTIONS | RECURRENT  # what autocast runs in 16 bits, whatever comes in
_EPS = {torch.float16: 1e-4}  # above the smallest normal number
_EPS_WIDE = 1e-6
_SEEDED = torch.Tag.nondeterministic_seeded
Makers = Callable[[Tensor], str]  # which operation made a tensor
_MOST_PLACES = 64  # operations that one lane changes


class _NotFollowed(RuntimeError):
    """The change has no meaning here; a lane that meets it is not told."""


class Lane(Twins):
    """A second value of everything that descends from what was changed."""

    def __init__(self, change: str, beside: Twins) -> None:
        super().__init__(on_trouble=self._give_up)
        self.change = change
        self.reference = beside.twin
        self.order, self.op = 0, ""  # of the first operation that was changed
        self.spot: Spot | None = None
        self.places = 0
        self.value: float | None = None
        self.is_lost = False
        self._owed: StorageMap[float] = StorageMap()  # factor by which a value is too small until the program divides it

    @property
    def is_told(self) -> bool:
        """Every operation could be followed."""
        return self.places > 0 and not self.is_lost and not self.reseeds

    def _give_up(self, _: Any) -> None:
        self.is_lost = True
        self.release()

    def begin(self, op: Operation, order: int, spot: Spot, overwritten: Mapping[int, Tensor], made_by: Makers) -> bool:
        """Makes the change at an operation that has just run; False: it has none to make there."""
        one = Op(op.func, op.args, op.kwargs)
        one.out = op.out
        if self.is_lost or self.places >= _MOST_PLACES or op.is_view or _SEEDED in op.func.tags or self._why_not_again(one):
            return False
        if self._concerned(one):
            return False  # it follows this one already
        with outside_program():
            self._take_back(one, overwritten)
            if any(self._twins.find(t) is None for t in one.written):
                return False  # it would write into the program's own
            made = CHANGES[self.change](self, one, op, made_by)
            if made is None:
                return False
            taken = {key_of(t) for t in one.written}
            for real, value in zip(tensors_in(op.out), tensors_in(made)):
                if has_storage(real) and key_of(real) not in taken:
                    self._enter(real, value)
        if not self.places:
            self.order, self.op, self.spot = order, bare_op(op.name), spot
        self.places += 1
        return True

    def _take_back(self, op: Op, overwritten: Mapping[int, Tensor]) -> None:
        """What the operation wrote over is as it was, in this lane."""
        for tensor in op.written:
            before = overwritten.get(key_of(tensor))
            if self._twins.find(tensor) is None and before is not None and before.shape == tensor.shape:
                self._twins.put_storage(tensor, torch.float32 if self.change == "fp32" else tensor.dtype).copy_(before)

    # as twins, but in the program's own precision

    def _concerned(self, op: Op) -> bool:
        return any(has_storage(t) and self._twins.find(t) is not None for t in op.inputs)

    def _dtype_beside(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def _enter(self, real: Tensor, twin: Tensor) -> None:
        if real.is_floating_point():
            self._twins.put(real, twin if real.dtype in LOW else twin.to(real.dtype), owned=True)
        else:
            super()._enter(real, twin)

    def _compute(self, op: Op) -> Any:
        owed = [o for t in op.inputs if has_storage(t) and (o := self._owed.find(t)) is not None]
        if owed:
            return self._rescale_divided(op, owed[0])
        wide = any(self._twin(t).dtype != t.dtype for t in op.inputs if t.is_floating_point())
        how = "" if not wide or op.name in CASTS else "narrow" if op.name in _LOWER else "wide"
        kept = [(t, self._twin(t).clone()) for t in op.written if self.change == "fp32" and has_storage(t)]
        out = self.run(op, how)
        if self.change == "fp32" and how != "wide" and self.places < _MOST_PLACES and self._broke(op, out, kept):
            for tensor, before in kept:
                self._twins.put_storage(tensor, torch.float32).copy_(before)
            out = self.run(op, "wide")
            self.places += 1
        return out

    def run(self, op: Op, how: str) -> Any:
        """`how`: wide, narrow (each tensor in the program's type), or as the values stand."""
        written = {id(t) for t in op.written}

        def argument(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return torch.float32 if how == "wide" and value in LOW else value
            if not isinstance(value, Tensor):
                return value
            twin = self._twin(value)
            if id(value) in written or not twin.is_floating_point():
                return twin
            if how == "narrow":
                return twin.to(value.dtype)
            return twin.float() if how == "wide" and twin.dtype in LOW else twin

        args, kwargs = map_leaves((op.args, op.kwargs), argument)
        return run_without_warnings(op.func, args, kwargs)

    def _broke(self, op: Op, out: Any, kept: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """It made NaN or infinity of finite numbers."""
        made = [t for t in (*tensors_in(out), *(self._twin(t) for t, _ in kept)) if t.is_floating_point() and t.numel()]
        found = [span for t in made if not (span := extent(t)).finite]
        if not found or _SEEDED in op.func.tags:
            return False
        before = {id(t): value for t, value in kept}
        given = [before.get(id(t), self._twin(t)) for t in op.inputs if t.is_floating_point() and t.numel()]
        return not any(_is_loud(extent(t)) for t in given)

    def _rescale_divided(self, op: Op, owed: float) -> Any:
        """What was divided too early is not divided by so much again."""
        name = bare_op(op.name)
        if name in SAME_VALUE:
            out = self.run(op, "")
            for real in tensors_in(op.out):
                self._owed.put(real, owed)
            return out
        other = next((a for a in op.args[1:2] if not isinstance(a, Tensor) or (a.numel() == 1 and not a.requires_grad)), None)
        if name not in SCALINGS or other is None or op.written:
            raise _NotFollowed("what comes next is no division by a number")
        divisor = 1 / float(other) if name == "mul" else float(other)
        self.value = self.value or divisor
        return self._twin(op.args[0]) * (owed / divisor)


def _is_loud(span: Extent) -> bool:
    """Not only such as masks have."""
    return span.nan or span.high == math.inf


def _wider(lane: Lane, op: Op, seen: Operation, made_by: Makers) -> Any:
    """In FP32; nothing is tried where FP32 breaks as well."""
    out = lane.run(op, "wide")
    made = [t for t in (*tensors_in(out), *map(lane.twin, op.written)) if t.is_floating_point() and t.numel()]
    return out if not any(_is_loud(extent(t)) for t in made) else None


def _scaled_first(lane: Lane, op: Op, seen: Operation, made_by: Makers) -> Any:
    """The first factor is made smaller by a power of two, which rounds nothing; the division that follows owes the rest."""
    out = seen.out
    if FACTORS.get(bare_op(seen.name)) != (0, 1) or not isinstance(out, Tensor) or out.dtype not in LOW:
        return None
    reaches = max((extent(t).absmax for t in tensors_in(seen.twin_out)), default=math.inf)
    if not 0 < reaches < math.inf:
        return None
    owed = 2.0 ** max(1, math.ceil(math.log2(2 * reaches / format_of(out.dtype).max)))
    first, second = op.args[:2]
    lane._owed.put(out, owed)
    return op.func(lane.twin(first) / owed, lane.twin(second))


def _larger_eps(lane: Lane, op: Op, seen: Operation, made_by: Makers) -> Any:
    name = bare_op(seen.name)
    at = BROKEN_BY_ZERO.get(name) if name in DIVISIONS | LOGARITHMS else None
    if at is None or not isinstance(seen.out, Tensor):
        return None
    zero = op.args[at] if len(op.args) > at else None
    if not isinstance(zero, Tensor) or not has_storage(zero) or not zero.is_floating_point() or op.written:
        return None
    whole = whole_storage(zero.detach())
    if whole.numel() > zero.numel() or not bool((whole == 0).any()):
        return None
    lane.value = _EPS.get(zero.dtype, _EPS_WIDE)
    if made_by(zero) == "sqrt":  # an eps belongs below the root
        raised = (whole.float().square() + lane.value).sqrt()
    else:
        raised = whole + lane.value if bool((whole >= 0).all()) else torch.where(whole == 0, lane.value, whole)
    lane._twins.put(whole, raised.to(whole.dtype), owned=True)
    return lane.run(op, "")


def _on_logits(lane: Lane, op: Op, seen: Operation, made_by: Makers) -> Any:
    name = bare_op(seen.name)
    at = {"binary_cross_entropy": 0, "binary_cross_entropy_backward": 1}.get(name, 0 if name in LOGARITHMS else None)
    rounded = op.args[at] if at is not None and len(op.args) > at else None
    if not isinstance(rounded, Tensor) or made_by(rounded) not in PROBABILITIES or rounded.dtype not in LOW or op.written:
        return None
    whole = whole_storage(rounded.detach())
    exact = lane.reference(whole)
    if bool(((exact <= 0) | (exact >= 1)).any()):
        return None  # FP32 rounds them as well
    lane._twins.put(whole, exact.float().clone(), owned=True)
    return lane.run(op, "wide")


CHANGES: dict[str, Callable[[Lane, Op, Operation, Makers], Any]] = {
    "fp32": _wider,
    "scaled_first": _scaled_first,
    "larger_eps": _larger_eps,
    "on_logits": _on_logits,
}


class Remedies:
    """The lanes of one examined step."""

    def __init__(self, twins: Twins) -> None:
        self._twins = twins
        self._lanes: dict[str, Lane] = {}
        self._is_over = False
        self._noted: list[Trial] = []
        self._losses: dict[str, tuple[float, float]] = {}
        self._outputs: dict[str, tuple[bool, float | None, float | None]] = {}
        self._gradients: dict[str, dict[str, GradientNumbers]] = {}

    @property
    def bytes_held(self) -> int:
        return sum(lane.bytes_held for lane in self._lanes.values())

    def try_after_nonfinite(
        self, op: Operation, order: int, spot: Spot, overwritten: Mapping[int, Tensor], made_by: Makers
    ) -> None:
        """An operation has made NaN or infinity of finite numbers."""
        for change in () if self._is_over else CHANGES:
            lane = self._lanes.get(change)
            if lane is not None:
                if change == "fp32":
                    lane.begin(op, order, spot, overwritten, made_by)
            elif (lane := Lane(change, self._twins)).begin(op, order, spot, overwritten, made_by):
                self._lanes[change] = lane
                join_beside(lane, self._twins)

    def loss(self, loss: Tensor, scale: float) -> None:
        for change, lane in self._lanes_to_tell():
            pair = float(lane.twin(loss).detach()) / scale, float(self._twins.twin(loss).detach()) / scale
            if change not in self._losses or math.isfinite(self._losses[change][0]):
                self._losses[change] = pair  # a bad one of several stands

    def outputs(self, leaves: Iterable[Tensor]) -> None:
        leaves = [leaf.detach() for leaf in leaves if leaf.is_floating_point()]
        for change, lane in self._lanes_to_tell():
            values = [lane.twin(leaf) for leaf in leaves]
            finite = all(bool(torch.isfinite(value).all()) for value in values)
            wide = [self._twins.twin(leaf) for leaf in leaves]
            self._outputs[change] = (finite, _distance(values, wide), _distance(values, leaves))

    def gradient(self, name: str, grad: Tensor, scale: float) -> None:
        for change, lane in self._lanes_to_tell():
            value = lane.twin(grad).to(grad.dtype)
            self._gradients.setdefault(change, {})[name] = gradient_numbers(value, self._twins.twin(grad), scale)

    def _lanes_to_tell(self) -> list[tuple[str, Lane]]:
        return [(change, lane) for change, lane in self._lanes.items() if lane.is_told]

    def close(self) -> None:
        """No operation is followed any more; what was found stands."""
        for lane in self._lanes.values():
            leave(lane)

    def drop(self) -> None:
        """They take too much, or nobody looks any more."""
        self.close()
        self._lanes.clear()
        self._is_over = True

    def note(self, trial: Trial) -> None:
        """One that needed no lane."""
        self._noted.append(trial)

    def trials(self, scale: float | None, gradient_error: float | None) -> tuple[Trial, ...]:
        return (*(self._trial(change, lane, scale, gradient_error) for change, lane in self._lanes_to_tell()), *self._noted)

    def _trial(self, change: str, lane: Lane, scale: float | None, before: float | None) -> Trial:
        loss, loss_reference = self._losses.get(change, (None, None))
        finite, error, moved = self._outputs.get(change, (None, None, None))
        measured = self._gradients.get(change, {})
        trial = Trial(
            change,
            lane.op,
            lane.spot.resolve() if lane.spot is not None else Place(),
            lane.order,
            lane.places,
            lane.value,
            loss=loss,
            loss_reference=loss_reference,
            outputs_finite=finite,
            output_error=error,
            output_change=moved,
            gradient_error_before=before if before is not None and math.isfinite(before) else None,
            scale=scale,
        )
        if not measured:
            return trial
        bad = any(g.nonfinite for g in measured.values())
        return replace(trial, gradients_finite=not bad, gradient_error=None if bad else gradient_errors(measured)[1])


def _distance(values: Sequence[Tensor], others: Sequence[Tensor]) -> float | None:
    """Relative L2 over all of them; None if one is not finite."""
    size = math.sqrt(sum(float(o.double().square().sum()) for o in others))
    apart = math.sqrt(sum(float((v.double() - o.double()).square().sum()) for v, o in zip(values, others)))
    return apart / size if size and math.isfinite(apart) and math.isfinite(size) else None
