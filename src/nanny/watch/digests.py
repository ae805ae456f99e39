"""What every operation was given and what it gave, as checksums: two runs of the same program compared bit by bit.

first, second = Digests(), Digests(places)
with watching(first): ...
with watching(second): ...
first_difference(first, second)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.examination import Place
from ..core.ops import UNWRITTEN, bare_op
from .op_stream import Op
from .places import Places, Spot
from .storages import StorageMap
from .tensors import bits_of, has_storage, map_leaves, tensors_in


class _Line(NamedTuple):
    name: str
    given: int  # tensors and numbers
    gave: int
    device: str
    spot: Spot | None


class Difference(NamedTuple):
    """An operation that gave other bits of the very same inputs."""

    op: str
    device: str
    place: Place


class Digests:
    on_trouble: Callable[[Any], None] | None

    def __init__(self, places: Places | None = None) -> None:
        self.lines: list[_Line] = []
        self.trouble = False
        self._places = places
        self._unwritten: StorageMap[bool] = StorageMap()  # memory that is no value yet
        self.on_trouble = self._failed

    def _failed(self, _: Any) -> None:
        self.trouble = True

    def before(self, op: Op) -> int:
        numbers: list[str] = []
        map_leaves((op.args, dict(op.kwargs)), lambda value: numbers.append("" if isinstance(value, Tensor) else repr(value)))
        given = [t for t in op.inputs if not (has_storage(t) and self._unwritten.find(t))]
        return _checksum(given, zlib.crc32("|".join(numbers).encode()))

    def after(self, op: Op, state: int) -> None:
        if bare_op(op.name) in UNWRITTEN:
            for tensor in filter(has_storage, tensors_in(op.out)):
                self._unwritten.put(tensor, True)
            return
        for tensor in filter(has_storage, op.written):
            self._unwritten.drop(tensor)
        made = [t for t in (*tensors_in(op.out), *op.written) if t.is_floating_point() or t.is_complex()]
        device = str(made[0].device) if made else ""
        self.lines.append(
            _Line(bare_op(op.name), state, _checksum(made, 0), device, self._places.spot() if self._places else None)
        )

    def passed_by(self, op: Op) -> None:
        self.trouble = True

    def interrupted(self, why: str) -> None:
        self.trouble = True


def _checksum(tensors: Iterable[Tensor], start: int) -> int:
    for tensor in tensors:
        if has_storage(tensor):
            # a copy: numpy would forbid the program to resize what it has looked at
            bits = tensor.detach().clone(memory_format=torch.contiguous_format)
            start = zlib.crc32(bits_of(bits.cpu()).numpy().data, start)
    return start


def first_difference(first: Digests, second: Digests) -> tuple[bool, Difference | None]:
    """Are the runs the same, and the operation that proves that they cannot be: same inputs, same numbers, other bits."""
    if first.trouble or second.trouble:
        return True, None
    for one, other in zip(first.lines, second.lines):
        if (one.name, one.given) != (other.name, other.given):
            return False, None  # the program itself went another way
        if one.gave != other.gave:
            place = other.spot.resolve() if other.spot is not None else Place()
            return False, Difference(one.name, one.device, place)
    return len(first.lines) == len(second.lines), None
