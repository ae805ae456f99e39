"""What one examined training step told: which operations are numerically hazardous, and what FP32 would have made of the step.

An examination watches every operation of one step beside its FP32 twin (`watch/twins.py`). It is plain data: it can be
stored, judged again and shown without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where an operation ran."""

    site: str = ""  # the innermost module by its real name (`blocks.3.attn`); "" in the root's own code and outside the model
    module: str = ""  # its class
    phase: str = "forward"  # backward, optimizer, or loop: the code of the user between these
    file: str = ""  # the nearest frame outside torch and nanny; in backward, of the operation it belongs to
    line: int | None = None
    source: str = ""  # that line, and a second one with carets under what ran if Python knows (from 3.11 on)

    @property
    def where(self) -> str:
        return "" if not self.file else self.file if self.line is None else f"{self.file}:{self.line}"

    @property
    def is_data(self) -> bool:
        """No place of the program: the number came with the batch."""
        return self.site in ("data", "data:input", "data:target")

    @property
    def is_outside(self) -> bool:
        """In the loop's own code: the criterion, clipping, averages."""
        return self.phase == "loop" and not self.site


def as_typed(op: str) -> str:
    """The name a user would type: `_to_copy` is a call of `.to()`."""
    plain = op.lstrip("_")
    return _AS_TYPED.get(plain, plain)


def operation(op: str) -> str:
    """An operation outside any module."""
    return f"op:{as_typed(op)}"


_AS_TYPED = {"to_copy": "to", "copy": "copy_"}


@dataclass(frozen=True)
class Hazard:
    """One numerical hazard: the same kind, operation and place are one hazard, however often it ran.

    A hazard states what happened. Its cause is chosen from kind and traits, by `diagnose.choose`.
    """

    kind: str  # overflow, flush, absorption ...: a function of examine/hazards
    op: str  # aten name without namespace and overload: `bmm`
    place: Place
    order: int  # position of its first occurrence among the operations of the step
    dtype: str = ""  # of the result as stored
    calls: int = 1
    share: float = 0.0  # of the elements concerned, at the worst call
    value: float | None = None  # the worst example ...
    limit: float | None = None  # ... and what it broke
    message: str = ""  # one sentence with the numbers
    numbers: Mapping[str, Any] = field(default_factory=dict)
    traits: tuple[str, ...] = ()  # what else is known of it and tells causes apart: what the rules of diagnose.choose ask for
    consequence: float = 0.0  # 0..inf: relative, energy-weighted error that it puts into loss and gradients; inf: destroys them
    cause: str = ""  # a name of the knowledge base
    remedy: str = ""  # as the page of the cause has it
    in_reference: bool = False  # the FP32 twin shows it too: precision is not the reason
    exponents: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # ran, fp32 -> binary order of the result -> values

    @property
    def is_of_before(self) -> bool:
        """It breaks at what was made before the step: rounded to 16 bits, or infinite in whatever format it was computed in."""
        return self.kind == "singular_backward" and (bool(self.numbers.get("stored")) or "infinite_data" in self.traits)

    @property
    def is_of_data(self) -> bool:
        """NaN or infinities came with the batch."""
        return self.kind == "given_nonfinite" and not {"parameter", "buffer", "gradient", "constant"} & {*self.traits}

    @property
    def culprit(self) -> str:
        """The place as a diagnosis names it."""
        return self.place.site or operation(self.op)


@dataclass(frozen=True)
class GradientError:
    """A parameter's gradient beside the gradient that FP32 would have given on this very batch, both unscaled."""

    name: str
    norm: float
    reference_norm: float
    error: float  # relative L2; nan if the reference is not finite
    energy_share: float  # of the squared norm of the whole reference gradient
    zero_share: float
    reference_zero_share: float
    nonfinite: bool = False
    reference_nonfinite: bool = False


