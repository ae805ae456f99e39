"""Who made the first NaN or infinity: every result is measured where it lies; what a device has is read once per step.

Of each operation two numbers stay there (smallest and largest result) and, on the host, which earlier operations its
inputs came from. Reading them at the end of the step tells producers (finite in, not finite out) from those that passed it on,
without waiting for the device once per operation. Infinities that were written on purpose (masks) are nobody's fault until
something makes NaN of them; NaN of a mask or of the data (missing labels) in a loss is none until it reaches a gradient. Formulas
of backward divide by 0 and mask it out in the next operation, and what a kernel keeps for its own backward may be written in part
only: neither is a fault unless something comes of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from ctypes import c_float
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.ops import COPIES, LOGARITHMS, UNWRITTEN
from .op_facts import bare_name, is_collective, is_view_op, puts_constants, puts_nonfinite
from .op_stream import Op, guard
from .places import Places, Spot
from .storages import StorageMap, key_of
from .tensors import is_plain, outside_program, tensors_besides, tensors_in

_MOST_WAITING = 1 << 14  # operations between two looks
_SHOWN = 5  # of those that passed it on

FINITE, EXPECTED, PENDING, BAD = range(4)
_BY_A_NUMBER = {"mul": operator.mul, "div": operator.truediv, "add": operator.add, "sub": operator.sub}
_ROUNDED: dict[torch.dtype, Callable[[float], float]] = {torch.float64: float, torch.float32: lambda value: c_float(value).value}


class Origin:
    """A result: where it comes from and, once it was read, what it holds. Made for every operation: defaults cost nothing."""

    ends: tuple[Tensor, Tensor] | None = None  # on the device, until they are read
    on_purpose = False
    partial = False  # written into a part of its memory only
    aside = False  # kept beside the result, for backward
    read = False  # something was computed from it
    name = ""  # of a parameter or buffer, also one that an optimizer wrote, or the collective that it arrived with
    storage = 0  # of what an optimizer wrote
    arrived = False  # from another rank
    low = 0.0
    high = 0.0
    known = False  # are these the ends, on the host, of a finite result?
    state = FINITE
    root: Origin | None = None
    kept: Any = None  # what `keep` gave, as long as it may be asked for
    passed_on: tuple[str, ...] = ()
    passed_on_count = 0

    def __init__(self, func: Any, spot: Spot, inputs: tuple[Any, ...], tensor: Tensor) -> None:
        self.func = func  # None: it came in from outside
        self.spot = spot
        self.inputs: tuple[tuple[Origin, Any, Any], ...] = inputs  # with shape and dtype
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device

    @property
    def nan(self) -> bool:
        return self.low != self.low

    @property
    def extreme(self) -> bool:
        return max(abs(self.low), abs(self.high)) >= _half_of_largest(self.dtype)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


class _Kind(NamedTuple):
    """What must be known of an operation at each call."""

    name: str
    is_view: bool
    writes: bool
    is_copy: bool
    is_uninitialised: bool
    is_collective: bool
    puts_constants: bool
    several: bool  # results, and the first is the one that is asked for


@cache
def _half_of_largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max / 2


@cache
def _kind_of(func: Any) -> _Kind:
    name = bare_name(func)
    writes = func._schema.is_mutable or "batch_norm" in name
    several = len(func._schema.returns) > 1
    return _Kind(
        name, is_view_op(func), writes, name in COPIES, name in UNWRITTEN, is_collective(func), puts_constants(func), several
    )


class _BeforeOp(NamedTuple):
    kind: _Kind
    spot: Spot
    inputs: tuple[tuple[Origin, Any, Any], ...]
    kept: Any


class NonfiniteOrigins:
    """Follows non-finite values to their producers, which `on_origin` is told.

    With `keep` it looks after every operation and, beside each result, keeps what `keep(op)` gave before it ran.
    """

    def __init__(
        self,
        places: Places,
        on_origin: Callable[[Origin], None],
        on_op: Callable[[Op, Spot], None] | None = None,
        on_trouble: Callable[[Exception], None] | None = None,
        keep: Callable[[Op], Any] | None = None,
    ) -> None:
        self._places, self._keep = places, keep
        self._on_origin, self._on_op, self.on_trouble = on_origin, on_op, on_trouble
        self._active = True
        self._forget()
        self.operations = 0

    def _forget(self) -> None:
        self._held: StorageMap[Origin] = StorageMap()
        self._waiting: list[Origin] = []
        self._unconfirmed: list[Origin] = []  # made in backward; not yet masked out, nor used
        self._arriving: StorageMap[str] = StorageMap()
        self._names: dict[int, str] | None = None

    @property
    def active(self) -> bool:
        return self._active

    @active.setter
    def active(self, on: bool) -> None:
        if on and not self._active:
            self._forget()  # what was written in between is not known
        self._active = on

    def before(self, op: Op) -> _BeforeOp | None:
        kind = _kind_of(op.func)
        if not self._active or kind.is_view:
            return None
        spot = self._places.spot()
        if self._on_op is not None:
            self._on_op(op, spot)
        return _BeforeOp(kind, spot, self._inputs(op.inputs, spot), self._keep(op) if self._keep is not None else None)

    def after(self, op: Op, state: _BeforeOp) -> None:
        self._results(op, state)
        if self._keep is not None or len(self._waiting) > _MOST_WAITING:
            self._deliver()

    def passed_by(self, op: Op) -> None:
        self.operations += self._active

    def deliver(self) -> None:
        """Tells what has been found since the last look, at the end of a step."""
        guard(self, self._deliver, True)

    def _deliver(self, at_end: bool = False) -> None:
        waiting, self._waiting = self._waiting, []
        found = self._producers(waiting) if waiting else []
        if at_end:  # a gradient that nobody masked out
            unread = [o for o in self._unconfirmed if o.state == PENDING and not o.read]
            self._unconfirmed = []
            for origin in unread:
                origin.state = BAD
            found += unread
        try:
            for origin in found:
                self._on_origin(origin)
        finally:
            for origin in (*waiting, *found):
                origin.inputs = ()  # the chain ends here: what is known is in the state
                if origin.state != PENDING:
                    origin.kept = None
            if self._keep is None:  # once per step; else the map sees to itself
                self._held.sweep()
                self._arriving.sweep()

    def _inputs(self, tensors: list[Tensor], spot: Spot) -> tuple[tuple[Origin, Any, Any], ...]:
        found = []
        for tensor in tensors:
            if _measurable(tensor):
                origin = self._held.find(tensor)
                found.append((self._from_outside(tensor, spot) if origin is None else origin, tensor.shape, tensor.dtype))
        return tuple(found)

    def _from_outside(self, tensor: Tensor, spot: Spot) -> Origin:
        arrived = self._arriving.drop(tensor)
        origin = Origin(None, spot, (), tensor)
        origin.name, origin.arrived = self._name_of(key_of(tensor)) if arrived is None else arrived, arrived is not None
        self._measure(tensor, origin)
        self._held.put(tensor, origin)
        return origin

    def _measure(self, tensor: Tensor, origin: Origin) -> None:
        """What the host has is read at once; of that, what is finite and no mask has nothing more to tell."""
        ends = _ends(tensor)
        if not _reads_at_once(tensor):
            origin.ends = ends
        else:
            origin.low, origin.high = ends[0].item(), ends[1].item()
            if not origin.partial and not origin.extreme and origin.finite:
                self._is_done(origin)
                return
        self._waiting.append(origin)

    def _results(self, op: Op, state: _BeforeOp) -> None:
        self.operations += 1
        kind, spot, inputs, kept = state
        made = [op.out] if type(op.out) is Tensor else tensors_in(op.out)
        main = {id(t) for t in (*op.written, *tensors_in(op.out[0]))} if kind.several else None
        if kind.writes:
            made = [*op.written, *tensors_besides(made, op.written)]
        entered = False
        for tensor in made:
            if not _measurable(tensor):
                continue
            if kind.is_collective:  # still under way: what arrives is looked at when it is used
                self._held.drop(tensor)
                self._arriving.put(tensor, kind.name)
                continue
            if kind.is_copy and len(inputs) == 1:
                self._held.put(tensor, inputs[0][0])
                continue
            origin = Origin(op.func, spot, inputs, tensor)
            if not kind.is_uninitialised:
                if kind.puts_constants:
                    origin.on_purpose = puts_nonfinite(op.func, op.args, op.kwargs, tensor.dtype)
                origin.aside = main is not None and id(tensor) not in main
                origin.partial = kind.writes and tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
                if kept is not None:
                    origin.kept = (kept, op.out)
                if spot.place.phase == "optimizer":
                    origin.storage = key_of(tensor)
                if not origin.storage or not self._follows(origin, op, tensor):
                    self._measure(tensor, origin)
            self._held.put(tensor, origin)
            entered = True
        if entered:
            for source, _, _ in inputs:
                source.read = True

    def _follows(self, origin: Origin, op: Op, tensor: Tensor) -> bool:
        """Do its ends follow from those before? Half of an optimizer's operations multiply or shift everything by a number."""
        shift, rounded = _BY_A_NUMBER.get(op.name.rstrip("_")), _ROUNDED.get(tensor.dtype)
        if shift is None or rounded is None or len(op.args) != 2 or type(op.args[1]) not in (int, float) or op.kwargs:
            return False
        before, by = origin.inputs[0][0] if origin.inputs else origin, rounded(op.args[1])
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        if not before.known or before.dtype != tensor.dtype or not before.shape.numel() == tensor.numel() == elements or not by:
            return False
        low, high = sorted(rounded(shift(end, by)) for end in (before.low, before.high))
        if any(end and not torch.finfo(tensor.dtype).tiny <= abs(end) < _half_of_largest(tensor.dtype) for end in (low, high)):
            return False  # where it may be flushed, or overflows
        origin.low, origin.high = low, high
        self._is_done(origin)
        return True

    def _is_done(self, origin: Origin) -> None:
        """Finite: there is nothing to tell of it, and the chain ends here."""
        origin.known, origin.inputs, origin.kept = True, (), None

    def _producers(self, waiting: list[Origin]) -> list[Origin]:
        """Looks at everything since the last look: one transfer from the device. Gives the new producers, in order."""
        with outside_program():  # at the end of a step the stream itself is on
            _read_ends([origin for origin in waiting if origin.ends is not None])
        found: list[Origin] = []
        for origin in waiting:
            if not origin.finite:
                self._judge(origin, found)
            elif origin.partial:
                worst = max((i[0] for i in origin.inputs), key=lambda i: i.state, default=origin)
                origin.state, origin.root = worst.state, worst.root  # the rest of its memory is what it was
            elif origin.extreme and (self._is_given(origin) or any(i[0].state == EXPECTED for i in origin.inputs)):
                origin.state = EXPECTED  # finfo.min as a mask: two of them make an infinity
            origin.ends = None
        self._names = None  # weights may have got other storages
        for origin in found:
            if origin.storage:
                origin.name = self._name_of(origin.storage)
        return found

    def _name_of(self, storage: int) -> str:
        if self._names is None:
            self._names = self._places.storages()
        return self._names.get(storage, "")

    def _judge(self, origin: Origin, found: list[Origin]) -> None:
        worst = max((i[0] for i in origin.inputs if i[0].state != FINITE), key=lambda i: (i.state, i.nan), default=None)
        if worst is None:
            self._judge_producer(origin, found)
            return
        origin.state, origin.root = worst.state, worst.root or worst
        if worst.state == PENDING and _confirms(origin, origin.root):
            origin.state = BAD
            if origin.root.state == PENDING:
                origin.root.state = BAD
                found.append(origin.root)
        elif worst.state == EXPECTED and origin.nan:  # a mask became NaN here
            origin.root = origin
            origin.state = BAD if _confirms(origin, origin) else PENDING
            if origin.state == BAD:
                found.append(origin)
            return
        self._pass_on(origin)

    def _judge_producer(self, origin: Origin, found: list[Origin]) -> None:
        origin.root = origin
        if self._is_given(origin):
            origin.state = PENDING if origin.nan else EXPECTED
        elif origin.func is not None and (origin.aside or _is_log_of_zero(origin.func, origin.low, origin.high)):
            origin.state = PENDING
        elif origin.func is not None and origin.spot.place.phase == "backward":
            origin.state = PENDING
            self._unconfirmed.append(origin)
        else:
            origin.state = BAD
            found.append(origin)

    def _is_given(self, origin: Origin) -> bool:
        """Put there on purpose: a constant, or something from outside that is no weight, such as a mask kept as a buffer."""
        if origin.func is None:
            return not origin.arrived and origin.name not in self._places.parameter_names()
        return origin.on_purpose

    def _pass_on(self, origin: Origin) -> None:
        root = origin.root
        assert root is not None
        root.passed_on_count += 1
        if len(root.passed_on) < _SHOWN:
            place = origin.spot.place
            what = "NaN" if origin.nan else "Inf"
            root.passed_on += (f"{bare_name(origin.func)} {place.site or place.phase} ({what})",)


