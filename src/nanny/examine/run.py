"""`sanitize`: run one training step inside it, and read which of its operations are numerically hazardous.

    with nanny.sanitize(model) as seen:
        loss = ...; scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); ema.update(model)
    print(seen)             # or seen.hazards, seen.examination

Every operation of the step, forward, backward and in the optimizer, runs a second time in FP32 beside itself. The step itself
stays bit-identical, random numbers included.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..core.examination import Examination, Hazard
from ..core.finding import NannyError
from ..core.limits import Limits
from ..watch import events
from ..watch.op_stream import is_programs_own
from ..watch.tensors import is_recorded
from .hazards import judge
from .sanitizer import Sanitizer
from .text import render_examination


class Sanitized:
    """What `sanitize` saw, once its block has ended."""

    def __init__(self, sanitizer: Sanitizer, limits: Limits, scale: _ScaleSeen | None = None, strict: bool = False) -> None:
        self._sanitizer, self._strict = sanitizer, strict
        self._limits = limits
        self._scale = scale
        self._examination: Examination | None = None

    def __enter__(self) -> Sanitized:
        self._is_open = not is_recorded()
        if not self._is_open:
            return self
        if self._scale is not None:
            events.listen(self._scale)
        self._sanitizer.open()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_open:
            return
        if self._scale is not None:
            events.leave(self._scale)
        examination = self._sanitizer.close()
        try:
            self._examination = judge(examination, self._limits)
        except BaseException as error:
            if self._strict or is_programs_own(error):
                raise
            failed = f"{type(error).__name__}: {error}"
            self._examination = replace(examination, suspects=(), facts={**examination.facts, "failed": failed})

    @property
    def examination(self) -> Examination:
        if self._examination is None:
            raise NannyError("no step has been examined yet: run one in `with sanitize(model) as seen:`, then read seen.hazards")
        return self._examination

    @property
    def hazards(self) -> tuple[Hazard, ...]:
        """Worst first; empty for a healthy step."""
        return self.examination.hazards

    def __str__(self) -> str:
        return render_examination(self.examination)

    __repr__ = __str__


class _ScaleSeen(events.PartListener):
    """The loss scale that the step itself uses, when its GradScaler was not handed over."""

    def __init__(self) -> None:
        self._scaler: Any = None

    def __call__(self) -> float | None:
        return None if self._scaler is None else self._scaler.get_scale()

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        self._scaler = scaler


def sanitize(
    model: nn.Module, scaler: Any = None, step: int = 0, limits: Limits | None = None, strict: bool = False
) -> Sanitized:
    """A context manager that examines the training step inside it.

    A GradScaler that scales the loss inside the block is found; hand over another one (`scaler`, with `get_scale`).
    """
    if not isinstance(model, nn.Module):
        raise NannyError(f"sanitize(model) needs the nn.Module that is trained, not {type(model).__name__}")
    limits = limits or Limits()
    seen = _ScaleSeen() if scaler is None else None
    scale = seen if seen is not None else scaler.get_scale if scaler.is_enabled() else None
    return Sanitized(Sanitizer([(model, "")], step, scale, limits, strict=strict), limits, seen, strict)