@dataclass(frozen=True)
class FirstBad:
    """The operation that made the first NaN or infinity out of finite numbers, from whatever source tells it best."""

    op: str
    place: Place
    order: int
    nan: bool  # False: an infinity
    inputs: Mapping[str, float] = field(default_factory=dict)  # absmax, absmin, ... of what went in
    expected: float | None = None  # magnitude of the result in FP32, if finite
    step: int = 0
    dtype: str = ""
    in_reference: bool | None = None  # FP32 breaks there too; None: nobody compared
    from_data: bool = False
    source: str = "examination"  # or graph, factor (of the loss), batch, trace, gradients: what else tells of a step
    hazard: Hazard | None = None  # that it is, or that led to it
    exponents: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # ran, fp32 -> binary order of the result -> values

    @property
    def culprit(self) -> str:
        """The place as a diagnosis names it."""
        return self.place.site or operation(self.op)

    @property
    def in_forward(self) -> bool:
        return self.place.phase in ("forward", "loop")

    @property
    def stored(self) -> bool:
        """What went in was rounded, or infinite, before the step: nobody knows what FP32 would have made of it."""
        return self.hazard is not None and self.hazard.is_of_before

    @property
    def hint(self) -> str:
        """The cause that the examined operation speaks for by itself."""
        return self.hazard.cause if self.hazard is not None else ""


@dataclass(frozen=True)
class Trial:
    """A remedy tried on an examined step: what came out of it with one change, beside the run. None: it could not be told."""

    change: str  # fp32, scaled_first, larger_eps ...: see examine/remedies.py
    op: str = ""  # the first operation that was changed, and where
    place: Place = field(default_factory=Place)
    order: int = 0
    places: int = 1  # operations that were changed
    value: float | None = None  # the factor, the eps, the scale, the number of rows
    was_bad: bool = True  # without the change, loss, outputs or gradients were not finite
    loss: float | None = None
    loss_reference: float | None = None
    outputs_finite: bool | None = None
    output_error: float | None = None  # relative L2 of the model's outputs beside FP32
    output_change: float | None = None  # the same beside the outputs as they were
    gradients_finite: bool | None = None
    gradient_error: float | None = None  # relative L2 beside FP32
    gradient_error_before: float | None = None  # without the change
    moved: float | None = None  # share of the weights that the update moved
    moved_before: float | None = None  # without the change
    scale: float | None = None  # of the loss; gradients that overflow under one are its own affair: it will fall
    step: int | None = None  # which, once it stands under a diagnosis

    @property
    def is_finite(self) -> bool:
        """Loss and gradients, or what is known of them."""
        loss = self.outputs_finite if self.loss is None else math.isfinite(self.loss)
        return loss is not False and (self.gradients_finite is not False or (self.scale or 1.0) > 1)

    @property
    def tells(self) -> bool:
        """Anything was seen of what came out."""
        return any(seen is not None for seen in (self.loss, self.outputs_finite, self.gradients_finite, self.moved))

    @property
    def helped(self) -> bool | None:
        """None: a little, or nobody can tell."""
        if self.moved is not None and self.moved_before is not None:
            return self.moved * HELPED > self.moved_before
        if self.was_bad:
            far = self.gradient_error is not None and self.gradient_error > HELPED
            return None if self.is_finite and far else self.is_finite
        before, after = self.gradient_error_before, self.gradient_error
        if before is None or after is None or not before:
            return None
        return True if after < HELPED * before else False if after > FAILED * before else None


HELPED, FAILED = 0.5, 0.9  # of the gradients, or of their error before, is still wrong


@dataclass(frozen=True)
class Examination:
    """All that an examined step told."""

    step: int
    operations: int = 0
    amp_dtype: str = ""
    scale: float | None = None
    loss: float | None = None
    loss_reference: float | None = None
    gradient_error: float | None = None  # relative L2 over all parameters together
    gradients: tuple[GradientError, ...] = ()
    first_bad: FirstBad | None = None  # in the program as it ran
    first_bad_reference: FirstBad | None = None  # in its FP32 twin
    hazards: tuple[Hazard, ...] = ()  # by consequence, worst first
    trials: tuple[Trial, ...] = ()  # remedies that were tried on this step
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else causes ask for: see examine/sanitizer.py
    reseeds: Mapping[str, int] = field(default_factory=dict)  # operation and reason -> how often the twin could not follow
    seconds: float | None = None
    suspects: tuple[Any, ...] = ()  # of type examine.records.Suspect, until hazards are made of them
