"""What happens in a training step, as events: backward, scaling, unscaling, clipping, optimizer steps.

The few functions through which every PyTorch training loop must go are wrapped once per process, while somebody listens, and put
back when the last listener leaves. Nothing is stored on the user's model, optimizer or scaler, so saving and copying them is
not affected. Classes are wrapped rather than instances: a scaler or optimizer needs not be passed in, and may be made later.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module


class Listener(Protocol):
    """Gets every event of the process; each method must return quickly and never raise."""

    def saved_tensors_packed(self) -> None: ...
    def before_backward(self, roots: tuple[Tensor, ...]) -> None: ...
    def loss_scaled(self, scaler: GradScaler, loss: Tensor, scaled: Tensor) -> None: ...
    def after_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None: ...
    def before_clip(self, parameters: list[Tensor], max_norm: float) -> None: ...
    def before_scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> None: ...
    def after_scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> None: ...
    def after_scaler_update(self, scaler: GradScaler, given: bool) -> None: ...
    def before_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None: ...
    def after_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def gradients_cleared(self) -> None: ...


_listeners: list[Listener] = []
_undo: list[Callable[[], None]] = []


class PartListener:
    """A listener that hears only the events for which it has a method."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _ignore


def _ignore(*_: Any, **__: Any) -> None:
    return None


def listen(listener: Listener) -> None:
    """Idempotent."""
    if listener in _listeners:
        return
    if not _listeners:
        _install()
    _listeners.append(listener)


def leave(listener: Listener) -> None:
    """Idempotent."""
    if listener in _listeners:
        _listeners.remove(listener)
        if not _listeners:
            while _undo:
                _undo.pop()()


def tensors_of(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:  # private names may go in a later torch; the events they give are then missing, nothing breaks
        return
    wrapped = functools.wraps(original)(make(original))
    setattr(owner, name, wrapped)

    def restore() -> None:
        if getattr(owner, name) is wrapped:  # somebody else may have wrapped it after us; leave theirs alone
            setattr(owner, name, original)

    _undo.append(restore)


def _install() -> None:
    _replace(torch.autograd, "backward", _backward)
    _replace(GradScaler, "scale", _scale)
    _replace(GradScaler, "unscale_", _unscale)
    _replace(GradScaler, "step", _scaler_step)
    _replace(GradScaler, "update", _scaler_update)
    # clip_grad_norm_ looks this one up when called, so code that imported it earlier is seen too
    _replace(clip_grad, "_clip_grads_with_norm_", _clip)
    for owner in (torch.nn.utils, clip_grad):
        _replace(owner, "clip_grads_with_norm_", _clip)
        _replace(owner, "clip_grad_value_", _clip)
    _replace(saved_tensors_hooks, "__enter__", _packing)
    _replace(Optimizer, "zero_grad", _zero_grad)
    before = optimizer_module.register_optimizer_step_pre_hook(_optimizer_before)
    after = optimizer_module.register_optimizer_step_post_hook(_optimizer_after)
    _undo.extend((before.remove, after.remove))


def _backward(original: Any) -> Any:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(t for t in _iterable(tensors) if isinstance(t, Tensor))
        for listener in tuple(_listeners):
            listener.before_backward(roots)
        return original(tensors, *args, **kwargs)

    return backward


def _iterable(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _packing(original: Any) -> Any:
    def enter(self: Any) -> Any:
        for listener in tuple(_listeners):
            listener.saved_tensors_packed()
        return original(self)

    return enter


def _scale(original: Any) -> Any:
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if self.is_enabled() and isinstance(outputs, Tensor) and isinstance(scaled, Tensor):
            for listener in tuple(_listeners):
                listener.loss_scaled(self, outputs, scaled)
        return scaled

    return scale


def _unscale(original: Any) -> Any:
    def unscale_(self: GradScaler, optimizer: Optimizer) -> Any:
        result = original(self, optimizer)
        if self.is_enabled():
            for listener in tuple(_listeners):
                listener.after_unscale(self, optimizer)
        return result

    return unscale_


def _scaler_step(original: Any) -> Any:
    def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        for listener in tuple(_listeners):
            listener.before_scaler_step(self, optimizer)
        result = original(self, optimizer, *args, **kwargs)
        for listener in tuple(_listeners):
            listener.after_scaler_step(self, optimizer)
        return result

    return step


def _scaler_update(original: Any) -> Any:
    def update(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.is_enabled():
            given = bool(args) or kwargs.get("new_scale") is not None
            for listener in tuple(_listeners):
                listener.after_scaler_update(self, given)
        return result

    return update


def _zero_grad(original: Any) -> Any:
    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for listener in tuple(_listeners):
            listener.gradients_cleared()
        return result

    return zero_grad


def _clip(original: Any) -> Any:
    signature = inspect.signature(original)  # the limit is called max_norm or clip_value
    parameters, limit = list(signature.parameters)[:2]

    def clip(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # which says what is wrong with the call
        given.arguments[parameters] = tensors_of(given.arguments[parameters])  # a generator can be read only once
        for listener in tuple(_listeners):
            listener.before_clip(given.arguments[parameters], float(given.arguments[limit]))
        return original(*given.args, **given.kwargs)

    return clip


def _optimizer_before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # args holds the optimizer itself first; a closure runs forward and backward inside the step
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    for listener in tuple(_listeners):
        listener.before_optimizer_step(optimizer, closure is not None)


def _optimizer_after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in tuple(_listeners):
        listener.after_optimizer_step(optimizer)