def nonfinite_made(func: Any, args: Any, kwargs: Any, results: list[Tensor], phase: str) -> str:
    """`nan` or `inf` that one operation made of finite inputs, looked at by itself and at once; empty: it did not.

    What was written on purpose, such as a mask, is nobody's fault. In backward one operation alone does not tell: formulas divide
    by 0 and mask it out in the next.
    """
    ends = _ends_now(results)
    if all(map(math.isfinite, ends)) or phase == "backward" or _is_log_of_zero(func, min(ends), max(ends)):
        return ""
    if puts_nonfinite(func, args, kwargs, next(t.dtype for t in results if _measurable(t))):
        return ""
    given = _ends_now(tensors_in((args, kwargs)))
    nan = any(v != v for v in ends)
    if all(map(math.isfinite, given)):
        return "nan" if nan else "inf"
    # a mask may become NaN, and be left out of the loss again; anything else that was given has been told of
    return "nan" if nan and phase != "loop" and all(v < math.inf for v in given) else ""


def _ends_now(tensors: list[Tensor]) -> list[float]:
    return [float(end) for t in tensors if _measurable(t) for end in _ends(t)]


def _is_log_of_zero(func: Any, low: float, high: float) -> bool:
    return low == -math.inf and high < math.inf and bare_name(func) in LOGARITHMS


