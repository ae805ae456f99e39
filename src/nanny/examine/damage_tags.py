"""What is known of a value as it passes through a step, and who is suspected of having damaged it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.ops import SAME_VALUE, SELECT
from ..watch.op_facts import written_by
from ..watch.places import Spot
from ..watch.storages import key_of
from ..watch.twins import Operation
from .damage_numbers import scalars_in
from .records import Suspect

_SWEEP_OPS = 256


@dataclass(eq=False)
class Doing:
    """A suspect while the step runs."""

    trouble: str
    op: str
    spot: Spot
    order: int
    facts: dict[str, Any] = field(default_factory=dict)
    root: Doing | None = None
    met: dict[str, None] = field(default_factory=dict)  # in order
    reached: set[str] = field(default_factory=set)
    destroyed: bool = False
    destroyed_reference: bool = False
    energy: float = 0.0  # squared absolute error that arrived in gradients
    silenced: int = 0  # elements of gradients that are zero throughout because of it
    on_purpose: bool = False

    def meets(self, op: str) -> None:
        if op not in SAME_VALUE:
            self.met[op] = None

    def jumped(self, times: float) -> bool:
        """It made its error itself; else a slowly growing one only became visible there."""
        made = self.facts.get("level", math.inf) >= times * self.facts.get("input_level", 0.0)
        return made and self.op not in SELECT


@dataclass(frozen=True)
class Tag:
    """What is known of the values in a storage."""

    producer: str = ""
    source: tuple[str, str] = ("", "")  # role and name of what it is a copy of
    order: int = 0
    made: int = 0  # the operation that computed it, copies passed over
    choice: bool = False  # a decision, not a value
    of_gradient: bool = False  # computed from gradients in the loop's own code
    factor: float | None = None  # the number it was multiplied with
    level: float = 0.0
    error: float = 0.0
    origin: Doing | None = None  # to blame for the level
    bad: Doing | None = None  # to blame for NaN or infinities
    quiet: bool = False  # they are such as masks have
    reference_bad: Doing | None = None
    reference_quiet: bool = False
    zeros: Doing | None = None
    whole: Doing | None = None
    ids: Doing | None = None  # whole numbers that were stored in 16 bits
    absorbed: Doing | None = None  # an addend is missing in it
    ancestors: frozenset[int] = frozenset()


class Tags:
    """By storage, for as long as it lives."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[StorageWeakRef, Tag]] = {}
        self._new = 0

    def find(self, tensor: Tensor) -> Tag | None:
        held = self._held.get(key_of(tensor))
        if held is None:
            return None
        if held[0].expired():
            del self._held[key_of(tensor)]
            return None
        return held[1]

    def put(self, tensor: Tensor, tag: Tag) -> None:
        storage = tensor.untyped_storage()
        self._held[storage._cdata] = (StorageWeakRef(storage), tag)
        self._new += 1
        if self._new > _SWEEP_OPS:
            self._new = 0
            for key in [key for key, (alive, _) in self._held.items() if alive.expired()]:
                del self._held[key]


class Roles:
    """What a storage is to the model, for as long as it lives: parameter, buffer, input or gradient, and its name."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[StorageWeakRef, tuple[str, str]]] = {}

    def put(self, tensor: Tensor, role: str, name: str) -> None:
        self._held[key_of(tensor)] = (StorageWeakRef(tensor.untyped_storage()), (role, name))

    def find(self, tensor: Tensor) -> tuple[str, str] | None:
        held = self._held.get(key_of(tensor))
        return None if held is None or held[0].expired() else held[1]


class Seen:
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
        self.written = {id(t) for t in written_by(op.func, op.args, op.kwargs)}
        self.scalars = scalars_in(op.args, op.kwargs)

    @property
    def continues(self) -> bool:
        """It takes what the same source line made just before: a running sum."""
        return any(tag.made == self.previous for tag in self.tags)

    @property
    def factor(self) -> float | None:
        return self.scalars[0] if self.name in ("mul", "lerp") and self.scalars else None


def suspects_of(doings: list[Doing], gradient_size: float, elements: int) -> tuple[Suspect, ...]:
    """As plain data. What broke because of an earlier suspect is told with that one."""
    then: dict[int, list[Doing]] = {}
    repeats: Counter[tuple[Any, ...]] = Counter()
    for doing in doings:
        key = _same_line(doing)
        repeats[key] = max(repeats[key], doing.facts.get("repeats", 1))
        root = _first(doing)
        if root is not doing:
            then.setdefault(id(root), []).append(doing)
            root.destroyed |= doing.destroyed
            root.destroyed_reference |= doing.destroyed_reference
            root.energy += doing.energy
            root.reached |= doing.reached
            root.silenced += doing.silenced
            root.met |= {doing.op: None, **doing.met}
    return tuple(
        Suspect(
            trouble=doing.trouble,
            op=doing.op,
            place=doing.spot.resolved(),
            order=doing.order,
            met=frozenset(doing.met),
            next=tuple(doing.met)[:3],
            then=tuple(f"{d.trouble}: {d.op}" for d in then.get(id(doing), [])[:8]),
            destroyed=doing.destroyed,
            reached=tuple(sorted(doing.reached)),
            consequence=math.inf if doing.destroyed else math.sqrt(doing.energy) / gradient_size if gradient_size else 0.0,
            silenced=doing.silenced / elements if elements else 0.0,
            **{**doing.facts, "repeats": repeats[_same_line(doing)]},
        )
        for doing in doings
        if _first(doing) is doing
    )


def _same_line(doing: Doing) -> tuple[Any, ...]:
    return (doing.trouble, doing.op, doing.spot.place.site, doing.spot.code, doing.spot.instruction)


def _first(doing: Doing) -> Doing:
    seen = 0
    while doing.root is not None and seen < 64:
        doing, seen = doing.root, seen + 1
    return doing
