"""`sanitize`: run one training step inside it, and read which of its operations are numerically hazardous.

    with nanny.sanitize(model, scaler) as seen:
        loss = ...; scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); ema.update(model)
    print(seen)             # or seen.hazards, seen.examination

Every operation of the step, forward, backward and in the optimizer, runs a second time in FP32 beside itself. The step itself
stays bit-identical, random numbers included.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .examine_records import Examination, Hazard
from .judge.hazards import judged
from .limits import Limits
from .observe.names import is_compiled
from .observe.sanitizer import Sanitizer
from .records import NannyError
from .show.hazard_text import render_examination


class Sanitized:
    """What `sanitize` saw, once its block has ended."""

    def __init__(self, sanitizer: Sanitizer, limits: Limits) -> None:
        self._sanitizer = sanitizer
        self._limits = limits
        self._examination: Examination | None = None

    def __enter__(self) -> Sanitized:
        self._sanitizer.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._examination = judged(self._sanitizer.close(), self._limits)

    @property
    def examination(self) -> Examination:
        if self._examination is None:
            raise NannyError("the step is still being examined; read .examination and .hazards after the with block")
        return self._examination

    @property
    def hazards(self) -> tuple[Hazard, ...]:
        """Worst first; empty for a healthy step."""
        return self.examination.hazards

    def __str__(self) -> str:
        return render_examination(self.examination)

    __repr__ = __str__


def sanitize(
    model: nn.Module, scaler: Any = None, step: int = 0, limits: Limits | None = None, strict: bool = False
) -> Sanitized:
    """A context manager that examines the training step inside it. `scaler`: the GradScaler, so that gradients are unscaled."""
    if not isinstance(model, nn.Module):
        raise NannyError(f"sanitize(model) needs the nn.Module that is trained, not {type(model).__name__}")
    if is_compiled(model):
        raise NannyError(
            "a compiled model does not show its operations; run this one step eagerly: "
            "torch.compiler.set_stance('force_eager') before it, and sanitize(model._orig_mod)"
        )
    scale = None if scaler is None or not scaler.is_enabled() else scaler.get_scale
    limits = limits or Limits()
    return Sanitized(Sanitizer([(model, "")], step, scale, limits, strict=strict), limits)
