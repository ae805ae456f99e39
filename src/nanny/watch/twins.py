"""Twins: the FP32 (or FP64) run that a low-precision program would have been, computed inside the program's own run.

    with Twins() as twins, torch.autocast("cpu"):
        loss = model(x).sum()
        loss.backward()
    twins.twin(loss), twins.twin(weight.grad)

Every operation that touches a low-precision value runs a second time on wide twins. A twin belongs to a *storage*, not to a
tensor: a flat buffer with as many elements, of which a tensor's twin is the part with the tensor's own size, stride and
offset. Views, in-place operations, `out=` and tensors saved for backward are then right without special cases. A wide tensor
that no low-precision value ever reached is its own twin. The program itself, its tensors and its random numbers are untouched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.formats import FP8_E4M3, FP8_E5M2
from ..core.ops import DRAWS
from .op_facts import KERNEL_ERRORS, is_bytes, is_out_of_memory, is_pure, workspace_of
from .op_stream import Op, join, leave
from .storages import Buffers, StorageMap, key_of, whole_storage
from .tensors import LOW, WIDER, has_storage, in_backward, map_leaves, outside_program, tensors_in, widen
from .without_warnings import run_without_warnings

aten = torch.ops.aten
_SEEDED = torch.Tag.nondeterministic_seeded
_RESHAPES_IN_PLACE = torch.Tag.inplace_view  # squeeze_, transpose_: the storage, and so the twin, stays what it is
_SOFTMAX = {aten._softmax.default, aten._log_softmax.default}  # their last argument asks for half -> float, on CUDA
_UNSCALES, _MOVES_SCALE = aten._amp_foreach_non_finite_check_and_unscale_.default, aten._amp_update_scale_.default
_CLAMPS = {aten.clamp.default, aten.clamp_.default}


def saturates_as(args: Sequence[Any]) -> str | None:
    """The 8-bit format at whose ends a clamp cuts off: half of a cast to it, of which FP32 has no need."""
    low, high = args[1:3] if len(args) > 2 else (None, None)
    return next((f.torch_name for f in (FP8_E4M3, FP8_E5M2) if (low, high) == (-f.max, f.max)), None)


class Operation:
    """One operation as the program ran it, beside what its twins made of it (`None`: they could not run it)."""

    __slots__ = ("args", "func", "is_view", "kwargs", "made", "name", "out", "stored", "twin_out", "written")

    def __init__(self, op: Op, twin_out: Any) -> None:
        self.func, self.name, self.args, self.kwargs, self.out = op.func, op.name, op.args, op.kwargs, op.out
        self.stored, self.made, self.written, self.is_view = op.stored, op.made, op.written, op.is_view
        self.twin_out = twin_out


class Twins:
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
        on_trouble: Callable[[Any], None] | None = None,
        on_interrupt: Callable[[str], None] | None = None,
        on_anew: Callable[[Op], None] | None = None,
    ) -> None:
        self._wide = dtype
        self._on_op, self._on_anew = on_op, on_anew
        self._before_write = before_write
        self.on_trouble = on_trouble
        self._on_interrupt = on_interrupt
        self._forget()
        self._frames: list[Buffers] | None = [Buffers()] if own else None
        self._backward_frame = backward_frame if own else None
        self._back: tuple[object, Buffers] = (None, Buffers())
        self.reseeds: Counter[tuple[str, str]] = Counter()  # (operation, why its twin starts anew from the real value)
        self.operations = 0  # that ran on twins too
        self.spent = False  # no more twins are made
        self.restarts = 0

    def __enter__(self) -> Twins:
        join(self)
        return self

    def __exit__(self, *_: object) -> None:
        leave(self)

    def _forget(self) -> None:
        self._twins = Buffers()
        self._workspaces: StorageMap[Tensor] = StorageMap()  # of another size than the program's, so not in a buffer

    def release(self) -> None:
        """No more twins, and none is kept."""
        self.spent = True
        self._forget()
        self._frames = [Buffers()] if self._frames is not None else None
        self._back = (None, Buffers())

    def interrupted(self, why: str) -> None:
        """Operations run that nobody shows: what they write has another value than its twin, which starts anew everywhere."""
        if self._on_interrupt is not None:
            self._on_interrupt(why)
        else:
            self.reseeds[("", why)] += 1
            self._forget()

    def start_over(self) -> None:
        """They take too much memory: from here on the reference is the program's own values, and errors count anew."""
        self.restarts += 1
        self._forget()

    def twin(self, tensor: Tensor) -> Tensor:
        """The reference value; the tensor itself if no low-precision value ever reached it."""
        with outside_program():
            return self._twin(tensor)

    def own_value(self, tensor: Tensor) -> Tensor | None:
        """What the innermost frame made of exact inputs, in the real dtype; None if it did not make this tensor."""
        with outside_program():
            return self._frames[-1].find(tensor) if self._frames and has_storage(tensor) else None

    def own_gradient(self, tensor: Tensor) -> Tensor | None:
        """What the last frame of backward made of exact gradients; None if it did not make this one."""
        with outside_program():
            return self._back[1].find(tensor) if has_storage(tensor) else None

    def adopt(self, tensor: Tensor, reference: Tensor) -> None:
        """Gives a tensor its reference value from outside: FP32 weights that were cast before the run."""
        with outside_program():
            self._twins.put(tensor.detach(), reference.detach().to(self._dtype_beside(tensor.dtype)), owned=False)

    def of_storages(self, chosen: StorageMap[Any]) -> Buffers:
        """The twins of what lives in the storages of a map, for another `Twins` to begin with."""
        return self._twins.of_storages(chosen)

    def begin_with(self, twins: Buffers) -> None:
        self._twins = twins

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

    @property
    def bytes_made(self) -> int:
        """Since the reference began."""
        return self._twins.bytes_made

    def before(self, op: Op) -> _Before:
        """Runs nothing yet; what an operation overwrites is seeded and kept now."""
        if self._before_write is not None:
            for tensor in op.written:
                self._before_write(tensor)
        if self.spent or _RESHAPES_IN_PLACE in op.func.tags or not self._concerned(op):
            return _ALONE
        why_not = self._why_not_again(op)
        if why_not:
            return _Before(why_not=why_not)
        for tensor in op.written:
            if has_storage(tensor) and self._twins.find(tensor) is None:
                self._twins.put_storage(tensor, self._dtype_beside(tensor.dtype))
        frame = self._frame()
        own_inputs = None
        if frame is not None:
            self._seed_frame(frame, op.written)
            own_inputs = map_leaves((op.args, op.kwargs), partial(self._own, frame))
        return _Before(True, "", frame, own_inputs, _Randomness(op) if _SEEDED in op.func.tags else None)

    def after(self, op: Op, state: _Before) -> None:
        if state.why_not:
            self._start_anew(op.func, state.why_not, [*op.written, *tensors_in(op.out)])
            if self._on_anew is not None:
                self._on_anew(op)
        elif not state.concerned:
            self._report(op, op.out)
        else:
            twin_out = self._run_beside(op, state)
            self.operations += 1
            self._report(op, twin_out)

    def passed_by(self, op: Op) -> None:
        pass

    def _why_not_again(self, op: Op) -> str:
        if not is_pure(op.func):
            return "it may do more than compute, so it is not run twice"
        if any(t.is_nested for t in op.inputs):
            return "nested tensors have no twins"
        if not all(has_storage(t) or not t.numel() for t in op.written):
            return "it writes into a tensor without strides"  # and a second run would write into the program's own
        workspace = workspace_of(op.func, op.args, op.kwargs)
        if workspace is not None and self._twin(workspace) is workspace:
            return "its workspace is laid out for the program's own type"
        return ""

    def _concerned(self, op: Op) -> bool:
        """Is a low-precision value read, written or made, or one that descends from such?"""
        if self._wide == torch.float64 and any(t.dtype in WIDER for t in op.stored):
            return True
        if op.func is _MOVES_SCALE:
            return False  # the scale is what the program makes of its own overflows
        if any(t.dtype in LOW or self._twins.has(t) for t in op.stored):
            return True
        if op.func in _CLAMPS and saturates_as(op.args) is not None:
            return True
        return any(isinstance(v, torch.dtype) and v in LOW for v in (*op.args, *op.kwargs.values()))

    def _run_beside(self, op: Op, state: _Before) -> Any:
        randomness = state.randomness
        try:
            if randomness is not None:
                randomness.rewind()
            twin_out = self._twin_run(op)
            if state.frame is not None and not op.is_view:
                if randomness is not None:
                    randomness.rewind()
                self._own_run(state.frame, op, state.own_inputs)
        finally:
            if randomness is not None:
                randomness.resume()
        if op.func is _UNSCALES and has_storage(op.args[1]):
            self._twins.drop(op.args[1])  # and so is whether there was one
        return twin_out

    def _report(self, op: Op, twin_out: Any) -> None:
        if self._on_op is not None:
            self._on_op(Operation(op, twin_out))

    def _twin_run(self, op: Op) -> Any:
        func, reals = op.func, tensors_in(op.out)
        if op.is_view:
            if func is aten.view.dtype:
                self._start_anew(func, "its bits are read as another type", reals)
            return map_leaves(op.out, self._twin_argument)
        if any(t.is_nested for t in reals):
            self._start_anew(func, "nested tensors have no twins", reals)
            return None
        try:
            twin_out = self._compute(op)
        except KERNEL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            self._start_anew(func, str(error).partition("\n")[0][:100], [*op.written, *reals])
            return None
        made = tensors_in(twin_out)
        if [t.shape for t in reals if not is_bytes(t)] != [t.shape for t in made if not is_bytes(t)]:
            self._start_anew(func, "the wide run has another shape: it takes another way", [*op.written, *reals])
            return None
        if op.name in DRAWS:
            for real, twin in zip(reals, made):
                if not torch.equal(twin.to(real.dtype), real):
                    twin.copy_(real)
        taken = {key_of(t) for t in op.written}
        for real, twin in zip(reals, made):
            if has_storage(real) and key_of(real) not in taken:
                self._enter(real, twin)
        return twin_out

    def _compute(self, op: Op) -> Any:
        args, kwargs = map_leaves((op.args, op.kwargs), self._twin_argument)
        if op.func in _SOFTMAX:
            args = (*args[:2], False)
        elif op.func in _CLAMPS and saturates_as(args) is not None:
            args = (args[0], -math.inf, math.inf)
        return run_without_warnings(op.func, args, kwargs)

    def _enter(self, real: Tensor, twin: Tensor) -> None:
        """Values that cannot differ need no twin: integers and booleans get one only where the wide run decided otherwise."""
        if real.is_floating_point() or real.is_complex():
            self._twins.put(real, twin.to(self._dtype_beside(real.dtype)), owned=True)
        elif real.shape != twin.shape:
            self._workspaces.put(real, twin)
        elif not torch.equal(real, twin):
            self._twins.put(real, twin, owned=True)

    def _start_anew(self, func: Any, why: str, tensors: list[Tensor]) -> None:
        self.reseeds[(func.overloadpacket.__name__, why)] += 1
        for tensor in tensors:
            if has_storage(tensor):
                self._twins.drop(tensor)

    def _twin(self, tensor: Tensor) -> Tensor:
        if not has_storage(tensor):
            return tensor
        if is_bytes(tensor) and (workspace := self._workspaces.find(tensor)) is not None:
            return workspace
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
        return widen(dtype, self._wide)

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
        if not isinstance(value, Tensor) or not has_storage(value):
            return value
        found = frame.find(value)
        if found is not None:
            return found
        twin = self._twins.find(value)
        return value if twin is None else twin.to(value.dtype)

    def _seed_frame(self, frame: Buffers, written: list[Tensor]) -> None:
        for tensor in written:
            if has_storage(tensor) and frame.find(tensor) is None:
                whole = whole_storage(tensor)
                frame.put(whole, self._own(frame, whole).clone(), owned=True)
            for outer in self._frames or []:
                if outer is not frame and has_storage(tensor):
                    outer.drop(tensor)

    def _own_run(self, frame: Buffers, op: Op, inputs: Any) -> None:
        reals = tensors_in(op.out)
        if not op.written and all(not has_storage(t) or self._twins.find(t) is None for t in reals):
            return
        args, kwargs = inputs
        try:
            made = tensors_in(run_without_warnings(op.func, args, kwargs))
        except KERNEL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            made = []
        taken = {key_of(t) for t in op.written}
        for real, own in zip(reals, made):
            if has_storage(real) and key_of(real) not in taken and own.shape == real.shape:
                frame.put(real, own, owned=True)


class _Randomness:
    """The random state of every generator an operation may draw from, to run it again with the same draws."""

    def __init__(self, op: Op) -> None:
        given = [v for v in (*op.args, *op.kwargs.values()) if isinstance(v, torch.Generator)]
        devices = {t.device for t in op.inputs if t.device.type == "cuda"}
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


class _Before(NamedTuple):
    """What was decided and kept before an operation ran."""

    concerned: bool = False
    why_not: str = ""
    frame: Buffers | None = None
    own_inputs: Any = None
    randomness: _Randomness | None = None


_ALONE = _Before()
