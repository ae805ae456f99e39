"""What happens in a training step, as events: backward, scaling, unscaling, clipping, optimizer steps.

The few functions through which every PyTorch training loop must go are wrapped once per process, while somebody listens, and put
back when the last listener leaves or is collected. Nothing is stored on the user's model, optimizer or scaler, so saving and
copying them is not affected. Classes are wrapped rather than instances: a scaler or optimizer needs not be passed in, and may be
made later.

Other threads may be in the middle of any of these functions. So whatever torch looks up is replaced in one assignment, never
changed in place, and a listener may say whose thread it belongs to.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .compiler import skip_frames
from .optimizers import CompiledUpdates
from .tensors import in_backward


class Listener(Protocol):
    """Gets the events of its thread, or of all; each method must return quickly. What it raises, `failed` is given."""

    def saved_tensors_packed(self) -> None: ...
    def before_backward(self, roots: tuple[Tensor, ...]) -> None: ...
    def before_derivative(self, root: Tensor, inputs: tuple[Tensor, ...]) -> None:
        """`torch.autograd.grad` of one tensor, whose graph is not needed any more."""

    def loss_scaled(self, scaler: GradScaler, loss: Tensor, scaled: Tensor) -> None: ...
    def after_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None: ...
    def before_clip(self, parameters: Any, max_norm: Any) -> None: ...
    def before_scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> None: ...
    def after_scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> None: ...
    def after_scaler_update(self, scaler: GradScaler, given: bool) -> None: ...
    def before_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None: ...
    def after_closure(self, optimizer: Optimizer) -> None:
        """Forward and backward ran inside the optimizer's step; what it does with the gradients comes now."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """It has, in a compiled function that is met for the first time; nothing was told before it."""

    def gradients_cleared(self, optimizer: Optimizer) -> None: ...
    def before_model_cleared(self, model: torch.nn.Module) -> None: ...
    def autocast_entered(self) -> None: ...
    def batch_drawn(self, iterator: Any, batch: Any) -> None: ...
    def failed(self, error: Exception) -> None: ...
    def forked(self) -> None:
        """This is a child process now, which inherited the listener."""


_listeners: tuple[tuple[weakref.ref[Any], int | None], ...] = ()  # and the thread of each, None: all of them
_undo: list[Callable[[], None]] = []
_originals: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by our wrappers
_changes = threading.RLock()  # a listener may be collected at any moment, also in here
_changing = False


class PartListener:
    """A listener that hears only the events for which it has a method."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _ignore


def _ignore(*_: Any, **__: Any) -> None:
    return None


def listen(listener: Listener, thread: int | None = None) -> None:
    """To the events of one thread (`threading.get_ident()`), or of all. Asked again, the newest thread counts.

    A listener is not kept alive. What happens inside backward to an optimizer or to parameters is told to all: autograd has
    threads of its own.
    """
    _change(listener, (weakref.ref(listener, _collected), thread))


def leave(listener: Listener) -> None:
    """Idempotent."""
    _change(listener)


def is_heard(listener: Listener) -> bool:
    return any(reference() is listener for reference, _ in _listeners)


def _collected(_: Any) -> None:
    _change()


def _change(listener: Any = None, entry: tuple[weakref.ref[Any], int | None] | None = None) -> None:
    global _listeners, _changing
    with _changes:
        entries = [entry if one[0]() is listener else one for one in _listeners if one[0]() is not None]
        if entry is not None and entry not in entries:
            entries.append(entry)
        _listeners = tuple(one for one in entries if one is not None)
        if _changing:  # collected while the functions are being replaced: the loop below is not over yet
            return
        _changing = True
        try:
            while bool(_undo) != any(reference() is not None for reference, _ in _listeners):
                if _undo:
                    _uninstall()
                else:
                    _install()
        finally:
            _changing = False


def _in_child() -> None:
    """A forked process has one thread and no training of ours."""
    global _changes, _listeners
    _changes = threading.RLock()
    inherited, _listeners = _listeners, ()
    for reference, _ in inherited:
        listener = reference()
        if listener is not None:
            listener.forked()
    _change()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _install() -> None:
    made: dict[Any, Any] = {}  # a function that torch has in two places is one function to those who compare or pickle it
    try:
        for owner, name, make in _wrappers():
            _replace(owner, name, make, made)
        for name, hook in _optimizer_hooks():
            _add_hook(name, hook)
        _compiled.open()
        _undo.append(_compiled.close)
    except BaseException:
        _uninstall()
        raise


def _uninstall() -> None:
    while _undo:
        with suppress(Exception):  # the others are put back all the same
            _undo.pop()()


def _replace(owner: Any, name: str, make: Callable[[Any], Any], made: dict[Any, Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:  # private names may go in a later torch; the events they give are then missing, nothing breaks
        return
    wrapped = made.get(original)
    if wrapped is None:
        wrapped = made[original] = functools.wraps(original)(make(original))
    _originals[wrapped] = original
    _undo.append(functools.partial(_put_back, owner, name))
    setattr(owner, name, wrapped)


def _put_back(owner: Any, name: str) -> None:
    now = found = getattr(owner, name)
    while now in _originals:  # ours, or an older one that the program has kept and put back
        now = _originals[now]
    if now is not found:  # else somebody has wrapped it after us; leave theirs alone
        setattr(owner, name, now)


def _put_all_back() -> None:
    """A program may read one of our wrappers, and set it again when nobody listens any more: the first call ends that."""
    with _changes:
        for owner, name, _ in () if _undo else _wrappers():
            if hasattr(owner, name):
                _put_back(owner, name)


def _add_hook(name: str, hook: Any) -> None:
    """Beside torch's own dictionary of hooks, which another thread may be going through: adding to it would end that thread."""
    shown = _views.get(name)
    if shown is None:
        shown = _views[name] = _view_of(getattr(optimizer_module, name), hook)
    hooks = shown.hooks

    def restore() -> None:
        if getattr(optimizer_module, name) is shown:
            setattr(optimizer_module, name, hooks)

    if getattr(optimizer_module, name) is hooks:
        _undo.append(restore)
        setattr(optimizer_module, name, shown)


