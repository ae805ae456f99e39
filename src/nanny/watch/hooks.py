"""Hooks on tensors and in torch's lists for all modules. Those outlive a step that nobody ends, so they keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from .aside import ModuleHooks


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A bound method as a hook that does not keep its object alive. `first` are handed over before what torch gives."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any, **kwargs: Any) -> Any:
        alive = None if torch.compiler.is_compiling() else reference()
        return None if alive is None else alive(*first, *args, **kwargs)

    return unserializable_hook(hook)  # a tensor that is saved within the step does not warn of it


def add_hook(register: Callable[..., Any], method: Callable[..., Any], *first: Any) -> Callable[[], Any]:
    """Registers a method as a hook that goes when its object does. What comes back takes it away, once."""
    return _until_collected(method, register(weakly(method, *first)).remove)


def add_module_hook(register: Callable[..., Any], method: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    """The same for all modules: such a hook steps aside for torch's compiler."""
    hook = weakly(method)
    hooks = ModuleHooks(lambda: register(hook, **options))
    hooks.open()
    return _until_collected(method, hooks.close)


def _until_collected(method: Callable[..., Any], remove: Callable[[], None]) -> Callable[[], Any]:
    final = weakref.finalize(method.__self__, remove)  # type: ignore[attr-defined]
    final.atexit = False
    return final
