"""The calls of a model since the last backward pass: with what, under which settings, from which random numbers.

    calls = ModelCalls([model]).open()
    ...
    for call in calls.made: call.make_again()
    calls.close()

A class is wrapped, not the model, so that nothing is stored on what may be copied or saved; and only while somebody listens.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .names import unwrapped
from .tensors import being_traced, in_backward, outside_program, tensors_in

MOST_CALLS = 16  # since the last backward pass; of a loop that makes more, the first ones


class ModelCall:
    """One call of a model. It holds what was passed in, and so much as it lasts of what came out."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], has_modes: bool = False) -> None:
        self.module, self.args, self.kwargs, self.has_modes = module, args, kwargs, has_modes
        self.is_over = False
        self.outputs: list[weakref.ref[Tensor]] = []
        self.gradients: dict[int, Tensor] = {}  # by position of the output
        self._handles: list[Any] = []
        self._versions = [t._version for t in self.inputs if not t.is_inference()]
        self._random = torch.get_rng_state()
        self._random_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        self._grad = torch.is_grad_enabled()
        devices = {t.device.type for t in self.inputs} | {"cpu"}
        self._autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in devices
            if torch.amp.is_autocast_available(device)
        ]

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs))

    @property
    def is_intact(self) -> bool:
        """Nobody has written into the inputs since."""
        return self._versions == [t._version for t in self.inputs if not t.is_inference()]

    def make_again(self) -> Any:
        """The same call; the random state is set, and left where the call leaves it."""
        torch.set_rng_state(self._random)
        if self._random_cuda:
            torch.cuda.set_rng_state_all(self._random_cuda)
        with ExitStack() as settings:
            settings.enter_context(torch.set_grad_enabled(self._grad))
            for device, dtype, enabled in self._autocast:
                settings.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            return self.module(*self.args, **self.kwargs)

    def over(self, out: Any, keep_gradients: bool) -> None:
        """`keep_gradients`: what arrives at its outputs in backward, for who makes that again."""
        self.is_over = True
        outputs = tensors_in(out)
        self.outputs = [weakref.ref(t) for t in outputs]
        for i, output in enumerate(outputs if keep_gradients else ()):
            if output.requires_grad and not output.is_leaf:
                self._handles.append(output.register_hook(functools.partial(_keep, self.gradients, i)))

    def forget_gradients(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def gave(self, again: Any) -> bool | None:
        """Did it give the same bits? None: nobody has kept the first result."""
        before = [output() for output in self.outputs]
        pairs = [(b, a) for b, a in zip(before, tensors_in(again)) if b is not None]
        return all(torch.equal(_bits(b), _bits(a)) for b, a in pairs) if pairs else None


def _keep(kept: dict[int, Tensor], position: int, gradient: Tensor) -> None:
    if not torch.compiler.is_compiling():
        with outside_program():
            kept[position] = gradient.detach().clone()


def _bits(tensor: Tensor) -> Tensor:
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(sizes.get(tensor.element_size(), torch.int8))


class ModelCalls:
    """Hears the calls of these models that the thread makes which opened it."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.made: list[ModelCall] = []
        self.keeps_gradients = False
        self._models = {id(model): weakref.ref(model) for model in models}
        self._classes = {type(model) for model in models if not isinstance(model, torch.jit.ScriptModule)}
        self._thread = threading.get_ident()

    def open(self) -> ModelCalls:
        for kind in self._classes:
            _listen(kind, self)
        return self

    def are_of(self, models: Sequence[nn.Module]) -> bool:
        return len(models) == len(self._models) and all(self._knows(model) for model in models)

    def _knows(self, module: nn.Module) -> bool:
        known = self._models.get(id(module))
        return known is not None and known() is module

    def begin(self) -> None:
        """A step of this thread: what was called before is forgotten, but not the call within which it begins."""
        self._thread = threading.get_ident()
        self.made = [call for call in self.made if not call.is_over]

    def close(self) -> None:
        self.made.clear()
        for kind in self._classes:
            _leave(kind, self)

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall | None:
        if not self._knows(module) or threading.get_ident() != self._thread:
            return None
        modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
        if len(self.made) >= MOST_CALLS or in_backward() or being_traced() or not torch.is_grad_enabled():
            return None
        with torch._C.DisableTorchFunction():  # subclasses and modes of the program are not to notice
            call = ModelCall(unwrapped(module), args, kwargs, has_modes=modes > 0)
        self.made.append(call)
        return call


_listeners: dict[type, tuple[ModelCalls, ...]] = {}
_undo: dict[type, Callable[[], None]] = {}
_lock = threading.Lock()


def _listen(kind: type, one: ModelCalls) -> None:
    with _lock:
        if not _listeners.get(kind):
            _wrap(kind)
        _listeners[kind] = (*_listeners.get(kind, ()), one)


def _leave(kind: type, one: ModelCalls) -> None:
    with _lock:
        if one in _listeners.get(kind, ()):
            _listeners[kind] = tuple(other for other in _listeners[kind] if other is not one)
            if not _listeners[kind]:
                del _listeners[kind]
                _undo.pop(kind)()


def _wrap(kind: Any) -> None:
    own = vars(kind).get("__call__")

    def original(self: Any, *args: Any, **kwargs: Any) -> Any:  # of a class above, it is whatever stands there by then
        return super(kind, self).__call__(*args, **kwargs) if own is None else own(self, *args, **kwargs)

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a constant to the compiler, which then sees the model's own call
            return original(self, *args, **kwargs)
        heard = [(one, c) for one in _listeners.get(kind, ()) if (c := _heard(one, self, args, kwargs)) is not None]
        out = None
        try:
            out = original(self, *args, **kwargs)
        finally:
            for one, made in heard:
                with suppress(Exception):
                    made.over(out, one.keeps_gradients)
        return out

    def undo() -> None:
        if vars(kind).get("__call__") is call:  # else somebody has wrapped it after us, and ours is empty from now on
            if own is None:
                del kind.__call__
            else:
                kind.__call__ = own

    kind.__call__ = call
    _undo[kind] = undo


def _heard(one: ModelCalls, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall | None:
    try:
        return one.called(module, args, kwargs)
    except Exception:  # noqa: BLE001 - the program's call comes first
        return None
