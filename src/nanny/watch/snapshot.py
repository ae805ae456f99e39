"""Leaves a model as it was: gradients, buffers, parameters, inputs, what its code can reach, and random state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .names import held_by
from .op_stream import Op
from .python_state import Reached
from .storages import key_of, whole_storage
from .tensors import answers_itself, gradient_of, has_storage, tensors_in


class KeptState:
    """Copies a protected tensor just before the first write into it, so that an untouched model costs no memory.

    `with watching(state):` shows it every write; carried twins tell it themselves (`before_write`).
    """

    on_trouble: Callable[[Exception], None] | None = None

    def __init__(self, model: nn.Module, inputs: Any = ()) -> None:
        self._model = model
        self._grads = [(p, gradient_of(p)) for p in model.parameters()]
        self._own = [(m, dict(m._parameters)) for m in model.modules()]
        self.reached = Reached([model, inputs])
        self._inputs = tensors_in(inputs)
        others = [t for t in self.reached.tensors if has_storage(t)]
        tensors = [t for t in (*model.parameters(), *model.buffers(), *self._inputs, *others) if t.layout == torch.strided]
        # what they are made of as well: `t.data = other` is no operation
        self._data = [(t, t if answers_itself(t) else t.detach()) for t in tensors if t.device.type != "meta"]
        self._protected = {key_of(data): (t, data) for t, data in self._data}
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
            whole = whole_storage(self._protected[key][1].detach())
            self._copies[key] = (whole, whole.clone())

    def changed_parameters(self) -> list[str]:
        """Trained parameters with another value than before: the forward pass is then no function of its input.

        Frozen ones (a teacher that follows) and embeddings with a `max_norm` are meant to change.
        """
        exempt = {id(m.weight) for m in self._model.modules() if held_by(m, "max_norm") is not None}
        written = [
            self._names[id(t)]
            for key, (t, _) in self._protected.items()
            if id(t) in self._names and id(t) not in exempt and t.requires_grad and self._has_changed(key)
        ]
        replaced = [
            name
            for module, content in self._own
            for name, parameter in content.items()
            if module._parameters.get(name) is not parameter
        ]
        return [*written, *replaced]

    def changed_inputs(self) -> bool:
        strided = [t for t in self._inputs if t.layout == torch.strided and t.device.type != "meta"]
        return any(self._has_changed(t.untyped_storage()._cdata) for t in strided)

    def is_untouched(self) -> bool:
        """No weight, buffer, input or other thing within reach has another value than before."""
        if not self.reached.is_untouched() or any(self._has_changed(key) for key in self._copies):
            return False
        return all(_memory_of(t) == _memory_of(data) for t, data in self._data)

    def _has_changed(self, key: int) -> bool:
        if key not in self._copies:
            return False
        whole, copy = self._copies[key]
        return not torch.equal(whole, copy)

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, data in self._data:
                if _memory_of(tensor) != _memory_of(data):
                    tensor.data = data
            for whole, copy in self._copies.values():
                whole.copy_(copy)
            for parameter, grad in self._grads:
                parameter.grad = grad
        self.reached.put_back()


def _memory_of(tensor: Tensor) -> Any:
    return key_of(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


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
