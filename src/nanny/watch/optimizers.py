"""The optimizers that there are, and their steps inside compiled functions: torch calls no hook there, but weights are written.

A compiled function that moves the weights of an optimizer, with no step of it heard, has its update inside. The first time that
is known when it is over; from then on it is told before and after each of its calls, as torch's hooks tell of any other step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from numbers import Real
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from . import compiler
from .tensors import gradient_of

_MOST_CALLS = 64  # of a function that moves nothing, until it is left alone
_MOST_LOOKS = 8  # through all objects, for optimizers that are new
_MOST_WEIGHTS = 64  # of an optimizer


class _Function:
    """One that is compiled."""

    def __init__(self, function: Any) -> None:
        self.alive = weakref.ref(function)
        self.calls = 0
        self.updates = WeakIdKeyDictionary()  # optimizers


class CompiledUpdates:
    """`tell(event, optimizer, ...)` gets `before_optimizer_step` and `after_optimizer_step`, `optimizer_stepped` of the first."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._functions: dict[int, _Function] = {}
        self._optimizers = WeakIdKeyDictionary()  # a class of the program may have no hash, or one of its own
        self._looks = 0
        self._heard: set[int] = set()  # optimizers that torch's hooks told of since the call began
        self._backwards = self._decisions = 0
        self._before = (0, 0)  # that call
        self._stepped = WeakIdKeyDictionary()  # optimizer -> behind which backward pass
        self._told: list[Optimizer] = []  # that they step in the call that runs
        self._versions: list[tuple[Optimizer, list[int]]] = []  # as it began
        self._running: _Function | None = None
        self._thread = 0

    def open(self) -> None:
        compiler.watch_calls(self)

    def close(self) -> None:
        compiler.leave_calls(self)
        self._functions.clear()
        self._running, self._told, self._versions = None, [], []

    def heard_backward(self) -> None:
        self._backwards += 1

    def heard_scaler(self) -> None:
        """It decides whether there is an update."""
        self._decisions += 1

    def heard_step(self, optimizer: Optimizer) -> None:
        self._heard.add(id(optimizer))
        self._stepped[optimizer] = self._backwards

    # of the outermost compiled calls

    def before_call(self, function: Any) -> None:
        if self._running is not None or not self._backwards or isinstance(getattr(function, "__self__", None), nn.Module):
            return
        known = self._functions.get(id(function))
        if known is None or known.alive() is not function:
            try:
                known = self._functions[id(function)] = _Function(function)
            except TypeError:  # nothing can refer to it weakly
                return
            self._look_for_optimizers()
        ready = [one for one in self._optimizers if self._is_ready(one)] if known.calls < _MOST_CALLS else []
        if not ready:
            return
        self._running, self._thread, self._before = known, get_ident(), (self._backwards, self._decisions)
        self._heard.clear()
        self._versions = [(one, _versions(one)) for one in ready]
        self._told = [one for one in ready if one in known.updates]
        for one in self._told:
            self._tell("before_optimizer_step", one, False)

    def after_call(self) -> None:
        known = self._running
        if known is None or self._thread != get_ident():
            return
        told, versions = self._told, self._versions
        self._running, self._told, self._versions = None, [], []
        known.calls += 1
        for one, before in versions:
            was_told = any(one is other for other in told)
            has_moved = _versions(one) != before
            if has_moved:
                known.calls = 0
            if id(one) in self._heard:  # it was not compiled after all
                known.updates.pop(one, None)
            elif has_moved:
                self._tell("after_optimizer_step" if was_told else "optimizer_stepped", one)
                self._stepped[one] = self._backwards
                if self._before == (
                    self._backwards,
                    self._decisions,
                ):  # else it was not clear before the call that there would be an update
                    known.updates[one] = True
            elif was_told:  # it depends
                known.updates.pop(one, None)

    def _is_ready(self, optimizer: Optimizer) -> bool:
        """Who has stepped behind the last backward pass is done: what is written into its weights now is no update of its own."""
        done = self._stepped.get(optimizer) == self._backwards
        return not done and any(gradient_of(p) is not None for p in _some_of(optimizer))

    def _look_for_optimizers(self) -> None:
        if self._looks < _MOST_LOOKS:
            self._looks += 1
            for one in optimizers_alive():
                self._optimizers[one] = True


def modules_and_optimizers() -> list[Any]:
    """All that there are; their types are asked, never they themselves. It takes a while: call it seldom."""
    # half a million objects, half the time of issubclass
    kinds = {id(kind) for known in (nn.Module, Optimizer) for kind in with_subclasses(known)}
    return [one for one in gc.get_objects() if id(type(one)) in kinds]


def optimizers_alive() -> list[Optimizer]:
    return [one for one in modules_and_optimizers() if isinstance(one, Optimizer) and hasattr(one, "param_groups")]


def with_subclasses(kind: type) -> list[type]:
    """Each once, by identity: a class may have an equality of its own."""
    found, waiting = {id(kind): kind}, [kind]
    while waiting:
        below: list[type] = type.__subclasses__(waiting.pop())
        new = {id(one): one for one in below if id(one) not in found}
        found |= new
        waiting += new.values()
    return list(found.values())


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def states_of(optimizer: Optimizer) -> dict[Tensor, Any]:
    """As torch keeps them: a class of the program's may compute something when it is asked itself."""
    return vars(optimizer).get("state") or {}


def lr_of(group: Mapping[str, Any]) -> float:
    """NaN where it is no number: on a device, or chosen by the optimizer itself."""
    lr = group.get("lr", 0.0)
    return float(lr) if isinstance(lr, Real) or (isinstance(lr, Tensor) and lr.device.type == "cpu") else float("nan")


def _some_of(optimizer: Optimizer) -> list[Tensor]:
    found = [p for p in parameters_of(optimizer) if p.requires_grad and not p.is_inference()]
    return found[:: len(found) // _MOST_WEIGHTS + 1]


def _versions(optimizer: Optimizer) -> list[int]:
    """What is written into a tensor counts up."""
    return [p._version for p in _some_of(optimizer)]
