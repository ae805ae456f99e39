"""What is known of the values of an examined step as they pass: tags beside their storages, and the list of suspects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.examination import Place
from ..core.formats import format_of
from ..core.limits import Limits
from ..core.ops import DIFFERENCES, SAME_VALUE, SCALINGS
from ..watch.places import Spot, running_derivative
from ..watch.storages import Buffers, StorageMap, key_of
from ..watch.tensors import LOW, has_storage, in_custom_forward, short_dtype
from ..watch.twins import Operation
from .measure import ErrorLevel, extent, operand_numbers, scalars_in
from .records import Operand, Suspect

_ANCESTORS = 48
_MOVE_AN_AVERAGE = DIFFERENCES | SCALINGS
_MOST_SUSPECTS = 4096


@dataclass(frozen=True)
class Stored:
    """Numbers that came from outside in 16 bits, or rounded to as many."""

    values: Tensor  # as they came, moved since
    dtype: torch.dtype
    whole: Tensor  # the table that they are from
    stretch: float = 1.0  # they were multiplied by at most so much since
    taken_from: float | None = None  # x became this number minus x, or x minus it


@dataclass(frozen=True)
class Tag:
    """What is known of the values in a storage."""

    producer: str = ""
    source: tuple[str, str] = ("", "")  # role and name of what it is a copy of
    order: int = 0
    made: int = 0  # the operation that computed it, copies passed over
    choice: bool = False  # a decision, not a value, or made of nothing else
    of_gradient: bool = False  # computed from gradients in the loop's own code
    factor: float | None = None  # the number it was multiplied with
    level: float = 0.0
    error: float = 0.0
    origin: Suspect | None = None  # to blame for the level
    faded: Suspect | None = None  # to blame for what it was made of, though little of that is left in it
    bad: Suspect | None = None  # to blame for NaN or infinities
    quiet: bool = False  # they are such as masks have
    reference_bad: Suspect | None = None
    reference_quiet: bool = False
    zeros: Suspect | None = None
    whole: Suspect | None = None
    ids: Suspect | None = None  # whole numbers that were stored in 16 bits
    absorbed: Suspect | None = None  # an addend is missing in it
    spacing: float = 0.0  # between the numbers that it could hold when it came from outside, in 16 bits
    stored: Stored | None = None
    ancestors: frozenset[int] = frozenset()


class TaggedOp:
    """One operation with what is known of its inputs."""

    def __init__(
        self,
        op: Operation,
        name: str,
        spot: Spot,
        inputs: list[Tensor],
        tags: list[Tag],
        overwritten: Mapping[int, Tensor],
        repeats: int,
        previous: int,
    ) -> None:
        self.op, self.name, self.spot, self.inputs, self.tags = op, name, spot, inputs, tags
        self.overwritten, self.repeats, self.previous = overwritten, repeats, previous
        self.written = {id(t) for t in op.written}
        self.scalars = scalars_in(op.args, op.kwargs)

    @property
    def continues(self) -> bool:
        """It takes what the same source line made just before: a running sum."""
        return any(tag.made == self.previous for tag in self.tags)

    @property
    def is_learned(self) -> bool:
        """Gradients may come back through it; nothing is learned through a metric, or from an index alone."""
        return any(t.requires_grad for t in self.inputs)

    @property
    def factor(self) -> float | None:
        return self.scalars[0] if self.name in ("mul", "lerp") and self.scalars else None


def _each(first: Any, second: Any, out: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Of `foreach`, the tensors one by one; a single number stands beside all."""
    if not isinstance(first, (list, tuple)):
        yield first, second, out
    elif isinstance(out, (list, tuple)):
        yield from zip(first, second if isinstance(second, (list, tuple)) else [second] * len(first), out)


@dataclass(frozen=True)
class Preamble:
    """What the loop made behind one step and may give to the next: values that low precision reached, as they are known."""

    tags: StorageMap[Tag]
    twins: Buffers
    suspects: tuple[Suspect, ...]


