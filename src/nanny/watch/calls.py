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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import _disable_current_modes

from .names import is_compiled, unwrap
from .op_stream import has_other_modes
from .tensors import answers_itself, being_traced, bits_of, has_storage, in_backward, map_leaves, tensors_in

MOST_CALLS = 16  # since the last backward pass; of a loop that makes more, the first ones
MOST_EVALUATED = 64  # calls in evaluation mode whose parts are looked at
DEPEND_ON_MODE = (_NormBase, _DropoutNd)
MOST_ELEMENTS = 1 << 22  # of the gradient of an output that is kept until the optimizer has run
FEW_ELEMENTS = 1 << 16  # of an output whose numbers are kept until then, whether the program keeps it or not
T = TypeVar("T")
_IS_CPU: Any = Tensor.is_cpu.__get__  # type: ignore[attr-defined]


class _Lent(weakref.ref[Any]):
    """Memory of others, which they may want to have back."""


def _hold(value: Any) -> Any:
    """What was passed in, so that the program's own tensor ends when the program lets it go."""
    if type(value) is Tensor and not value.requires_grad and value.layout is torch.strided and not value.is_quantized:
        return value.detach() if value.is_meta or value.untyped_storage().resizable() else _Lent(value)
    return _Lent(value) if isinstance(value, np.ndarray) else value


