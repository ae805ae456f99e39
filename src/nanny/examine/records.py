"""What the sanitizer saw of one operation: the numbers from which hazards are judged (`judge/hazards`). Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.examination import Place


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


@dataclass(frozen=True)
class Suspect:
    """An operation under suspicion. `trouble` says why:

    nonfinite  NaN or infinity out of finite numbers
    given      the NaN or infinity came from outside: data, a parameter, a buffer
    error      the error beside the FP32 twin jumps here: small in what goes in, large in what comes out
    zeros      exact zeros where the twin has none
    integers   whole numbers that the format cannot hold
    decision   a choice or comparison that the twin makes differently
    absorbed   an addition that leaves its larger operand as it was
    state      a tensor that outlives the step and stood still while its twin moved
    """

    trouble: str
    op: str
    place: Place
    order: int
    dtype: str = ""
    calls: int = 1
    scalars: tuple[float, ...] = ()
    operands: tuple[Operand, ...] = ()
    count: int = 0  # elements of the result
    share: float = 0.0  # of them concerned
    absmax: float = 0.0  # of the finite part of the result
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
    forward: str = ""  # in backward: the forward operation whose derivative is computed
    after: frozenset[str] = frozenset()  # operations that it descends from, the recent ones
    met: frozenset[str] = frozenset()  # operations that met its damage
    next: tuple[str, ...] = ()  # the first three of these
    then: tuple[str, ...] = ()  # what broke because of it, as text
    destroyed: bool = False  # what it made reached loss, gradients, weights or buffers as NaN or infinity
    reached: tuple[str, ...] = ()  # `loss` and names of parameters
    consequence: float = 0.0  # relative, energy-weighted error that it put into the gradients
    silenced: float = 0.0  # share of all parameters whose gradient it made zero throughout
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_backward(self) -> bool:
        return self.place.phase == "backward"
