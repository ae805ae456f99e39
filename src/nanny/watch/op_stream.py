"""Every operation of a program, once: the only dispatch mode of the package, and those who look share it.

    with watching(consumer):       # consumer.before(op), then the program's own operation, then consumer.after(op, state)
        loss = model(x).sum()
        loss.backward()

The program's result always stands. What a consumer raises ends that consumer and nobody else: it is told once through its
`on_trouble` (None: strict, it is raised). A consumer that means to end the program raises `Stopped`. The stream belongs to the
thread that opened it (autograd's own threads for that thread included). It lies below jit.trace and vmap, which see nothing of it
and hand it plain tensors. Of a DTensor it sees what becomes of the part that this rank has; at other classes that answer for
themselves (FakeTensor) it does not look.

It is not to be noticed. It lies below every mode of the program, and those may come and go while it is on. What is computed by
those who look reaches no mode, subclass or autocast of the program. The program's own operation runs in the dispatch state that
it would have had alone. Where somebody records operations it does not look, and where torch would compute something else because
a mode is on, it is off (compiler.py): those who look are told that they were `interrupted`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..core.finding import NannyError
from ..core.ops import CALL_OTHERS
from . import compiler
from .float_traps import Untrapped, traps_are_set
from .op_facts import other_gradient, written_by
from .storages import key_of
from .tensors import RECORDING_MODES, has_storage, in_backward, tensors_in

_C = torch._C
_NOT_YET: Any = object()
_STAND_INS = _C._TorchDispatchModeKey.FAKE
_OF_AUTOGRAD, _DETACH = (torch.Tensor,), torch.ops.aten.detach.default  # what tanh and its like keep of their own result


class Stopped(NannyError):
    """A consumer ends the program, because it was asked to."""


class Op:
    """One operation of the program. What costs something is found out when it is first asked for, and once for all."""

    __slots__ = ("_inputs", "_is_view", "_made", "_stored", "_written", "args", "func", "kwargs", "name", "out")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.func = func  # OpOverload
        self.name: str = func.overloadpacket.__name__
        self.args = args
        self.kwargs = kwargs
        self.out: Any = None  # until it has run
        self._inputs = self._stored = self._made = self._written = self._is_view = _NOT_YET

    @property
    def inputs(self) -> list[Tensor]:
        if self._inputs is _NOT_YET:
            self._inputs = tensors_in((self.args, self.kwargs) if self.kwargs else self.args)
        found: list[Tensor] = self._inputs
        return found

    @property
    def stored(self) -> list[Tensor]:
        """Inputs beside whose memory something can be kept."""
        if self._stored is _NOT_YET:
            self._stored = [t for t in self.inputs if has_storage(t)]
        found: list[Tensor] = self._stored
        return found

    @property
    def made(self) -> list[Tensor]:
        """What came out, as far as something can be kept beside its memory. Known after it has run."""
        if self._made is _NOT_YET:
            self._made = [t for t in tensors_in(self.out) if has_storage(t)]
        found: list[Tensor] = self._made
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
            self._is_view = not self.written and bool(self.made) and {*map(key_of, self.made)} <= {*map(key_of, self.stored)}
        return bool(self._is_view)


class Consumer(Protocol):
    """May also have `interrupted(why)`: operations ran, or will, that it is not shown."""

    on_trouble: Callable[[Any], None] | None

    def before(self, op: Op) -> Any:
        """What `after` is to be given; None: this operation is of no interest."""

    def after(self, op: Op, state: Any) -> None: ...

    def passed_by(self, op: Op) -> None:
        """It runs on tensors of a class that answers for itself (DTensor, FakeTensor), and was not looked at."""


class _OpStream(TorchDispatchMode):
    supports_higher_order_operators = True  # torch.cond and its like: without it torch refuses them under a mode

    def __init__(self) -> None:
        super().__init__()
        self.consumers: tuple[Consumer, ...] = ()
        self._thread = get_ident()
        self._is_aside = False
        self._not_in_backward = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not compiler.can_skip_frames  # True, torch's default, imports the compiler (seconds) at the first operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shown, has_parts = None, False
        try:
            if self.consumers:
                shown = self._before(func, types, args, kwargs)
                has_parts = bool(types and self.consumers) and all(map(_has_parts, types))
        except BaseException as error:  # noqa: BLE001 - what is not ours is raised again
            self._failed(error)
        if has_parts:
            return NotImplemented  # its class answers, with operations on the parts: those are looked at
        out = _run(func, args, kwargs) if isinstance(func, OpOverload) else func(*args, **kwargs)
        if shown is not None:
            try:
                self._after(out, *shown)
            except BaseException as error:  # noqa: BLE001
                self._failed(error)
        return out

    def _before(self, func: Any, types: Any, args: Any, kwargs: Any) -> tuple[Op, list[tuple[Consumer, Any]]] | None:
        if not isinstance(func, OpOverload):
            self._interrupt(f"{func} runs functions of its own")
            return None
        if types == _OF_AUTOGRAD and func is _DETACH:
            return None
        op = Op(func, args, kwargs)
        has_modes = bool(_C._len_torch_dispatch_stack())  # besides this one, which is off meanwhile
        if types or (has_modes and _C._get_dispatch_mode(_STAND_INS) is not None):
            self._show("passed_by", op)
            return None
        recorder = _recorder(has_modes)
        if recorder:
            self._interrupt(f"{recorder} recorded operations in it")
            return None
        if other_gradient(func, args):
            self._not_in_backward = f"torch computes the gradient of {op.name} by another formula while anybody watches"
        looking = []
        with _Unseen():
            for consumer in self.consumers:
                state = guard(consumer, consumer.before, op)
                if state is not None:
                    looking.append((consumer, state))
        return (op, looking) if looking else None

    def _after(self, out: Any, op: Op, looking: list[tuple[Consumer, Any]]) -> None:
        op.out = out
        with _Unseen():
            for consumer, state in looking:
                guard(consumer, consumer.after, op, state)

    def _failed(self, error: BaseException) -> None:
        """In the stream itself: nobody looks any more, and the program goes on."""
        looking, self.consumers = self.consumers, ()
        if isinstance(error, Stopped) or is_programs_own(error) or any(c.on_trouble is None for c in looking):
            self.consumers = looking
            raise error
        for consumer in looking:
            assert consumer.on_trouble is not None
            consumer.on_trouble(error)

    def _show(self, method: str, given: Any) -> None:
        with _Unseen():
            for consumer in self.consumers:
                work = getattr(consumer, method, None)
                if work is not None:
                    guard(consumer, work, given)

    def _interrupt(self, why: str) -> None:
        self._show("interrupted", why)

    # not on TorchDispatchMode's own way: that keeps flags which tell torch, and its compiler, of a mode

    def push(self) -> None:  # type: ignore[override]
        """Below the modes of the program: those take away whatever is on top when they end."""
        with _others_off():
            _C._push_on_torch_dispatch_stack(self)

    def pop(self) -> None:
        if not self.is_on():
            return
        taken = []
        while (mode := _C._pop_torch_dispatch_stack(None)) is not self:
            taken.append(mode)
        for mode in reversed(taken):
            _C._push_on_torch_dispatch_stack(mode)

    def is_on(self) -> bool:
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    # compiler.Part

    def go_aside(self, why: str) -> None:
        if why and not self._is_aside and get_ident() == self._thread and self.is_on():
            self._is_aside = True
            self._interrupt(why)
            self.pop()

    def come_back(self) -> None:
        """Not at once: torch is about to put the thread's dispatch state back to what it was without us."""

    def return_now(self) -> None:
        if self._is_aside and get_ident() == self._thread and may_change_modes():
            self._is_aside = False
            self.push()

    def step_out(self) -> bool:
        if get_ident() != self._thread or not self.is_on():
            return False
        self.pop()
        return True

    def step_in(self) -> None:
        self.push()

    def before_backward(self) -> str:
        if get_ident() != self._thread or in_backward():
            return ""
        self.return_now()
        return self._not_in_backward if self.consumers else ""


