"""The books of an examined step: tags of values, suspects, and what both are measured by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.formats import format_of
from ..core.limits import Limits
from ..core.ops import SAME_VALUE
from ..watch.places import running_derivative
from ..watch.tensors import LOW, short_dtype
from .damage_numbers import Level, operand_numbers
from .damage_tags import Doing, Roles, Seen, Tags
from .records import Operand

_ANCESTORS = 48
_MOST_SUSPECTS = 4096
_NOWHERE: Any = None


class Ledger:
    """What one step has told so far."""

    def __init__(self, limits: Limits, twin_of: Callable[[Tensor], Tensor], roles: Roles) -> None:
        self.limits = limits
        self.twin_of = twin_of
        self.roles = roles
        self.tags = Tags()
        self.suspects: list[Doing] = []
        self.order = 0
        self.names: list[str] = []
        self.low_dtype: torch.dtype | None = None
        self.purpose = Doing("purpose", "", _NOWHERE, -1, on_purpose=True)  # infinities that the program wants

    def unit_roundoff(self, dtype: torch.dtype) -> float:
        low = dtype if dtype in LOW else self.low_dtype
        return format_of(low).unit_roundoff if low is not None else 0.0

    def threshold(self, dtype: torch.dtype) -> float:
        return min(self.limits.rel_l2_warn_roundoffs * self.unit_roundoff(dtype), self.limits.diff_centred_warn)

    def graded(self, level: Level, dtype: torch.dtype) -> float:
        """The plain error, or the centred one brought to its scale."""
        coarse = self.unit_roundoff(dtype) * 2**8  # the centred limit is that of bf16
        return level.graded(self.threshold(dtype) / (self.limits.diff_centred_warn * coarse) if coarse else 0.0)

    def suspect(self, step: Seen, trouble: str) -> Doing:
        doing = Doing(trouble, step.name, step.spot, self.order)
        after = {self.names[o - 1] for t in step.tags for o in t.ancestors}
        doing.facts |= {"scalars": step.scalars, "after": frozenset(after), "repeats": step.repeats}
        doing.facts["differentiable"] = torch.is_grad_enabled()
        if step.spot.place.phase == "backward":
            doing.facts["forward"] = running_derivative()
        if len(self.suspects) < _MOST_SUSPECTS:
            self.suspects.append(doing)
        return doing

    def producer(self, step: Seen) -> str:
        if step.name in SAME_VALUE:
            source = next((self.tags.find(t) for t in step.inputs if t.is_floating_point()), None)
            return source.producer if source is not None else ""
        return step.name

    def made(self, step: Seen) -> int:
        return step.tags[0].made if step.name in SAME_VALUE and step.tags else self.order

    def ancestors(self, step: Seen) -> frozenset[int]:
        if step.spot.place.phase == "backward":
            return frozenset()
        older = frozenset().union(*(t.ancestors for t in step.tags))
        if len(older) >= _ANCESTORS:
            older = frozenset(sorted(older)[-_ANCESTORS + 1 :])
        return older | {self.order}

    def named(self, step: Seen) -> tuple[Operand, ...]:
        out = []
        for tensor in step.inputs[:4]:
            role, name = self.role(tensor)
            tag = self.tags.find(tensor)
            out.append(
                Operand(role, name, tag.producer if tag else "", short_dtype(tensor.dtype), level=tag.level if tag else 0.0)
            )
        return tuple(out)

    def operands(self, step: Seen) -> tuple[Operand, ...]:
        """With their sizes; a tensor that was overwritten tells none."""
        return tuple(
            replace(operand, **({} if id(tensor) in step.written else operand_numbers(tensor)))
            for operand, tensor in zip(self.named(step), step.inputs)
        )

    def role(self, tensor: Tensor) -> tuple[str, str]:
        known = self.roles.find(tensor)
        if known is not None:
            return known
        tag = self.tags.find(tensor)
        if tag is None:
            return "given", ""
        return ("gradient", "") if tag.of_gradient else tag.source
