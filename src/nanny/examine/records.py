"""`Suspect`: an operation of an examined step that may be wrong. It grows while the step runs; at the end it is plain data.

Hazards are judged from suspects alone (`hazards/`), so nothing here imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.examination import Place, as_typed
from ..core.ops import SAME_VALUE, SELECT


@dataclass(frozen=True)
class Operand:
    """A tensor that went into an operation."""

    role: str = ""  # parameter, buffer, input, given (came from outside the step); "": computed in the step
    name: str = ""  # of a parameter or buffer
    producer: str = ""  # operation that made it, casts and copies passed over
    dtype: str = ""
    absmax: float = 0.0
    absmin: float = 0.0
    rms: float = 0.0
    level: float = 0.0  # its error beside its FP32 twin, as `Suspect.level`
    nonfinite: bool = False


@dataclass(eq=False)
class Suspect:
    """An operation under suspicion. `trouble` says why:

    nonfinite  NaN or infinity out of finite numbers
    given      the NaN or infinity came from outside: data, a parameter, a buffer
    error      the error beside the FP32 twin jumps here: small in what goes in, large in what comes out
    saturated  a clamp cuts off at the ends of an 8-bit format what the twin has beyond them
    zeros      exact zeros where the twin has none
    integers   whole numbers that the format cannot hold
    decision   a choice or comparison that the twin makes differently
    absorbed   an addition that leaves its larger operand as it was
    stored     numbers that were rounded to 16 bits before the step, and what is done with them needs more
    state      a tensor that outlives the step and stood still while its twin moved
    purpose    an infinity that the program wants (a mask): never told
    """

    trouble: str
    op: str
    place: Place
    order: int
    dtype: str = ""
    scalars: tuple[float, ...] = ()
    operands: tuple[Operand, ...] = ()
    count: int = 0  # elements of the result
    share: float = 0.0  # of them concerned
    reference_absmax: float = 0.0
    reference_rms: float = 0.0
    nan: bool = False
    in_reference: bool = False
    plain: float = 0.0  # relative L2 error beside the twin
    centred: float = 0.0  # the same against the part that varies over the first or last dimension
    level: float = 0.0  # the worse of the two, in units of the plain one
    input_level: float = 0.0
    own: float | None = None  # relative error of the operation itself: beside FP32 on the very same inputs
    kept: float | None = None  # share of an addend that arrived: <change, addend> / <addend, addend>
    unchanged: float | None = None  # share of elements left bit-identical though they should have moved
    repeats: int = 1  # how often this source line ran in this module during the step
    residual: bool = False  # the smaller addend was computed from the larger one
    differentiable: bool = True  # gradients were asked for
    of_graph: bool = False  # and go through it
    forward: str = ""  # in backward: the forward operation whose derivative is computed
    after: frozenset[str] = frozenset()  # operations that it descends from, the recent ones
    wide_angle: bool = False  # the angle that it is taken of was made in FP32
    numbers: Mapping[str, Any] = field(default_factory=dict)
    exponents: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # ran, fp32 -> binary order of the result -> values

    # what became of it, known at the end of the step
    met: dict[str, None] = field(default_factory=dict)  # operations that met its damage, in order
    fed: bool = False  # a module was given it
    chose: bool = False  # its damage met what a choice had picked
    cancelled: bool = False  # its damage is in a difference that left little, and made it larger
    target: bool = False  # its damage is in what a loss compares a prediction with
    then: list[str] = field(default_factory=list)  # operations that broke because of it
    reached: set[str] = field(default_factory=set)  # `loss` and names of parameters
    destroyed: bool = False  # what it made reached loss, gradients, weights or buffers as NaN or infinity
    destroyed_reference: bool = False
    consequence: float = 0.0  # relative, energy-weighted error that it put into the gradients
    silenced: float = 0.0  # share of all parameters whose gradient it made zero throughout
    ruined: float = 0.0  # share of all parameters whose gradient it made another one, or zero, however small that gradient is

    # only while the step runs
    spot: Any = None  # a watch.places.Spot
    root: Suspect | None = None  # the earlier suspect that it broke because of
    error_energy: float = 0.0  # squared absolute error that arrived in gradients
    silenced_elements: int = 0
    ruined_elements: int = 0

    @property
    def op_name(self) -> str:
        return as_typed(self.op)

    @property
    def in_backward(self) -> bool:
        return self.place.phase == "backward"

    @property
    def next(self) -> tuple[str, ...]:
        """The first three operations that met its damage."""
        return tuple(self.met)[:3]

    def note(self, **facts: Any) -> Suspect:
        for name, value in facts.items():
            setattr(self, name, value)
        return self

    def meets(self, op: str) -> None:
        if op not in SAME_VALUE:
            self.met[op] = None

    def jumped(self, times: float) -> bool:
        """It made its error itself; else a slowly growing one only became visible there."""
        made = self.trouble != "error" or self.level >= times * self.input_level
        return self.trouble == "saturated" or (made and self.op not in SELECT)

    def first(self) -> Suspect:
        one, steps = self, 0
        while one.root is not None and steps < 64:
            one, steps = one.root, steps + 1
        return one


def plain_suspects(found: Sequence[Suspect], gradient_size: float, elements: int) -> tuple[Suspect, ...]:
    """The first causes, as plain data. What broke because of an earlier suspect is told with that one."""
    repeats: Counter[Hashable] = Counter()
    for suspect in found:
        line = _line_of(suspect)
        repeats[line] = max(repeats[line], suspect.repeats)
        root = suspect.first()
        if root is not suspect:
            root.then.append(suspect.op)
            root.destroyed |= suspect.destroyed
            root.destroyed_reference |= suspect.destroyed_reference
            root.error_energy += suspect.error_energy
            root.reached |= suspect.reached
            root.silenced_elements += suspect.silenced_elements
            root.ruined_elements += suspect.ruined_elements
            root.met |= {suspect.op: None, **suspect.met}
            root.chose |= suspect.chose
            root.cancelled |= suspect.cancelled
            root.target |= suspect.target
            root.wide_angle |= suspect.wide_angle
    roots = [suspect for suspect in found if suspect.first() is suspect]
    for suspect in roots:
        suspect.repeats = repeats[_line_of(suspect)]
        size = math.sqrt(suspect.error_energy) / gradient_size if gradient_size else 0.0
        suspect.consequence = math.inf if suspect.destroyed else size
        suspect.silenced = suspect.silenced_elements / elements if elements else 0.0
        suspect.ruined = suspect.ruined_elements / elements if elements else 0.0
    for suspect in roots:
        suspect.place = suspect.spot.resolve() if suspect.spot is not None else suspect.place
    for suspect in found:
        suspect.spot = suspect.root = None
    return tuple(roots)


def _line_of(suspect: Suspect) -> Hashable:
    spot = suspect.spot
    return (suspect.trouble, suspect.op, suspect.place.site, None if spot is None else (spot.code, spot.instruction))