def _has_parts(kind: type) -> bool:
    """DTensor is on each rank a plain tensor, its part; what a collective gives waits until it is used, and is plain then."""
    distributed = sys.modules.get("torch.distributed.tensor"), sys.modules.get("torch.distributed._functional_collectives")
    known = (getattr(module, name, None) for module, name in zip(distributed, ("DTensor", "AsyncCollectiveTensor")))
    return issubclass(kind, tuple(one for one in known if one is not None))


compiler.skip_frames(_OpStream.__torch_dispatch__.__code__, and_what_it_calls=True)

_of_thread = threading.local()
_joined: dict[int, _OpStream] = {}  # by the identity of the consumer


def join(consumer: Consumer) -> None:
    """Shows this thread's operations to a consumer, after those that look already."""
    streams: list[_OpStream] = _of_thread.__dict__.setdefault("streams", [])
    return_to_program()
    stream = next((s for s in reversed(streams) if s.is_on()), None)  # one is off where somebody has set the modes aside
    if stream is None:
        stream = _OpStream()
        streams.append(stream)
        _joined[id(consumer)] = stream  # from here on `leave` undoes it
        stream.push()
    _joined[id(consumer)] = stream
    compiler.register(stream)
    stream.consumers = (*stream.consumers, consumer)


def join_beside(consumer: Consumer, other: Consumer) -> None:
    """From the next operation on, it is shown what another is shown that joined before; also from within an operation."""
    stream = _joined.get(id(other))
    if stream is not None:
        _joined[id(consumer)] = stream
        stream.consumers = (*stream.consumers, consumer)


