"""Carried shadows: the FP32 (or FP64) run that a low-precision program would have been, computed inside the program's own run.

    with CarriedShadows() as shadows, torch.autocast("cpu"):
        loss = model(x).sum()
        loss.backward()
    shadows.twin(loss), shadows.twin(weight.grad)

Every operation that touches a low-precision value runs a second time on wide twins. A twin belongs to a *storage*, not to a
tensor: a flat buffer with as many elements, of which a tensor's twin is the part with the tensor's own size, stride and
offset. Views, in-place operations, `out=` and tensors saved for backward are then right without special cases. A wide tensor
that no low-precision value ever reached is its own twin. The program itself, its tensors and its random numbers are untouched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..core.ops import DRAWS
from ..monitor.trace import being_traced
from .storages import Buffers, carried, key_of

aten = torch.ops.aten
LOW = frozenset(
    {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_SEEDED = torch.Tag.nondeterministic_seeded
_RESHAPES_IN_PLACE = torch.Tag.inplace_view  # squeeze_, transpose_: the storage, and so the twin, stays what it is
# The schemas of these do not say that running statistics (arguments 3 and 4) are written.
_WRITES_SILENTLY = dict.fromkeys(("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"), (3, 4))
_SOFTMAX = {aten._softmax.default, aten._log_softmax.default}  # their last argument asks for half -> float, on CUDA
_WORKSPACES = frozenset(["workspace", "reserve", "reserveSpace", "reservedSpace"])  # as schemas call them
# What a kernel raises when it has no implementation for the wide type or the twin's shape does not fit.
_KERNEL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


@dataclass(frozen=True)
class Operation:
    """One operation as the program ran it, beside what its twins made of it (`None`: they could not run it)."""

    func: Any  # OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    twin_out: Any
    is_view: bool  # of an input: nothing was computed

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)


class CarriedShadows(TorchDispatchMode):
    """Keeps the twins while it is entered, and answers for them afterwards as long as the real tensors live.

    `own=True` keeps a third value: what the operations of the innermost open `frame` make, in the program's own precision,
    of exact inputs. It tells the error that a module adds from the error that it was given. In backward a frame lasts as long
    as `backward_frame()` gives the same answer (None: the one before). `before_write` sees every tensor that is about to be
    written.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        on_op: Callable[[Operation], None] | None = None,
        own: bool = False,
        before_write: Callable[[Tensor], None] | None = None,
        backward_frame: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._wide = dtype
        self._on_op = on_op
        self._before_write = before_write
        self._twins = Buffers()
        self._workspaces: dict[int, tuple[StorageWeakRef, Tensor]] = {}  # of another size than the program's, so not in a buffer
        self._frames: list[Buffers] | None = [Buffers()] if own else None
        self._backward_frame = backward_frame if own else None
        self._back: tuple[object, Buffers] = (None, Buffers())
        self.reseeds: Counter[tuple[str, str]] = Counter()  # (operation, why its twin starts anew from the real value)
        self.operations = 0  # that ran on twins too

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, torch's default, imports the compiler (seconds) at the first operation

    def twin(self, tensor: Tensor) -> Tensor:
        """The reference value; the tensor itself if no low-precision value ever reached it."""
        with aside():
            return self._twin(tensor)

    def own_value(self, tensor: Tensor) -> Tensor | None:
        """What the innermost frame made of exact inputs, in the real dtype; None if it did not make this tensor."""
        with aside():
            return self._frames[-1].find(tensor) if self._frames and carried(tensor) else None

    def own_gradient(self, tensor: Tensor) -> Tensor | None:
        """What the last frame of backward made of exact gradients; None if it did not make this one."""
        with aside():
            return self._back[1].find(tensor) if carried(tensor) else None

    def adopt(self, tensor: Tensor, reference: Tensor) -> None:
        """Gives a tensor its reference value from outside: FP32 weights that were cast before the run."""
        with aside():
            self._twins.put(tensor.detach(), reference.detach().to(self._dtype_beside(tensor.dtype)), owned=False)

    @contextmanager
    def frame(self) -> Iterator[None]:
        self.open_frame()
        try:
            yield
        finally:
            self.close_frame()

    def open_frame(self) -> None:
        if self._frames is not None:
            self._frames.append(Buffers())

    def close_frame(self) -> None:
        if self._frames is not None and len(self._frames) > 1:
            self._frames.pop()

    @property
    def bytes_held(self) -> int:
        return self._twins.bytes_held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types or being_traced():  # a subclass that runs its parts itself, or somebody who records the program: not ours
            return func(*args, **kwargs)
        tensors = [t for t in _tensors((args, kwargs)) if carried(t)]
        written = written_by(func, args, kwargs)
        if self._before_write is not None:
            for tensor in written:
                self._before_write(tensor)
        if _RESHAPES_IN_PLACE in func.tags or not self._concerned(tensors, args, kwargs):
            out = func(*args, **kwargs)
            self._report(func, args, kwargs, out, out, written)
            return out
        why_not = self._why_not_again(func, args, kwargs, written)
        if not why_not:
            return self._run_beside(func, args, kwargs, written)
        out = func(*args, **kwargs)
        self._start_anew(func, why_not, [*written, *_tensors(out)])
        return out

    def _why_not_again(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> str:
        if not all(carried(t) or not t.numel() for t in written):
            return "it writes into a tensor without strides"  # and a second run would write into the program's own
        workspace = workspace_of(func, args, kwargs)
        if workspace is not None and self._twin(workspace) is workspace:
            return "its workspace is laid out for the program's own type"
        return ""

    def _concerned(self, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
        """Is a low-precision value read, written or made, or one that descends from such?"""
        if self._wide == torch.float64 and any(t.dtype in _WIDER for t in tensors):
            return True
        if any(t.dtype in LOW or self._twins.find(t) is not None for t in tensors):
            return True
        return any(_is_low(v) for v in (*args, *kwargs.values()))

    def _run_beside(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        self._twins.sweep()
        for tensor in written:  # before the operation runs: it overwrites the value to seed from
            if carried(tensor) and self._twins.find(tensor) is None:
                self._twins.put_storage(tensor, self._dtype_beside(tensor.dtype))
        frame = self._frame()
        if frame is not None:
            self._seed_frame(frame, written)
        randomness = _Randomness(args, kwargs) if _SEEDED in func.tags else None
        own_args, own_kwargs = _mapped((args, kwargs), partial(self._own, frame)) if frame is not None else (None, None)
        out = func(*args, **kwargs)
        is_view = not written and _is_view(out, (args, kwargs))
        if randomness is not None:
            randomness.rewind()
        twin_out = self._twin_run(func, args, kwargs, out, written, is_view)
        if frame is not None and not is_view:
            if randomness is not None:
                randomness.rewind()
            self._own_run(frame, func, own_args, own_kwargs, out, written)
        if randomness is not None:
            randomness.resume()
        self.operations += 1
        self._report(func, args, kwargs, out, twin_out, written)
        return out

    def _report(self, func: Any, args: Any, kwargs: Any, out: Any, twin_out: Any, written: list[Tensor]) -> None:
        if self._on_op is not None:
            self._on_op(Operation(func, args, kwargs, out, twin_out, not written and _is_view(out, (args, kwargs))))

    def _twin_run(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[Tensor], is_view: bool) -> Any:
        if is_view:
            if func is aten.view.dtype:
                self._start_anew(func, "its bits are read as another type", _tensors(out))
            return _mapped(out, self._twin)
        try:
            twin_args, twin_kwargs = _mapped((args, kwargs), self._twin_argument)
            if func in _SOFTMAX:
                twin_args = (*twin_args[:2], False)
            twin_out = func(*twin_args, **twin_kwargs)
        except _KERNEL_ERRORS as error:
            self._start_anew(func, str(error).partition("\n")[0][:100], [*written, *_tensors(out)])
            return None
        reals = list(_tensors(out))
        made = list(_tensors(twin_out))
        if [t.shape for t in reals if _has_values(t)] != [t.shape for t in made if _has_values(t)]:
            self._start_anew(func, "the wide run has another shape: it takes another way", [*written, *reals])
            return None
        if func.overloadpacket.__name__ in DRAWS:
            for real, twin in zip(reals, made):
                if not torch.equal(twin.to(real.dtype), real):
                    twin.copy_(real)
        taken = {key_of(t) for t in written}
        for real, twin in zip(reals, made):
            if carried(real) and key_of(real) not in taken:
                self._enter(real, twin)
        return twin_out

    def _enter(self, real: Tensor, twin: Tensor) -> None:
        """Values that cannot differ need no twin: integers and booleans get one only where the wide run decided otherwise."""
        if real.is_floating_point() or real.is_complex():
            self._twins.put(real, twin.to(self._dtype_beside(real.dtype)), owned=True)
        elif real.shape != twin.shape:
            self._workspaces = {key: kept for key, kept in self._workspaces.items() if not kept[0].expired()}
            self._workspaces[key_of(real)] = (StorageWeakRef(real.untyped_storage()), twin)
        elif not torch.equal(real, twin):
            self._twins.put(real, twin, owned=True)

    def _start_anew(self, func: Any, why: str, tensors: list[Tensor] | Iterator[Tensor]) -> None:
        self.reseeds[(func.overloadpacket.__name__, why)] += 1
        for tensor in tensors:
            if carried(tensor):
                self._twins.drop(tensor)

    def _twin(self, tensor: Tensor) -> Tensor:
        if not carried(tensor):
            return tensor
        if not _has_values(tensor) and (kept := self._workspaces.get(key_of(tensor))) is not None and not kept[0].expired():
            return kept[1]
        found = self._twins.find(tensor)
        if found is not None:
            return found
        wide = self._dtype_beside(tensor.dtype)
        return tensor if wide == tensor.dtype else self._twins.put_storage(tensor.detach(), wide)

    def _twin_argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._twin(value)
        return self._dtype_beside(value) if isinstance(value, torch.dtype) else value

    def _dtype_beside(self, dtype: torch.dtype) -> torch.dtype:
        if dtype in LOW:
            return self._wide
        return _WIDER.get(dtype, dtype) if self._wide == torch.float64 else dtype

    # The third value: exact inputs, own precision, one frame.

    def _frame(self) -> Buffers | None:
        if self._frames is None or not in_backward():
            return self._frames[-1] if self._frames is not None else None
        if self._backward_frame is None:
            return None
        key = self._backward_frame()
        if key is not None and key != self._back[0]:
            self._back = (key, Buffers())
        return self._back[1]

    def _own(self, frame: Buffers, value: Any) -> Any:
        if not isinstance(value, Tensor) or not carried(value):
            return value
        found = frame.find(value)
        if found is not None:
            return found
        twin = self._twins.find(value)
        return value if twin is None else twin.to(value.dtype)

    def _seed_frame(self, frame: Buffers, written: list[Tensor]) -> None:
        for tensor in written:
            if carried(tensor) and frame.find(tensor) is None:
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                whole = tensor.as_strided((elements,), (1,), 0)
                frame.put(whole, self._own(frame, whole).clone(), owned=True)
            for outer in self._frames or []:
                if outer is not frame and carried(tensor):
                    outer.drop(tensor)

    def _own_run(self, frame: Buffers, func: Any, args: Any, kwargs: Any, out: Any, written: list[Tensor]) -> None:
        frame.sweep()
        reals = list(_tensors(out))
        if not written and all(not carried(t) or self._twins.find(t) is None for t in reals):
            return
        try:
            made = list(_tensors(func(*args, **kwargs)))
        except _KERNEL_ERRORS:
            made = []
        taken = {key_of(t) for t in written}
        for real, own in zip(reals, made):
            if carried(real) and key_of(real) not in taken and own.shape == real.shape:
                frame.put(real, own, owned=True)


class _Randomness:
    """The random state of every generator an operation may draw from, to run it again with the same draws."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
        devices = {t.device for t in _tensors((args, kwargs)) if t.device.type == "cuda"}
        self._generators = given or [torch.default_generator, *(torch.cuda.default_generators[d.index or 0] for d in devices)]
        self._before = [g.get_state() for g in self._generators]
        self._after: list[Tensor] = []

    def rewind(self) -> None:
        self._after = self._after or [g.get_state() for g in self._generators]
        self._set(self._before)

    def resume(self) -> None:
        self._set(self._after)

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states):
            generator.set_state(state)


@contextmanager
def aside() -> Iterator[None]:
    """Outside every mode, graph and autocast: what is computed here is nobody's program."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in LOW


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Operations take and give tensors, and lists of them; nothing deeper."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, change) for item in value) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return change(value)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into."""
    schema = func._schema
    positions = _WRITES_SILENTLY.get(schema.name)
    if positions is not None:
        return [t for i in positions for t in _tensors(args[i])]
    if not schema.is_mutable:
        return []
    out: list[Tensor] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            out += _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
    return out


def workspace_of(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Memory that a forward kernel laid out for its backward and for its own type (recurrent layers of oneDNN and cuDNN).

    With another type a kernel reads and writes beyond it, and the process dies.
    """
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in _WORKSPACES:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor) and value.numel() and not _has_values(value):
                return value
    return None


def _has_values(tensor: Tensor) -> bool:
    return tensor.dtype != torch.uint8


def _is_view(out: Any, inputs: Any) -> bool:
    made = [t for t in _tensors(out) if carried(t)]
    if not made:
        return False
    given = {key_of(t) for t in _tensors(inputs) if carried(t)}
    return all(key_of(t) in given for t in made)
