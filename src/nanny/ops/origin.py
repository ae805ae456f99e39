"""Who made the first NaN or infinity: every result is measured where it lies, and read once per step.

Of each operation two numbers stay on the device (smallest and largest result) and, on the host, which earlier operations its
inputs came from. Reading them at the end of the step tells producers (finite in, not finite out) from those that passed it on,
without waiting for the device once per operation. Infinities that were written on purpose (masks) are nobody's fault until
something makes NaN of them; NaN of a mask or of the data (missing labels) in a loss is none until it reaches a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.examination import Place
from ..core.ops import COPIES, LOGARITHMS, UNWRITTEN
from ..watch.names import short_dtype
from ..watch.op_facts import Selection, bare_name, is_collective, is_view_op, long_name, puts_constants, puts_nonfinite
from ..watch.places import Spot, Whereabouts
from ..watch.twins import written_by
from .records import OpFault, OpTally, TensorNote
from .reference import Call, Uncompiled, apart, is_plain, taken_down, tensors_in

_MOST_WAITING = 1 << 14  # operations between two looks
_SHOWN = 5  # of those that passed it on
# Of zero they make minus infinity, which a mask may want; worth a word only if more comes of it.

FINITE, EXPECTED, PENDING, BAD = range(4)


class _Origin:
    """A result: where it comes from and, once it was read, what it holds. Made for every operation: defaults cost nothing."""

    ends: tuple[Tensor, Tensor] | None = None
    on_purpose = False
    partial = False  # written into a part of its memory only
    name = ""  # of a parameter or buffer, or the collective that it arrived with
    storage = 0  # of what an optimizer wrote
    arrived = False  # from another rank
    low = 0.0
    high = 0.0
    state = FINITE
    root: _Origin | None = None
    call: Call | None = None
    out: Any = None
    passed_on: tuple[str, ...] = ()
    passed_on_count = 0

    def __init__(self, func: Any, spot: Spot, inputs: tuple[Any, ...], tensor: Tensor) -> None:
        self.func = func  # None: it came in from outside
        self.spot = spot
        self.inputs: tuple[tuple[_Origin, Any, Any], ...] = inputs  # with shape and dtype
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device

    @property
    def nan(self) -> bool:
        return self.low != self.low

    @property
    def extreme(self) -> bool:
        return max(abs(self.low), abs(self.high)) >= torch.finfo(self.dtype).max / 2

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


@cache
def _kind_of(func: Any) -> _Kind:
    name = bare_name(func)
    writes = func._schema.is_mutable or "batch_norm" in name
    return _Kind(name, is_view_op(func), writes, name in COPIES, name in UNWRITTEN, is_collective(func), puts_constants(func))


class OriginMode(TorchDispatchMode):
    """Follows non-finite values to their producer. `immediate=True` looks after every operation and keeps its inputs."""

    def __init__(
        self,
        places: Whereabouts,
        selection: Selection,
        on_fault: Callable[[Call | None, Any, OpFault], None],
        on_op: Callable[[str, Spot, str], None] | None = None,
        on_trouble: Callable[[Exception], None] | None = None,
        immediate: bool = False,
    ) -> None:
        super().__init__()
        self._run = Uncompiled(self._watch)
        self._places, self._selection, self._immediate = places, selection, immediate
        self._on_fault, self._on_op, self._on_trouble = on_fault, on_op, on_trouble
        self._active = True
        self._forget()
        self._operations = self._faults = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, torch's default, imports the compiler (seconds) at the first operation

    def _forget(self) -> None:
        self._held: dict[int, tuple[_Origin, StorageWeakRef]] = {}
        self._waiting: list[_Origin] = []
        self._arriving: dict[int, tuple[str, StorageWeakRef]] = {}
        self._names: dict[int, str] | None = None

    @property
    def active(self) -> bool:
        return self._active

    @active.setter
    def active(self, on: bool) -> None:
        if on and not self._active:
            self._forget()  # what was written in between is not known
        self._active = on

    @property
    def tally(self) -> OpTally:
        return OpTally(operations=self._operations, faults=self._faults)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})

    def _watch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind = _kind_of(func)
        if not self._active or kind.is_view:
            return func(*args, **kwargs)
        spot = self._places.spot()
        if self._on_op is not None:
            self._on_op(long_name(func), spot, "runs")
        call = None
        try:
            inputs = self._inputs(args, kwargs, spot)
            if self._immediate:
                call = taken_down(func, args, kwargs)
        except Exception as error:  # noqa: BLE001 - our own trouble must not become the program's
            self._give_up(error)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        try:
            self._results(func, kind, args, kwargs, out, spot, inputs, call)
            found = self.read() if self._immediate or len(self._waiting) > _MOST_WAITING else []
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
            return out
        for origin, fault in found:
            self._on_fault(origin.call, origin.out, fault)
        return out

    def _give_up(self, error: Exception) -> None:
        if self._on_trouble is None:
            raise error
        self.active = False
        self._on_trouble(error)

    def _inputs(self, args: Any, kwargs: Any, spot: Spot) -> tuple[tuple[_Origin, Any, Any], ...]:
        found = []
        for tensor in tensors_in((args, kwargs)) if kwargs else tensors_in(args):
            if _measurable(tensor):
                held = self._held.get(tensor.untyped_storage()._cdata)
                found.append((self._from_outside(tensor, spot) if held is None else held[0], tensor.shape, tensor.dtype))
        return tuple(found)

    def _from_outside(self, tensor: Tensor, spot: Spot) -> _Origin:
        key = tensor.untyped_storage()._cdata
        if self._names is None:
            self._names = self._places.storages()
        arrived = self._arriving.pop(key, None)
        name = self._names.get(key, "") if arrived is None else arrived[0]
        origin = _Origin(None, spot, (), tensor)
        origin.name, origin.arrived = name, arrived is not None
        origin.ends = _ends(tensor)
        self._enter(tensor, origin)
        return origin

    def _enter(self, tensor: Tensor, origin: _Origin, copied: bool = False) -> None:
        storage = tensor.untyped_storage()
        # as long as the weak reference lives, no other storage gets this address
        self._held[storage._cdata] = (origin, StorageWeakRef(storage))
        if origin.ends is not None and not copied:
            self._waiting.append(origin)

    def _results(
        self, func: Any, kind: _Kind, args: Any, kwargs: Any, out: Any, spot: Spot, inputs: tuple[Any, ...], call: Call | None
    ) -> None:
        self._operations += 1
        made = tensors_in(out)
        if kind.writes:
            written = written_by(func, args, kwargs)
            made = written + [t for t in made if not any(t is w for w in written)]
        for tensor in made:
            if not _measurable(tensor):
                continue
            if kind.is_collective:  # still under way: what arrives is looked at when it is used
                storage = tensor.untyped_storage()
                self._held.pop(storage._cdata, None)
                self._arriving[storage._cdata] = (kind.name, StorageWeakRef(storage))
                continue
            if kind.is_copy and len(inputs) == 1:
                self._enter(tensor, inputs[0][0], copied=True)
                continue
            origin = _Origin(func, spot, inputs, tensor)
            if not kind.is_uninitialised:
                origin.ends = _ends(tensor)
                if kind.puts_constants:
                    origin.on_purpose = puts_nonfinite(func, args, kwargs, tensor.dtype)
                origin.partial = kind.writes and tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
                if spot.place.phase == "optimizer":
                    origin.storage = tensor.untyped_storage()._cdata
            if call is not None:
                origin.call, origin.out = call, out
            self._enter(tensor, origin)

    def read(self) -> list[tuple[_Origin, OpFault]]:
        """Looks at everything since the last look: one transfer from the device. Gives the new faults, in order."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return []
        with apart():  # at the end of a step the mode itself is on
            _read_ends(waiting)
        found: list[_Origin] = []
        for origin in waiting:
            if not origin.finite:
                self._judge(origin, found)
            elif origin.partial:
                worst = max((i[0] for i in origin.inputs), key=lambda i: i.state, default=origin)
                origin.state, origin.root = worst.state, worst.root  # the rest of its memory is what it was
            elif origin.extreme and (self._is_given(origin) or any(i[0].state == EXPECTED for i in origin.inputs)):
                origin.state = EXPECTED  # finfo.min as a mask: two of them make an infinity
            origin.ends = None
        if found:
            self._names = self._places.storages()
        faults = [(o, self._fault_of(o)) for o in found if self._is_wanted(o)]
        self._faults += len(faults)
        for origin in waiting:
            origin.inputs = ()  # the chain ends here: what is known is in the state
            if not self._immediate:
                origin.call = origin.out = None
        self._held = {key: held for key, held in self._held.items() if not held[1].expired()}
        self._arriving = {key: held for key, held in self._arriving.items() if not held[1].expired()}
        self._names = None
        return faults

    def deliver(self) -> None:
        try:
            found = self.read()
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
            return
        for origin, fault in found:
            self._on_fault(origin.call, origin.out, fault)

    def _judge(self, origin: _Origin, found: list[_Origin]) -> None:
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

    def _judge_producer(self, origin: _Origin, found: list[_Origin]) -> None:
        origin.root = origin
        if self._is_given(origin):
            origin.state = PENDING if origin.nan else EXPECTED
        elif not origin.nan and origin.func is not None and origin.high < math.inf and bare_name(origin.func) in LOGARITHMS:
            origin.state = PENDING
        else:
            origin.state = BAD
            found.append(origin)

    def _is_given(self, origin: _Origin) -> bool:
        """Put there on purpose: a constant, or something from outside that is no weight, such as a mask kept as a buffer."""
        if origin.func is None:
            return not origin.arrived and origin.name not in self._places.parameter_names()
        return origin.on_purpose

    def _pass_on(self, origin: _Origin) -> None:
        root = origin.root
        assert root is not None
        root.passed_on_count += 1
        if len(root.passed_on) < _SHOWN:
            place = origin.spot.place
            what = "NaN" if origin.nan else "Inf"
            root.passed_on += (f"{bare_name(origin.func)} {place.site or place.phase} ({what})",)

    def _is_wanted(self, origin: _Origin) -> bool:
        if origin.func is None:
            return self._selection.wants_site(origin.spot.place.site)
        return self._selection.wants(origin.func) and self._selection.wants_site(origin.spot.place.site)

    def _fault_of(self, origin: _Origin) -> OpFault:
        place = origin.spot.resolved()
        own = TensorNote(tuple(origin.shape), short_dtype(origin.dtype), str(origin.device), origin.low, origin.high)
        if origin.func is None:
            if origin.name and not origin.arrived:
                place = Place(origin.name, "Parameter", place.phase, place.file, place.line)
            return OpFault(
                op=f"{origin.name} (from another rank)" if origin.arrived else origin.name or "data",
                kind="came_in",
                place=place,
                classes=origin.spot.classes,
                inputs=(own,),
                passed_on=origin.passed_on,
                passed_on_count=origin.passed_on_count,
            )
        if origin.storage:
            place = Place((self._names or {}).get(origin.storage, ""), place.module, place.phase, place.file, place.line)
        notes = [
            TensorNote(tuple(shape), short_dtype(dtype), str(i.device), i.low, i.high, str(at))
            for at, (i, shape, dtype) in enumerate(origin.inputs)
        ]
        return OpFault(
            op=long_name(origin.func),
            kind="nan" if origin.nan else "inf",
            place=place,
            classes=origin.spot.classes,
            inputs=tuple(notes),
            outputs=(own,),
            passed_on=origin.passed_on,
            passed_on_count=origin.passed_on_count,
        )


def _confirms(origin: _Origin, root: _Origin) -> bool:
    """Does what comes of it show that it was a fault? NaN that is left out of a loss again is none; in a gradient it is."""
    if root.nan:
        return origin.nan and origin.spot.place.phase != "loop"
    return origin.nan or origin.high == math.inf


def _measurable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and is_plain(tensor)


def _ends(tensor: Tensor) -> tuple[Tensor, Tensor]:
    if tensor.dtype.itemsize == 1:  # no kernel for fp8
        tensor = tensor.float()
    return torch.aminmax(tensor.detach())


def _read_ends(waiting: list[_Origin]) -> None:
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