def leave(consumer: Consumer) -> None:
    """Idempotent."""
    stream = _joined.pop(id(consumer), None)
    if stream is None:
        return
    stream.consumers = tuple(c for c in stream.consumers if c is not consumer)
    streams: list[_OpStream] = getattr(_of_thread, "streams", [])
    if stream in _joined.values():
        return
    compiler.unregister(stream)
    if stream in streams:
        streams.remove(stream)
        stream.pop()  # unless it was opened where torch puts the modes back by itself (inference mode, backward)
    elif stream._thread == threading.main_thread().ident:
        _left_elsewhere.append(stream)
        _ask_main_thread(_take_away, None)
    # else nothing can be taken from the stack of another thread: its stream looks no more, and serves the next who joins


_left_elsewhere: deque[_OpStream] = deque()


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _take_away(_: Any) -> int:
    """Python calls it in the main thread, between two instructions of the program."""
    with suppress(BaseException):  # a callback of C has nobody to raise to
        stream = _left_elsewhere.popleft()
        if stream not in _joined.values() and stream.is_on():  # it is not while one of its operations runs
            _of_thread.streams.remove(stream)
            stream.pop()
    return 0


try:
    _ask_main_thread: Any = ctypes.pythonapi.Py_AddPendingCall
except Exception:  # noqa: BLE001 - a program may forbid to ask, by whatever error
    _ask_main_thread = lambda *_: None  # noqa: E731


def return_to_program() -> None:
    """Switches on again what stepped aside for a compiled function: for hooks, which are called outside of one."""
    for stream in getattr(_of_thread, "streams", ()):
        stream.return_now()


def leave_program(why: str) -> None:
    """Switches off, until `return_to_program`, what this thread has on."""
    for stream in getattr(_of_thread, "streams", ()):
        stream.go_aside(why)


def is_set_aside() -> bool:
    """A stream of this thread is off for a moment, and comes back: a signal handler runs in the middle of an operation."""
    return any(not stream.is_on() and not stream._is_aside for stream in getattr(_of_thread, "streams", ()))


def has_other_modes() -> bool:
    """Of the program's own."""
    if torch._C._len_torch_function_stack():
        return True
    return bool(_C._len_torch_dispatch_stack()) and any(not isinstance(m, _OpStream) for m in _get_current_dispatch_mode_stack())


def may_change_modes() -> bool:
    """Inference mode and backward put the dispatcher back as they found it, a compiled function as it was without us."""
    return not (torch.is_inference_mode_enabled() or in_backward() or compiler.is_inside())


def guard(consumer: Consumer, work: Callable[..., Any], *given: Any) -> Any:
    """Work of a consumer, whose failure is its own end."""
    try:
        return work(*given)
    except Stopped:
        raise
    except BaseException as error:
        if is_programs_own(error):
            raise
        _end(consumer, error)


def is_programs_own(error: BaseException) -> bool:
    """Ctrl-C, or what a signal handler of the program raised while our code happened to run."""
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(h, "__func__", h), "__code__", None) for h in handlers} - {None}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


