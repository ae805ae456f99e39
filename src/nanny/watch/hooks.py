"""Hooks on tensors and in torch's lists for all modules. Those outlive a step that nobody ends, so they keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from .compiler import ModuleHooks


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A bound method as a hook that does not keep its object alive. `first` are handed over before what torch gives."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any, **kwargs: Any) -> Any:
        alive = None if torch.compiler.is_compiling() else reference()
        return None if alive is None else alive(*first, *args, **kwargs)

    return unserializable_hook(hook)  # a tensor that is saved within the step does not warn of it


def add_hook(register: Callable[..., Any], method: Callable[..., Any], *first: Any) -> Callable[[], Any]:
    """Registers a method as a hook that goes when its object does. What comes back takes it away, once."""
    handles: list[Any] = []
    remove = _until_collected(method, lambda: handles.pop().remove() if handles else None)
    handles.append(register(weakly(method, *first)))
    return remove


def add_module_hook(register: Callable[..., Any], method: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    """The same for all modules: such a hook steps aside for torch's compiler."""
    hook = weakly(method)
    hooks = ModuleHooks(lambda: register(hook, **options))
    remove = _until_collected(method, hooks.close)
    hooks.open()
    return remove


def _until_collected(method: Callable[..., Any], remove: Callable[[], None]) -> Callable[[], Any]:
    final = weakref.finalize(method.__self__, remove)  # type: ignore[attr-defined]
    final.atexit = False
    return final
