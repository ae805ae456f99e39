"""Leaves a model as it was: gradients, buffers, parameters, inputs, plain attributes and random state, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .op_stream import Op
from .storages import whole_storage
from .tensors import gradient_of, tensors_in

_PLAIN = (list, dict, set)


class KeptState:
    """Copies a protected tensor just before the first write into it, so that an untouched model costs no memory.

    `with watching(state):` shows it every write; carried twins tell it themselves (`before_write`).
    """

    on_trouble: Callable[[Exception], None] | None = None

    def __init__(self, model: nn.Module, inputs: Any = ()) -> None:
        self._model = model
        self._grads = [(p, gradient_of(p)) for p in model.parameters()]
        self._attributes = [(m, dict(vars(m)), _plain_contents(m)) for m in model.modules()]
        self._inputs = tensors_in(inputs)
        tensors = [t for t in (*model.parameters(), *model.buffers(), *self._inputs) if t.layout == torch.strided]
        self._protected = {t.untyped_storage()._cdata: t for t in tensors if t.device.type != "meta"}
        generators = [v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Generator)]
        self._generators = [(g, g.get_state()) for g in generators]
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._names = {id(p): name for name, p in model.named_parameters()}

    def before(self, op: Op) -> None:
        for tensor in op.written:
            self.before_write(tensor)

    passed_by = before

    def after(self, op: Op, state: Any) -> None:
        pass

    def before_write(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            return  # gradients of sparse embeddings; weights and inputs have strides
        key = tensor.untyped_storage()._cdata
        if key in self._protected and key not in self._copies:
            whole = whole_storage(self._protected[key].detach())
            self._copies[key] = (whole, whole.clone())

    def changed_parameters(self) -> list[str]:
        """Trained parameters with another value than before: the forward pass is then no function of its input.

        Frozen ones (a teacher that follows) and embeddings with a `max_norm` are meant to change.
        """
        exempt = {id(m.weight) for m in self._model.modules() if getattr(m, "max_norm", None) is not None}
        written = [
            self._names[id(t)]
            for key, t in self._protected.items()
            if id(t) in self._names and id(t) not in exempt and t.requires_grad and self._has_changed(key)
        ]
        replaced = [
            name
            for module, _, contents in self._attributes
            for value, content in contents
            if value is module._parameters
            for name, parameter in content.items()
            if value.get(name) is not parameter
        ]
        return [*written, *replaced]

    def changed_inputs(self) -> bool:
        strided = [t for t in self._inputs if t.layout == torch.strided and t.device.type != "meta"]
        return any(self._has_changed(t.untyped_storage()._cdata) for t in strided)

    def is_untouched(self) -> bool:
        """No weight, buffer, input or plain attribute has another value than before."""
        if any(self._has_changed(key) for key in self._copies):
            return False
        return all(
            vars(module).keys() == attributes.keys()
            and all(vars(module)[name] is value for name, value in attributes.items())
            and all(_holds(value, content) for value, content in contents)
            for module, attributes, contents in self._attributes
        )

    def _has_changed(self, key: int) -> bool:
        if key not in self._copies:
            return False
        whole, copy = self._copies[key]
        return not torch.equal(whole, copy)

    def put_back(self) -> None:
        with torch.no_grad():
            for whole, copy in self._copies.values():
                whole.copy_(copy)
            for parameter, grad in self._grads:
                parameter.grad = grad
        for generator, stand in self._generators:
            generator.set_state(stand)
        for module, attributes, contents in self._attributes:
            _restore(vars(module), attributes)
            for value, content in contents:
                _refill(value, content)


def _plain_contents(module: nn.Module) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in vars(module).values() if isinstance(value, _PLAIN)]


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, value in before.items():
        if now.get(name, _PLAIN) is not value:
            now[name] = value


def _holds(value: Any, content: Any) -> bool:
    """Still the same things."""
    if isinstance(value, list):
        return len(value) == len(content) and all(a is b for a, b in zip(value, content))
    if isinstance(value, dict):
        return list(value) == list(content) and all(value[k] is content[k] for k in content)
    return bool(value == content)


def _refill(value: Any, content: Any) -> None:
    if _holds(value, content):
        return
    if isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        value.update(content)


@contextmanager
def kept_randomness() -> Iterator[None]:
    """The random streams of torch, of Python and of numpy stand afterwards where they stood before: every run draws the same."""
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


@contextmanager
def kept_state(model: nn.Module, inputs: Any = ()) -> Iterator[KeptState]:
    state = KeptState(model, inputs)
    try:
        with kept_randomness():
            for parameter in model.parameters():
                parameter.grad = None
            yield state
    finally:
        state.put_back()