def _end(consumer: Consumer, error: BaseException) -> None:
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


def _off_in_child() -> None:
    """What a forked process does is not the training. Forked within an operation, the mode comes back, and nobody looks."""
    for stream in getattr(_of_thread, "streams", []):
        stream.consumers, stream._is_aside = (), False
        stream.pop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_off_in_child)


# ---- the thread's dispatch state ----
#
# A mode is called with every key above its own excluded. Alone, an operation would have run with some of them: autocast, which
# matters to one that calls others inside (nn.Bilinear's), and those that make conjugated, negated and zero tensors real.

_Keys = Any
_BITS = (_C.DispatchKey.Conjugate, _C.DispatchKey.Negative, _C.DispatchKey.ZeroTensor)
_AUTOCAST = tuple(key for name, key in vars(_C.DispatchKey).items() if name.startswith("Autocast"))
_MODES = (_C.DispatchKey.Python, _C.DispatchKey.PythonTLSSnapshot)
_excluded, _included = _C._dispatch_tls_local_exclude_set, _C._dispatch_tls_local_include_set
_as_alone: dict[tuple[Any, int, int, bool], _Keys] = {}
_unseen: dict[int, _Keys] = {}


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """The program's own operation, as it would have run alone."""
    # the functions that the program called were shown to its function modes and subclasses already; this call is ours
    shown = _C.DisableTorchFunction if _C._len_torch_function_stack() else _C.DisableTorchFunctionSubclass
    try:
        with _C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            outside = _excluded()
    except RuntimeError:  # called by hand, not by the dispatcher
        return func(*args, **kwargs)
    excluded = _excluded()
    whole = kwargs.get("rtol") is not None  # of torch.pinverse, which autocast has taken as a whole
    key = (func, outside.raw_repr(), excluded.raw_repr(), whole)
    keys = _as_alone.get(key)
    if keys is None:
        keys = _as_alone[key] = _keys_alone(func, outside, excluded, whole)
    with shown(), _C._ForceDispatchKeyGuard(_included(), keys):
        return func(*args, **kwargs)


def _keys_alone(func: Any, outside: _Keys, excluded: _Keys, whole: bool) -> _Keys:
    for bit in _BITS:
        if not outside.has(bit):
            excluded = excluded.remove(bit)
    # `outside` is that of the program's call: others may be part of one that was cast
    if func.overloadpacket.__name__ in CALL_OTHERS and not whole:
        for cast in _AUTOCAST:
            if not outside.has(cast):
                excluded = excluded.remove(cast)
    return excluded


class _Unseen:
    """What is computed here reaches no mode, subclass or autocast. Entered twice per operation: no contextlib."""

    __slots__ = ("_functions", "_keys", "_traps")

    def __enter__(self) -> None:
        self._traps = Untrapped() if traps_are_set() > 0 else None
        if self._traps is not None:
            self._traps.__enter__()
        excluded = _excluded()
        raw = excluded.raw_repr()
        keys = _unseen.get(raw)
        if keys is None:
            for bit in _BITS:
                excluded = excluded.remove(bit)
            for key in _MODES:
                excluded = excluded.add(key)
            keys = _unseen[raw] = excluded
        self._functions = _C.DisableTorchFunction()
        self._functions.__enter__()
        self._keys = _C._ForceDispatchKeyGuard(_included(), keys)
        self._keys.__enter__()

    def __exit__(self, *_: object) -> None:
        self._keys.__exit__(None, None, None)
        self._functions.__exit__(None, None, None)
        if self._traps is not None:
            self._traps.__exit__()


@contextmanager
def _others_off() -> Iterator[None]:
    count = sum(getattr(mode, "_mode_key", None) is None for mode in _get_current_dispatch_mode_stack())
    taken = [_C._pop_torch_dispatch_stack(None) for _ in range(count)]
    try:
        yield
    finally:
        for mode in reversed(taken):
            _C._push_on_torch_dispatch_stack(mode)


def _recorder(has_modes: bool) -> str:
    """Who records the operations that run: not to be looked at, because ours would get into his graph."""
    if _C._get_tracing_state() is not None:
        return "torch.jit.trace"
    return "a tracer" if has_modes and any(_C._get_dispatch_mode(key) is not None for key in RECORDING_MODES) else ""