# A handle of a hook that was added while a view stood in knows only the view (weakly), so views are kept for good.
_views: dict[str, Any] = {}


def _view_of(hooks: MutableMapping[int, Any], ours: Any) -> Any:
    class View(MutableMapping[int, Any]):
        """Torch's hooks and ours behind them. Gone through, it is a copy."""

        def __init__(self) -> None:
            self.hooks = hooks

        def values(self) -> Any:
            return list(hooks.values()) if torch.compiler.is_compiling() else [*hooks.values(), ours]

        def items(self) -> Any:
            return list(hooks.items())

        def __iter__(self) -> Iterator[int]:
            return iter(list(hooks))

        def __len__(self) -> int:
            return len(hooks)

        def __getitem__(self, key: int) -> Any:
            return hooks[key]

        def __setitem__(self, key: int, value: Any) -> None:
            hooks[key] = value

        def __delitem__(self, key: int) -> None:
            del hooks[key]

    return View()


def _teller(anywhere: bool) -> Callable[..., None]:
    """`anywhere`: what happens is said of an optimizer or parameters, so it counts in autograd's own threads too."""

    def tell(name: str, *about: Any) -> None:
        here = get_ident()
        for reference, thread in _listeners:
            listener = reference()
            if listener is None:
                continue
            try:
                if thread is None or thread == here or (anywhere and in_backward()):
                    getattr(listener, name)(*about)
            except Exception as error:  # noqa: BLE001 - the listener's, not the program's
                listener.failed(error)

    return tell


_tell, _tell_all = _teller(anywhere=False), _teller(anywhere=True)
_compiled = CompiledUpdates(_tell_all)


def _tell_compiled(name: str, *about: Any) -> None:
    with suppress(Exception):  # we are in the middle of the program's own call
        getattr(_compiled, name)(*about)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _notify(callback: Any, *about: Any) -> None:
    callback(*about)


