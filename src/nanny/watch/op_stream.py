"""Every operation of a program, once: the only dispatch mode of the package, and those who look share it.

    with watching(consumer):       # consumer.before(op), then the program's own operation, then consumer.after(op, state)
        loss = model(x).sum()
        loss.backward()

The program's result always stands. What a consumer raises ends that consumer and nobody else: it is told once through its
`on_trouble` (None: strict, it is raised). A consumer that means to end the program raises `Stopped`. The stream belongs to the
thread that opened it (autograd's own threads for that thread included). It lies below jit.trace and vmap, which see nothing of it
and hand it plain tensors; at tensors of a class that runs its parts itself (DTensor, FakeTensor) it does not look.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..core.finding import NannyError
from .op_facts import written_by
from .storages import key_of
from .tensors import has_storage, tensors_in

_NOT_YET: Any = object()
_frames = torch._C._dynamo.eval_frame
_can_skip_frames = hasattr(_frames, "set_code_exec_strategy")  # private; tests/watch/test_op_stream.py fails if it goes


class Stopped(NannyError):
    """A consumer ends the program, because it was asked to."""


class Op:
    """One operation of the program. What costs something is found out when it is first asked for, and once for all."""

    __slots__ = ("_inputs", "_is_view", "_written", "args", "func", "kwargs", "out")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.func = func  # OpOverload
        self.args = args
        self.kwargs = kwargs
        self.out: Any = None  # until it has run
        self._inputs = self._written = self._is_view = _NOT_YET

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)

    @property
    def inputs(self) -> list[Tensor]:
        if self._inputs is _NOT_YET:
            self._inputs = tensors_in((self.args, self.kwargs) if self.kwargs else self.args)
        found: list[Tensor] = self._inputs
        return found

    @property
    def written(self) -> list[Tensor]:
        """The program's own tensors that it writes into."""
        if self._written is _NOT_YET:
            self._written = written_by(self.func, self.args, self.kwargs)
        found: list[Tensor] = self._written
        return found

    @property
    def is_view(self) -> bool:
        """Nothing was computed: all it gives is memory of its inputs. Known after it has run."""
        if self._is_view is _NOT_YET:
            self._is_view = not self.written and _shares_memory(self.out, self.inputs)
        return bool(self._is_view)


class Consumer(Protocol):
    on_trouble: Callable[[Exception], None] | None

    def before(self, op: Op) -> Any:
        """What `after` is to be given; None: this operation is of no interest."""

    def after(self, op: Op, state: Any) -> None: ...

    def passed_by(self, op: Op) -> None:
        """It runs on tensors of a class that answers for itself (DTensor, FakeTensor), and was not looked at."""


class _OpStream(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.consumers: tuple[Consumer, ...] = ()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not _can_skip_frames  # True, torch's default, imports the compiler (seconds) at the first operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = Op(func, args, kwargs)
        if types:
            for consumer in self.consumers:
                guarded(consumer, consumer.passed_by, op)
            return func(*args, **kwargs)
        looking = []
        for consumer in self.consumers:
            try:
                state = consumer.before(op)
            except Stopped:
                raise
            except Exception as error:  # noqa: BLE001 - our own trouble must not become the program's
                _end(consumer, error)
                continue
            if state is not None:
                looking.append((consumer, state))
        op.out = out = func(*args, **kwargs)
        for consumer, state in looking:
            guarded(consumer, consumer.after, op, state)
        return out


if _can_skip_frames:  # called from a compiled model: torch's compiler must leave us, and what we call, alone
    _skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(_OpStream.__torch_dispatch__.__code__, _frames._FrameExecStrategy(_skip, _skip))

_of_thread = threading.local()
_joined: dict[int, _OpStream] = {}  # by the identity of the consumer


def join(consumer: Consumer) -> None:
    """Shows this thread's operations to a consumer, after those that look already."""
    streams: list[_OpStream] = _of_thread.__dict__.setdefault("streams", [])
    stream = next((s for s in reversed(streams) if _is_on(s)), None)  # one is off where somebody has set the modes aside
    if stream is None:
        stream = _OpStream()
        streams.append(stream)
        stream.__enter__()
    _joined[id(consumer)] = stream
    stream.consumers = (*stream.consumers, consumer)


def leave(consumer: Consumer) -> None:
    stream = _joined.pop(id(consumer))
    stream.consumers = tuple(c for c in stream.consumers if c is not consumer)
    streams: list[_OpStream] = getattr(_of_thread, "streams", [])
    # in another thread's stack nothing can be taken away: its stream then looks no more, and serves the next who joins
    if stream not in _joined.values() and stream in streams:
        streams.remove(stream)
        if _is_on(stream):  # not if it was opened where torch puts the modes back by itself (inference mode, backward)
            stream.__exit__(None, None, None)


def _is_on(stream: _OpStream) -> bool:
    return any(mode is stream for mode in _get_current_dispatch_mode_stack())


def guarded(consumer: Consumer, work: Callable[..., None], *given: Any) -> None:
    """Work of a consumer, whose failure is its own end."""
    try:
        work(*given)
    except Stopped:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        _end(consumer, error)


def _end(consumer: Consumer, error: Exception) -> None:
    if consumer.on_trouble is None:
        raise error
    stream = _joined.get(id(consumer))
    if stream is not None:
        stream.consumers = tuple(c for c in stream.consumers if c is not consumer)
    consumer.on_trouble(error)


@contextmanager
def watching(consumer: Consumer) -> Iterator[None]:
    join(consumer)
    try:
        yield
    finally:
        leave(consumer)


def _blind_in_child() -> None:
    """A data loader's worker that is forked inside a stream keeps the mode; what it does is not the training."""
    for stream in getattr(_of_thread, "streams", []):
        stream.consumers = ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_blind_in_child)


def _shares_memory(out: Any, inputs: list[Tensor]) -> bool:
    made = [t for t in tensors_in(out) if has_storage(t)]
    if not made:
        return False
    given = {key_of(t) for t in inputs if has_storage(t)}
    return all(key_of(t) in given for t in made)