class Ledger:
    """What one step has told so far."""

    purpose: ClassVar[Suspect] = Suspect("purpose", "", Place(), -1)  # infinities that the program wants
    taken_over: ClassVar[Suspect] = Suspect("taken over", "", Place(), -1)  # a reference begun anew has them from the program

    def __init__(self, limits: Limits, twin_of: Callable[[Tensor], Tensor], roles: StorageMap[tuple[str, str]]) -> None:
        self.limits = limits
        self.twin_of = twin_of
        self.roles = roles
        self.tags: StorageMap[Tag] = StorageMap()
        self.computed: StorageMap[bool] = StorageMap()  # in this step; True: of the batch alone
        self.suspects: list[Suspect] = []
        self.coarse: list[tuple[Tensor, Suspect]] = []  # positions that were stored too coarsely for their angles
        self.updated: set[str] = set()  # buffers that the step writes into
        self.order = 0
        self.names: list[str] = []
        self.towards: StorageMap[tuple[frozenset[int], float]] = StorageMap()  # c * (s - p): storages of s and p, and c
        self.decayed: StorageMap[tuple[int, float]] = StorageMap()  # c * s + ...: storage of s, and c
        self.low_dtype: torch.dtype | None = None
        self.stored_infinity = False  # -inf in an fp16 tensor from before the step: nobody knows what was written

    def preamble(self, since: int, made: StorageMap[bool], twins: Callable[[StorageMap[Any]], Buffers]) -> Preamble:
        """Of what was `made` after the operation `since` and is not the model's; orders count backwards from the next step's."""
        copies: dict[int, Suspect] = {id(one): one for one in (self.purpose, self.taken_over)}

        def copy_of(one: Suspect | None) -> Suspect | None:
            if one is None or (one.order <= since and id(one) not in copies):
                return None
            if id(one) not in copies:
                place = one.place if one.spot is None else one.spot.resolve()
                copies[id(one)] = replace(
                    one, order=one.order - self.order - 1, place=place, spot=None, met=dict(one.met), then=[], reached=set()
                )
                copies[id(one)].root = copy_of(one.root)
            return copies[id(one)]

        def for_next(key: int, tag: Tag) -> Tag | None:
            if tag.order <= since or key not in made or key in self.roles:
                return None
            about = ("origin", "bad", "reference_bad", "zeros", "whole", "ids", "absorbed")
            known: dict[str, Any] = {name: copy_of(getattr(tag, name)) for name in about}
            if known["bad"] is None and tag.bad is not None:
                return None  # broken by the step itself: to the next one it is given
            return replace(tag, order=tag.order - self.order - 1, made=0, faded=None, ancestors=frozenset(), **known)

        tags = self.tags.select(for_next)
        for one in self.suspects:
            if one.trouble == "stored":  # of the data itself, whatever became of it
                copy_of(one)
        told = {id(s) for s in self.suspects}
        return Preamble(tags, twins(tags), tuple(copy for key, copy in copies.items() if key in told))

    def begin_with(self, before: Preamble) -> None:
        self.tags = before.tags
        self.suspects += before.suspects

    @property
    def has_broken(self) -> bool:
        """The last operation has made NaN or infinity of finite numbers."""
        return any(s.order == self.order and s.trouble == "nonfinite" and s.count for s in self.suspects[-4:])

    def unit_roundoff(self, dtype: torch.dtype) -> float:
        low = dtype if dtype in LOW else self.low_dtype
        return format_of(low).unit_roundoff if low is not None else 0.0

    def threshold(self, dtype: torch.dtype) -> float:
        return min(self.limits.rel_l2_warn_roundoffs * self.unit_roundoff(dtype), self.limits.diff_centred_warn)

    def grade(self, level: ErrorLevel, dtype: torch.dtype) -> float:
        """The plain error, or the centred one brought to its scale."""
        coarse = self.unit_roundoff(dtype) * 2**8  # the centred limit is that of bf16
        return level.grade(self.threshold(dtype) / (self.limits.diff_centred_warn * coarse) if coarse else 0.0)

    def spacing(self, tensor: Tensor) -> float:
        """Between the numbers that it could hold when it came from outside, in 16 bits; 0 if it did not."""
        tag = self.tags.find(tensor)
        if tag is not None or tensor.dtype not in LOW or tensor.requires_grad or self.role(tensor)[0] not in ("given", "input"):
            return tag.spacing if tag is not None else 0.0
        largest = extent(tensor).absmax
        return format_of(tensor.dtype).spacing(largest) if 0 < largest < math.inf else 0.0

    def note_computed(self, inputs: list[Tensor], outs: list[Tensor]) -> None:
        """What the program computes is not data, unless it was made of nothing else."""
        of_data = all(self.role(t)[0] in ("given", "input") for t in inputs)
        for out in outs:
            self.computed.put(out, of_data)

    def note_updated(self, written: Iterable[Tensor]) -> None:
        self.updated |= {name for role, name in map(self.role, written) if role == "buffer"}

    def note_difference(self, op: Operation, name: str) -> None:
        """What an average moves by: a difference from what it is, times a number."""
        if name not in _MOVE_AN_AVERAGE or len(op.args) < 2:
            return
        for first, second, out in _each(op.args[0], op.args[1], op.out):
            if not all(isinstance(t, Tensor) and has_storage(t) for t in (first, out)):
                continue
            known = self.towards.find(first)
            if name in DIFFERENCES and isinstance(second, Tensor) and has_storage(second):
                self.towards.put(out, (frozenset((key_of(first), key_of(second))), 1.0))
            elif name in SCALINGS and known is not None and isinstance(second, (int, float)) and second:
                self.towards.put(out, (known[0], known[1] * (second if name == "mul" else 1 / second)))

    def note_decay(self, op: Operation, name: str) -> None:
        """What an average is made anew from: what it is, times a number just below one, and whatever is added."""
        if name not in ("mul", "add", "lerp", "to_copy") or not op.args:
            return
        for first, second, out in _each(op.args[0], op.args[1] if len(op.args) > 1 else None, op.out):
            if not all(isinstance(t, Tensor) and has_storage(t) for t in (first, out)):
                continue
            known = self.decayed.find(first)
            if known is None and name == "add" and isinstance(second, Tensor) and has_storage(second):
                known = self.decayed.find(second)
            if name == "mul" and isinstance(second, (int, float)) and 0.5 < second < 1:
                self.decayed.put(out, (key_of(first), second))
            elif name == "lerp" and isinstance(weight := op.args[-1], (int, float)) and 0 < weight < 0.5:
                self.decayed.put(out, (key_of(first), 1 - weight))
            elif name in ("add", "to_copy") and known is not None:
                self.decayed.put(out, known)

    def suspect(self, step: TaggedOp, trouble: str) -> Suspect:
        suspect = Suspect(
            trouble,
            step.name,
            step.spot.place,
            self.order,
            scalars=step.scalars,
            after=frozenset(self.names[o - 1] for t in step.tags for o in t.ancestors),
            repeats=step.repeats,
            differentiable=torch.is_grad_enabled() or in_custom_forward(),
            of_graph=torch.is_grad_enabled() and any(t.requires_grad for t in step.inputs),
            forward=running_derivative() if step.spot.place.phase == "backward" else "",
            spot=step.spot,
        )
        if len(self.suspects) < _MOST_SUSPECTS:
            self.suspects.append(suspect)
        return suspect

    def producer(self, step: TaggedOp) -> str:
        if step.name in SAME_VALUE:
            source = next((self.tags.find(t) for t in step.inputs if t.is_floating_point()), None)
            return source.producer if source is not None else ""
        return step.name

    def maker_of(self, tensor: Tensor) -> str:
        tag = self.tags.find(tensor)
        return tag.producer if tag is not None else ""

    def order_made(self, step: TaggedOp) -> int:
        return step.tags[0].made if step.name in SAME_VALUE and step.tags else self.order

    def ancestors(self, step: TaggedOp) -> frozenset[int]:
        if step.spot.place.phase == "backward":
            return frozenset()
        older = frozenset().union(*(t.ancestors for t in step.tags))
        if len(older) >= _ANCESTORS:
            older = frozenset(sorted(older)[-_ANCESTORS + 1 :])
        return older | {self.order}

    def operands(self, step: TaggedOp) -> tuple[Operand, ...]:
        out = []
        for tensor in step.inputs[:4]:
            role, name = self.role(tensor)
            tag = self.tags.find(tensor)
            out.append(
                Operand(role, name, tag.producer if tag else "", short_dtype(tensor.dtype), level=tag.level if tag else 0.0)
            )
        return tuple(out)

    def sized_operands(self, step: TaggedOp) -> tuple[Operand, ...]:
        """A tensor that was overwritten tells none."""
        return tuple(
            replace(operand, **({} if id(tensor) in step.written else operand_numbers(tensor)))
            for operand, tensor in zip(self.operands(step), step.inputs)
        )

    def role(self, tensor: Tensor) -> tuple[str, str]:
        known = self.roles.find(tensor)
        if known is not None:
            return known
        tag = self.tags.find(tensor)
        if tag is None:
            return ("", "") if self.computed.find(tensor) is False else ("given", "")
        return ("gradient", "") if tag.of_gradient else tag.source
