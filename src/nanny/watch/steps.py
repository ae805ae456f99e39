"""Training steps of a program that does not say where they begin: for `nanny trace`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import _global_forward_pre_hooks, register_module_forward_pre_hook
from torch.optim import Optimizer

from . import events


class StepClock(events.PartListener):
    """Calls `begin(model)` before the first training forward, and before the one that follows when every optimizer has stepped.

    A step that a GradScaler skips is a step.
    """

    def __init__(self, begin: Callable[[nn.Module], None]) -> None:
        self._begin = begin
        self._known: set[int] = set()
        self._stepped: set[int] = set()
        self._started = False
        self._handle: Any = None

    def __enter__(self) -> StepClock:
        events.listen(self)
        self._handle = register_module_forward_pre_hook(self._before_forward)
        return self

    def __exit__(self, *_: object) -> None:
        events.leave(self)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        over = bool(self._stepped) and self._known <= self._stepped
        if (self._started and not over) or not module.training or not torch.is_grad_enabled():
            return
        if next(module.parameters(), None) is not None:
            self._started = True
            self._stepped.clear()
            known = set(_global_forward_pre_hooks)
            self._begin(module)
            for key, hook in list(_global_forward_pre_hooks.items()):
                if key not in known:  # registered just now: torch made its list of this call's hooks before
                    hook(module, args)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        self._known.add(id(optimizer))
        self._stepped.add(id(optimizer))

    def after_scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self.after_optimizer_step(optimizer)
