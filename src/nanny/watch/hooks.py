"""Hooks on tensors and in torch's lists for all modules. Those outlive a step that nobody ends, so they keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.utils.hooks import unserializable_hook


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A bound method as a hook that does not keep its object alive. `first` are handed over before what torch gives."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any, **kwargs: Any) -> Any:
        alive = None if torch.compiler.is_compiling() else reference()
        return None if alive is None else alive(*first, *args, **kwargs)

    return unserializable_hook(hook)  # a tensor that is saved within the step does not warn of it


def add_hook(register: Callable[..., Any], method: Callable[..., Any], *first: Any, **options: Any) -> Callable[[], Any]:
    """Registers a method as a hook that goes when its object does. What comes back takes it away, once."""
    handle = register(weakly(method, *first), **options)

    def remove() -> None:
        handle.remove()
        getattr(module_hooks, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)  # torch forgets it

    final = weakref.finalize(method.__self__, remove)  # type: ignore[attr-defined]
    final.atexit = False
    return final
