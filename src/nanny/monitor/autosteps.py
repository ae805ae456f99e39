"""Finds models and steps by themselves: for `nanny run` and `watch_model`, where nobody says when a step begins.

A model is found when it is first called for training from outside any known model. A step begins with the first training call of
a found model after every optimizer that is known has stepped (a GAN's two belong to one step), or one of them twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..watch.names import unwrapped
from .recorder import Recorder

MOST_MODELS = 8
PATIENCE = 64  # backward passes without an optimizer step, until each of them counts as a step


class AutoSteps:
    """Calls `begin(step)` at the right moments while open."""

    def __init__(
        self, recorder: Recorder, begin: Callable[[int], None], add_model: Callable[[nn.Module, str], None] | None
    ) -> None:
        self._recorder = recorder
        self._begin = begin
        self._add_model = add_model  # None: the models are given, look for no others
        self._roots: set[int] = {id(unwrapped(m)) for m, _ in recorder.models}
        self._next = 0
        self._without_optimizer = False
        self._handle: Any = None

    def open(self) -> None:
        self._handle = register_module_forward_pre_hook(self._recorder.guard(self._before_forward, apart=False))

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        key = id(module)
        if key not in self._roots:
            if self._add_model is None or key in self._recorder.modules or len(self._roots) >= MOST_MODELS:
                return
            if not module.training or not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
                return
            self._add_model(module, f"{type(module).__name__}." if self._roots else "")
            self._roots.update((key, *(id(unwrapped(m)) for m, _ in self._recorder.models)))
        if torch.is_grad_enabled() and self._is_over():
            self._begin(self._next)
            self._next += 1

    def _is_over(self) -> bool:
        capture = self._recorder.capture
        if capture is None:
            return True
        known = {k for k, r in self._recorder.optimizers.items() if r() is not None}
        if not known:  # gradients may be accumulated first; after many backward passes there is none of torch's to come
            self._without_optimizer = self._without_optimizer or capture.backwards >= PATIENCE
            return self._without_optimizer and capture.backwards > 0
        return known <= capture.stepped_by or capture.repeated
