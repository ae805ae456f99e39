"""What watching single operations told: an operation beside its reference, and who made the first NaN. Plain data, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.examination import Place, operation

MOST_ELEMENTS = 20  # differing elements that are shown; all are counted


@dataclass(frozen=True)
class TensorNote:
    """A tensor as a line of the log describes it. Minimum and maximum are given where something is wrong."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    minimum: float | None = None
    maximum: float | None = None
    label: str = ""  # `0`, `mat1`, `out`: which argument it is

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Element:
    index: tuple[int, ...]
    value: float
    reference: float


@dataclass(frozen=True)
class Gap:
    """One output that differs from its reference."""

    output: TensorNote
    reference: TensorNote
    differing: int  # elements in all
    elements: tuple[Element, ...]  # the first of them
    worst: Element | None = None
    rel_l2: float | None = None  # relative L2 error of the finite part
    limit: str = ""  # what it broke, in words
    why: str = ""  # where the numbers tell


@dataclass(frozen=True)
class OpFault:
    """An operation that made something wrong: the call, its place and what was seen."""

    op: str  # torch.ops.aten.addmm
    kind: str  # mismatch, nan, inf, came_in
    place: Place
    classes: str = ""  # of the open modules: Gpt/Block/Linear
    step: int = 0
    rank: int = 0
    inputs: tuple[TensorNote, ...] = ()
    outputs: tuple[TensorNote, ...] = ()
    gaps: tuple[Gap, ...] = ()
    passed_on: tuple[str, ...] = ()  # the first operations that only passed it on
    passed_on_count: int = 0
    dump: str = ""

    @property
    def bare_op(self) -> str:
        return self.op.rpartition(".")[2]

    @property
    def culprit(self) -> str:
        return self.place.site or operation(self.bare_op)


@dataclass(frozen=True)
class OpTally:
    """What a tool did, for its last line: nothing that was left out is left unsaid."""

    operations: int = 0
    compared: int = 0
    faults: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason -> operations


@dataclass(frozen=True)
class Replay:
    """A dumped operation that was run again: the stored result and the new one, each against the reference."""

    op: str
    place: Place
    classes: str
    kind: str
    step: int
    recorded_with: str  # versions of torch
    here: str
    then: tuple[Gap, ...] = ()
    now: tuple[Gap, ...] = ()
    compared: bool = True  # False: nothing wider to compare with
    nonfinite_then: bool = False
    nonfinite_now: bool = False

    @property
    def is_wrong(self) -> bool:
        return bool(self.then or self.now or self.nonfinite_then or self.nonfinite_now)