def _around(before: Any = None, after: Any = None) -> Callable[[Any], Any]:
    """Makes a wrapper that takes whatever comes and hands it on as it came."""

    def make(original: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            if not _undo:
                _notify(_put_all_back)
            if before is not None:
                _notify(before, args, kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                _notify(after, result, args, kwargs)
            return result

        skip_frames(wrapped.__code__)
        return wrapped

    return make


def _before_backward(args: Any, kwargs: Any) -> None:
    _tell_compiled("heard_backward")
    tensors = _argument(args, kwargs, 0, "tensors")
    roots = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
    _tell("before_backward", tuple(t for t in roots if isinstance(t, Tensor)))


def _before_derivative(args: Any, kwargs: Any) -> None:
    roots, inputs = (
        tuple(found) if isinstance(found := _argument(args, kwargs, at, name), (list, tuple)) else (found,)
        for at, name in enumerate(("outputs", "inputs"))
    )
    is_last = not (_argument(args, kwargs, 3, "retain_graph") or _argument(args, kwargs, 4, "create_graph"))
    if len(roots) == 1 and isinstance(roots[0], Tensor) and is_last:
        _tell("before_derivative", roots[0], tuple(t for t in inputs if isinstance(t, Tensor)))


def _after_scale(scaled: Any, args: Any, kwargs: Any) -> None:
    scaler, loss = _argument(args, kwargs, 0, "self"), _argument(args, kwargs, 1, "outputs")
    if scaler.is_enabled() and isinstance(loss, Tensor) and isinstance(scaled, Tensor):
        _tell("loss_scaled", scaler, loss, scaled)


def _of_scaler(event: str) -> Callable[[Any, Any], None]:
    def tell_event(args: Any, kwargs: Any) -> None:
        scaler, optimizer = _argument(args, kwargs, 0, "self"), _argument(args, kwargs, 1, "optimizer")
        if isinstance(scaler, GradScaler) and isinstance(optimizer, Optimizer) and scaler.is_enabled():
            _tell_compiled("heard_scaler")
            _tell_all(event, scaler, optimizer)

    return tell_event


def _later(tell_event: Callable[[Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    return lambda result, args, kwargs: tell_event(args, kwargs)


def _after_update(_: Any, args: Any, kwargs: Any) -> None:
    scaler = _argument(args, kwargs, 0, "self")
    if scaler.is_enabled():
        _tell("after_scaler_update", scaler, _argument(args, kwargs, 1, "new_scale") is not None)


def _clip(limit: str) -> Callable[[Any], Any]:
    def before_clip(args: Any, kwargs: Any) -> None:
        parameters, most = _argument(args, kwargs, 0, "parameters"), _argument(args, kwargs, 1, limit)
        if parameters is not None and most is not None:
            _tell_all("before_clip", parameters, most)

    def make(original: Any) -> Any:
        clip = _around(before_clip)(original)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Iterator):  # it can be read only once
                args = (list(args[0]), *args[1:])
            elif isinstance(kwargs.get("parameters"), Iterator):
                kwargs["parameters"] = list(kwargs["parameters"])
            return clip(*args, **kwargs)

        return wrapped

    return make


def _of_self(tell: Callable[..., None], event: str) -> Callable[[Any, Any], None]:
    return lambda args, kwargs: tell(event, _argument(args, kwargs, 0, "self"))


def _after_batch(batch: Any, args: Any, kwargs: Any) -> None:
    _tell("batch_drawn", _argument(args, kwargs, 0, "self"), batch)


def _wrappers() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Owner, name and wrapper of each function."""
    skip_frames(_notify.__code__, and_what_it_calls=True)
    return [
        (torch.autograd, "backward", _around(_before_backward)),
        (torch.autograd, "grad", _around(_before_derivative)),
        (GradScaler, "scale", _around(after=_after_scale)),
        (GradScaler, "unscale_", _around(after=_later(_of_scaler("after_unscale")))),
        (GradScaler, "step", _around(_of_scaler("before_scaler_step"), _later(_of_scaler("after_scaler_step")))),
        (GradScaler, "update", _around(after=_after_update)),
        # clip_grad_norm_ looks this one up when called, so code that imported it earlier is seen too
        (clip_grad, "_clip_grads_with_norm_", _clip("max_norm")),
        *((owner, "clip_grads_with_norm_", _clip("max_norm")) for owner in (torch.nn.utils, clip_grad)),
        *((owner, "clip_grad_value_", _clip("clip_value")) for owner in (torch.nn.utils, clip_grad)),
        (saved_tensors_hooks, "__enter__", _around(lambda args, kwargs: _tell("saved_tensors_packed"))),
        (Optimizer, "zero_grad", _around(after=_later(_of_self(_tell_all, "gradients_cleared")))),
        (torch.nn.Module, "zero_grad", _around(_of_self(_tell_all, "before_model_cleared"))),
        (torch, "autocast_increment_nesting", _around(after=lambda *_: _tell("autocast_entered"))),
        (_BaseDataLoaderIter, "__next__", _around(after=_after_batch)),
    ]


def _optimizer_hooks() -> list[tuple[str, Any]]:
    """The name of torch's dictionary, and our hook in it."""

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # args holds the optimizer itself first; a closure runs forward and backward inside the step
        _tell_compiled("heard_step", optimizer)
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        _tell_all("before_optimizer_step", optimizer, closure is not None)
        if not callable(closure):
            return None

        @functools.wraps(closure)
        def closure_told(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            _tell_all("after_closure", optimizer)
            return result

        return (
            (args, {**kwargs, "closure": closure_told}) if kwargs.get("closure") else ((args[0], closure_told, *args[2:]), kwargs)
        )

    def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _tell_all("after_optimizer_step", optimizer)

    return [("_global_optimizer_pre_hooks", before_step), ("_global_optimizer_post_hooks", after_step)]


def tensors_of(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