def _confirms(origin: Origin, root: Origin) -> bool:
    """Does what comes of it show that it was a fault? NaN that is left out of a loss again is none; in a gradient it is."""
    if root.func is not None and root.spot.place.phase == "backward":
        return not origin.aside
    if root.nan:
        return origin.nan and origin.spot.place.phase != "loop"
    return origin.nan or origin.high == math.inf


def _measurable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and is_plain(tensor)


def _reads_at_once(tensor: Tensor) -> bool:
    """Elsewhere whoever reads waits for all that the device has to do before."""
    return tensor.is_cpu


def _ends(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """For whoever is outside the program."""
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # no kernel for fp8
    return torch.aminmax(wide)


def _read_ends(waiting: list[Origin]) -> None:
    """All numbers to the host in one transfer per device; fp64, whose range fp32 cannot hold, goes by itself."""
    groups: dict[tuple[Any, torch.dtype], list[int]] = {}
    for at, origin in enumerate(waiting):
        assert origin.ends is not None
        groups.setdefault((origin.device, origin.ends[0].dtype), []).append(at)
    parts: dict[tuple[Any, bool], list[tuple[list[int], Tensor]]] = {}
    for (device, dtype), members in groups.items():
        stacked = torch.stack([end for at in members for end in waiting[at].ends])  # type: ignore[union-attr]
        double = dtype == torch.float64
        parts.setdefault((device, double), []).append((members, stacked if double else stacked.float()))
    for listed in parts.values():
        values = torch.cat([stacked for _, stacked in listed]).tolist()
        order = [at for members, _ in listed for at in members]
        for i, at in enumerate(order):
            waiting[at].low, waiting[at].high = values[2 * i], values[2 * i + 1]