def _with_held(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return map_leaves(args, _hold), map_leaves(kwargs, _hold) if kwargs else kwargs


def _copies_of(tensors: Sequence[Tensor]) -> list[tuple[Tensor | None, int]]:
    return [(t.detach() if _is_small(t) else None, t._version) for t in tensors]


def _is_small(tensor: Tensor) -> bool:
    """And dense: of others torch makes no second without a warning, or another kernel."""
    return tensor.layout is torch.strided and not answers_itself(tensor) and tensor.numel() <= FEW_ELEMENTS


def _outside_modes(work: Callable[..., T], *args: Any) -> T:
    """What is made here is not the program's."""
    if not torch._C._len_torch_dispatch_stack():
        return work(*args)
    with _disable_current_modes():
        return work(*args)


def _still_there(value: Any) -> Any:
    return value() if type(value) is _Lent else value


class ModelCall:
    """One call of a model. It holds what was passed in, and so much as it lasts of what came out."""

    __slots__ = (
        "__weakref__", "_args", "_autocast", "_called", "_catches", "_catching", "_grad", "_kwargs", "_numbers", "_passed",
        "_random", "_random_cuda", "_versions", "gradients", "has_modes", "is_over", "nodes", "outputs",
    )  # fmt: skip

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], has_modes: bool = False, catches: bool = False
    ) -> None:
        self._args, self._kwargs = _outside_modes(_with_held, args, kwargs)
        self._called, self.has_modes = module, has_modes
        self._catches = catches
        self.is_over = False
        self.outputs: list[weakref.ref[Tensor]] = []
        self.nodes: list[int] = []  # of the graph, by which an output is known when it is gone
        self._numbers: list[tuple[Tensor | None, int]] = []  # of the outputs that are small, and the version they had
        self._catching: list[Any] = []
        self.gradients: dict[int, Tensor] = {}  # of the outputs by their position, once backward has passed
        inputs = tensors_in((args, kwargs) if kwargs else args)
        self._passed = list(map(weakref.ref, inputs))
        self._versions = _versions(inputs)  # one number for a tensor and what is held of it
        self._random = torch.default_generator.get_state()
        self._random_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._grad = torch.is_grad_enabled()
        self._autocast = [("cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"))]
        if not all(map(_IS_CPU, inputs)):
            others = {t.device.type for t in inputs} - {"cpu"}
            self._autocast += [
                (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
                for device in others
                if torch.amp.is_autocast_available(device)
            ]

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(map_leaves(self._args, _still_there))

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(map_leaves(self._kwargs, _still_there))

    @property
    def module(self) -> nn.Module:
        return unwrap(self._called)

    @property
    def of_compiled(self) -> bool:
        """The model, or a part of it, was compiled."""
        return is_compiled(self._called) or any(map(is_compiled, self.module.modules()))

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs))

    @property
    def passed(self) -> list[Tensor]:
        """The program's own tensors, where it still has them."""
        return [own if (own := ref()) is not None else held for ref, held in zip(self._passed, self.inputs)]

    def is_alike(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Another call, with inputs of the same shapes, under the same setting."""
        alike = [t.shape for t in tensors_in((args, kwargs))] == [t.shape for t in self.inputs]
        return alike and torch.is_grad_enabled() == self._grad

    def has_unwritten(self, tensor: Tensor) -> bool:
        """Did it go in, and has nobody written into it since?"""
        return self.is_intact and any(one is tensor for one in self.passed)

    @property
    def is_intact(self) -> bool:
        """The inputs are still there, and nobody has written into them since."""
        return self._versions == _versions(self.inputs)

    def position_of(self, tensor: Tensor) -> int | None:
        """Which of its outputs this is, if nobody has written into it since."""
        for i, (ref, (_, version)) in enumerate(zip(self.outputs, self._numbers)):
            output = ref()
            if output is tensor or (output is not None and _are_one(output, tensor)):
                return i if tensor._version == version else None
        return None

    def make_again(self, args: Any = None, kwargs: Any = None) -> Any:
        """The same call, or one with other inputs; the random state is set, and left where the call leaves it."""
        torch.set_rng_state(self._random)
        if self._random_cuda:
            torch.cuda.set_rng_state_all(self._random_cuda)
        with ExitStack() as settings:
            settings.enter_context(torch.set_grad_enabled(self._grad))
            for device, dtype, enabled in self._autocast:
                settings.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            return self._callee(*(self.args if args is None else args), **(self.kwargs if kwargs is None else kwargs))

    @property
    def _callee(self) -> Callable[..., Any]:
        return self.module

    def note_results(self, out: Any) -> None:
        """What it gave is known, and the gradients that it will get are caught when backward comes by, if anybody wants them."""
        self.is_over = True
        found = tensors_in(out)
        if not any(map(Tensor.is_inference, found)):
            self._numbers = _outside_modes(_copies_of, found)
        mine = weakref.ref(self)  # a graph may outlive the step
        for i, tensor in enumerate(found):
            node = tensor.grad_fn
            self.outputs.append(weakref.ref(tensor))
            self.nodes.append(node._sequence_nr() if node is not None else -1)
            if self._catches and node is not None and tensor.numel() <= MOST_ELEMENTS:
                self._catching.append(node.register_prehook(functools.partial(_catch, mine, i, tensor.output_nr)))

    def catch(self, position: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.gradients.setdefault(position, gradient.detach() if gradient.requires_grad else gradient)

    def let_gradients_pass(self) -> None:
        """Nothing is caught, and no hook of ours is in the graph."""
        while self._catching:
            self._catching.pop().remove()

    def results(self) -> list[Tensor | None]:
        """What it gave, as far as it is still there, may be asked, and nobody has written into it."""
        kept = [
            (numbers if numbers is not None else ref(), version) for ref, (numbers, version) in zip(self.outputs, self._numbers)
        ]
        return [t if t is not None and t._version == version and not answers_itself(t) else None for t, version in kept]

    def gave_same_bits(self, again: Any) -> bool | None:
        """Did it give the same bits? None: nobody has kept the first result."""
        pairs = [(b, a) for b, a in zip(self.results(), tensors_in(again)) if b is not None]
        return all(same_bits(b, a) for b, a in pairs) if pairs else None


class LineCall(ModelCall):
    """A line of the loop that is put into a module to be made again; who listens to modules does not hear of it."""

    __slots__ = ()

    @property
    def _callee(self) -> Callable[..., Any]:
        return self.module.forward


def _catch(call: weakref.ref[ModelCall], position: int, slot: int, gradients: Sequence[Tensor | None]) -> None:
    made = call()
    try:
        if made is not None:
            made.catch(position, gradients[slot] if slot < len(gradients) else None)
    except Exception:  # noqa: BLE001 - torch calls it in the middle of backward
        return


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [t._version for t in tensors if not t.is_inference()]


def _are_one(one: Tensor, other: Tensor) -> bool:
    """Detached or not."""
    if not (has_storage(one) and has_storage(other) and one.shape == other.shape and one.dtype == other.dtype):
        return False
    return one.numel() > 0 and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits_of(one), bits_of(other))


def inner_modules(models: Sequence[nn.Module]) -> list[nn.Module]:
    """What is called where a model is only the place that holds its parts; lists and dictionaries of modules cannot be called."""
    out: dict[int, nn.Module] = {}
    for model in models:
        for part in model.children():
            if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
                out.update((id(inner), inner) for inner in inner_modules([part]))
            else:
                out[id(part)] = part
    return list(out.values())


class ModelCalls:
    """Hears the calls of these models that the thread makes which opened it."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.made: list[ModelCall] = []
        self.catches = False  # gradients of the outputs
        self.in_train_mode = 0  # calls without gradients of a model in train mode
        self.heard = False  # any call at all
        self._evaluated = 0  # calls in evaluation mode that were looked at
        self._models = {id(model): weakref.ref(model) for model in models}
        self._classes = {type(model) for model in models if not isinstance(model, torch.jit.ScriptModule)}
        self._thread = get_ident()

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
        self._thread = get_ident()
        self.made = [call for call in self.made if not call.is_over]
        self.heard = bool(self.made)

    def close(self) -> None:
        self.made.clear()
        for kind in self._classes:
            _leave(kind, self)

    def _part_trains(self, module: nn.Module) -> bool:
        """A part that does not follow its model into evaluation; single layers are put in train mode on purpose (MC dropout)."""
        self._evaluated += 1
        if self._evaluated > MOST_EVALUATED:
            return False
        return any(
            part.training and part._modules and any(isinstance(one, DEPEND_ON_MODE) and one.training for one in part.modules())
            for part in module.modules()
        )

    def note_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall | None:
        if not self._knows(module) or get_ident() != self._thread:
            return None
        self.heard = True
        if in_backward():
            return None
        has_graph = torch.is_grad_enabled()
        if not has_graph:
            self.in_train_mode += module.training or self._part_trains(module)
        if self.made and not self.made[-1].is_over:
            return None  # a part of what is being called
        if not has_graph or len(self.made) >= MOST_CALLS or being_traced():
            return None
        has_modes = has_other_modes()
        with torch._C.DisableTorchFunction():  # subclasses and modes of the program are not to notice
            call = ModelCall(module, args, kwargs, has_modes, self.catches)
        self.made.append(call)
        return call


_answers: dict[tuple[int, int], tuple[ModelCall, Any]] = {}  # by thread and model
_listeners: dict[type, tuple[ModelCalls, ...]] = {}
_undo: dict[type, Callable[[], None]] = {}
_lock = threading.Lock()


@contextmanager
def answered(known: Sequence[tuple[ModelCall, Any]]) -> Iterator[None]:
    """Where this thread calls a model again in the same way, that is not done: what the call has given is given."""
    keys = [(get_ident(), id(call._called)) for call, _ in known]
    _answers.update(zip(keys, known))
    try:
        yield
    finally:
        for key in keys:
            del _answers[key]


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
    bind = getattr(type(own), "__get__", None)  # a function, or whatever else gives one when it is read

    def original(self: Any) -> Any:  # not called in there: a model that calls itself needs two frames of each call as it is
        if own is None:
            return super(kind, self).__call__  # of a class above, it is whatever stands there by then
        return bind(own, self, kind) if bind is not None else own

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a constant to the compiler, which then sees the model's own call
            return original(self)(*args, **kwargs)
        if _answers and (answer := _answers.get((get_ident(), id(self)))) is not None and answer[0].is_alike(args, kwargs):
            return answer[1]
        heard = [c for one in _listeners.get(kind, ()) if (c := _hear(one, self, args, kwargs)) is not None]
        out = None
        try:
            out = original(self)(*args, **kwargs)
        finally:
            for made in heard:
                _is_over(made, out)
        return out

    def undo() -> None:
        if vars(kind).get("__call__") is call:  # else somebody has wrapped it after us, and ours is empty from now on
            if own is None:
                del kind.__call__
            else:
                kind.__call__ = own

    kind.__call__ = call
    _undo[kind] = undo


def _is_over(made: ModelCall, out: Any) -> None:
    try:
        with torch._C.DisableTorchFunction():
            made.note_results(out)
    except Exception:  # noqa: BLE001 - the program's call comes first
        return


def _hear(one: ModelCalls, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall | None:
    try:
        return one.note_call(module, args, kwargs)
    except Exception:  # noqa: BLE001 - the program's call comes first
        return None
