"""Decides which steps of a run are examined operation by operation, and sees to it that it stays cheap.

An examined step costs several plain ones. The first step is always worth it, and the first seconds of a run are nobody's
bottleneck; after that examinations come at growing distance, or when something looks wrong, and together take a percent of the
time at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..core.examination import Examination
from ..examine.sanitizer import Sanitizer
from ..watch.tensors import being_traced, in_backward
from .recorder import Recorder

STARTUP_SECONDS = 5.0  # which examinations may take before they must be earned
SHARE = 0.01  # of the time of a run, afterwards
MOST_SUSPICIONS = 3
TIMES_A_STEP = 8.0  # what an examined step costs, until one has told


@dataclass
class ExaminationPlan:
    """Which steps to examine; knows of time only what it is told."""

    spent: float = 0.0
    count: int = 0
    suspicions: int = 0
    _next: int = 0
    _worst: float = 0.0
    _suspected: bool = False

    def wants(self, position: int, elapsed: float, step_seconds: float | None) -> bool:
        """`position`: how many steps there were before; `elapsed`: seconds since the first; `step_seconds`: of a plain one."""
        suspected, self._suspected = self._suspected, False
        if not self.count and position == 0:
            return True
        if not suspected and position < self._next:
            return False
        price = self._worst or TIMES_A_STEP * (step_seconds or 0.0)
        if self.spent + price > max(STARTUP_SECONDS, SHARE * elapsed):
            return False
        self.suspicions += suspected
        return True

    def suspect(self) -> None:
        """Something looks wrong: the next step is worth a look, a few times in a run."""
        self._suspected = self.suspicions < MOST_SUSPICIONS

    def done(self, position: int, seconds: float) -> None:
        self.count += 1
        self.spent += seconds
        self._worst = max(self._worst, seconds)
        self._next = max(position + 1, 2 * position)


def modes_may_change() -> bool:
    """Inference mode, backward and transforms put the dispatcher back as they found it: what is opened or closed within them
    would be half undone."""
    return not torch.is_inference_mode_enabled() and not in_backward() and not being_traced()


class Examiner:
    """Opens the sanitizer around the steps that the plan wants, one at a time in a process."""

    busy: ClassVar[bool] = False

    def __init__(self, recorder: Recorder, on_examination: Callable[[Examination], None], always: bool = False) -> None:
        self.plan = ExaminationPlan()
        self.off_because = ""
        self._always = always
        self._recorder = recorder
        self._deliver = on_examination
        self._sanitizer: Sanitizer | None = None
        self._handle: Any = None
        self._position = 0
        self._opened = 0.0
        self._plain: list[float] = []

    def begin(self, position: int, elapsed: float) -> bool:
        """Whether the step that begins now is examined."""
        self._position = position
        if self.off_because or not self._recorder.models or Examiner.busy or not modes_may_change():
            return False
        self.off_because = self._obstacle()
        return not self.off_because and (self.plan.wants(position, elapsed, self._typical()) or self._always)

    def open(self, step: int) -> None:
        """Last thing before the user's code: from here on every operation is watched."""
        sanitizer = Sanitizer(self._recorder.models, step, self._scale)
        self._opened = time.thread_time()
        sanitizer.open()
        Examiner.busy = True
        self._sanitizer = sanitizer
        self._recorder.examining = True
        self._handle = register_module_forward_pre_hook(self._called)

    def close(self) -> Examination | None:
        """Idempotent. Gives what the examination told. Where it may not end now, it ends at the next occasion."""
        if self._sanitizer is None or not modes_may_change():
            return None
        sanitizer, self._sanitizer = self._sanitizer, None
        self._recorder.examining = False
        self._handle.remove()
        try:
            examination = sanitizer.close()
        finally:
            Examiner.busy = False
        self.plan.done(self._position, max(time.thread_time() - self._opened - (self._typical() or 0.0), 0.0))
        return examination

    def finish(self) -> None:
        examination = self.close()
        if examination is not None:
            self._deliver(examination)

    @property
    def is_open(self) -> bool:
        return self._sanitizer is not None

    def plain_step(self, seconds: float) -> None:
        """What a step that was not examined took."""
        self._plain = [*self._plain[-30:], seconds]

    def _typical(self) -> float | None:
        return sorted(self._plain)[len(self._plain) // 2] if self._plain else None

    def _called(self, module: nn.Module, _: Any) -> None:
        """A forward pass after the step: an evaluation, or the user's block is over and nobody said so."""
        capture = self._recorder.capture
        over = capture is None or capture.ended or (capture.record.stepped and not torch.is_grad_enabled())
        if over and id(module) in self._recorder.modules and self._recorder.when_cleared is not None:
            self._recorder.when_cleared()

    def _obstacle(self) -> str:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return "several processes train together, and a collective cannot be run twice by one of them"
        if self._recorder.compiled:
            return "the model is compiled, and its operations are not seen one by one"
        return ""

    def _scale(self) -> float | None:
        capture = self._recorder.capture
        scale = None if capture is None else capture.scale
        return float(scale) if isinstance(scale, torch.Tensor) else None
