"""Every operation of a program beside its reference, as the program runs: what `CompareWithCPU` enters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.limits import Limits
from ..core.ops import JUMP, MEMORY
from ..watch.nonfinite import nonfinite_made
from ..watch.op_facts import KERNEL_ERRORS, SAFE_NAMESPACES, bare_name, is_collective, is_view_op, long_name, workspace_of
from ..watch.op_stream import Op
from ..watch.places import Places, Spot
from ..watch.tensors import is_plain, outside_program, tensors_in
from .gap import Tolerance, gaps_of, is_close, is_close_in_pieces, passes_screen, tensor_note
from .records import Gap, OpFault, OpTally, TensorNote
from .reference import Call, Reference, call_before, independent_product, reference_of, results_of
from .selection import Selection

_SEEDED = torch.Tag.nondeterministic_seeded
_PASSED = "succeeds to pass CompareWithCPU test"
_NOT_PLAIN = "sparse, quantized, nested, distributed or without values"
OnFault = Callable[[Call, Any, OpFault], None]
OnOp = Callable[[str, Spot, str], None]


class OpComparison:
    """Runs each operation as the program does, then its reference, and tells what differs. The program's results are its own."""

    def __init__(
        self,
        places: Places,
        selection: Selection,
        tolerance: Tolerance,
        reference: str,
        on_fault: OnFault,
        on_op: OnOp | None,
        on_trouble: Callable[[Exception], None] | None,
    ) -> None:
        self.active = True
        self._places, self._selection, self._tolerance, self._reference = places, selection, tolerance, reference
        self._on_fault, self._on_op, self.on_trouble = on_fault, on_op, on_trouble
        self._limits = Limits()
        self._left_out: Counter[str] = Counter()
        self._always_left_out: dict[Any, str] = {}
        self._operations = self._compared = self._faults = 0

    @property
    def tally(self) -> OpTally:
        return OpTally(self._operations, self._compared, self._faults, dict(self._left_out.most_common()))

    def before(self, op: Op) -> tuple[Call, Spot] | None:
        if not self.active:
            return None
        self._operations += 1
        spot = self._places.spot()
        left_out = self._why_left_out(op, spot)
        if left_out:
            self._leave_out(op, spot, left_out)
            return None
        self._tell(op.func, spot, "starts to run ...")
        return call_before(op.func, op.args, op.kwargs), spot

    def after(self, op: Op, state: tuple[Call, Spot]) -> None:
        call, spot = state
        said, fault = self._compare(call, op.out, spot)
        self._tell(op.func, spot, said)
        if fault is not None:
            self._on_fault(call, op.out, fault)

    def passed_by(self, op: Op) -> None:
        if self.active:
            self._operations += 1
            self._leave_out(op, self._places.spot(), _NOT_PLAIN)

    def _leave_out(self, op: Op, spot: Spot, why: str) -> None:
        self._left_out[why] += 1
        self._tell(op.func, spot, f"is not compared: {why}")

    def _tell(self, func: Any, spot: Spot, said: str) -> None:
        if self._on_op is not None:
            self._on_op(long_name(func), spot, said)

    def _why_left_out(self, op: Op, spot: Spot) -> str:
        why = self._always_left_out.get(op.func)
        if why is None:
            why = self._always_left_out[op.func] = self._why_always_left_out(op.func)
        if why:
            return why
        if not self._selection.wants_site(spot.place.site):
            return "not asked for"
        if _is_random(op):
            return "random"
        if workspace_of(op.func, op.args, op.kwargs) is not None:
            return "reads a workspace laid out for its own type"
        return "" if all(map(is_plain, op.inputs)) else _NOT_PLAIN

    def _why_always_left_out(self, func: Any) -> str:
        if self._selection.is_white(func):
            return "white list"
        if not self._selection.wants(func):
            return "not asked for"
        why = _why_not_comparable(func)
        return "" if why.startswith("custom") and self._selection.names(func) else why

    def _compare(self, call: Call, out: Any, spot: Spot) -> tuple[str, OpFault | None]:
        with outside_program():
            results = results_of(call, out)
            if not results or not all(map(is_plain, results)):
                return self._not_compared("makes a sparse tensor" if results else "returns no tensor")
            try:
                if self._reference == "wide" and self._is_close_by_parts(call, out, results):
                    return self._count_passed()
                reference = self._reference_of(call)
            except KERNEL_ERRORS as error:
                return self._not_compared(f"no reference ({str(error).partition(chr(10))[0][:80]})")
            if reference is None or [_kind(t) for t in results] != [_kind(t) for t in reference.results]:
                why = "nothing wider to compare with" if reference is None else "the reference has another shape"
                return self._not_compared(why)
            if all(is_close(r, w, self._tolerance, self._limits) for r, w in zip(results, reference.results)):
                return self._count_passed()  # and all is finite
            gaps = gaps_of(call, results, reference, self._tolerance, self._limits)
            if gaps is None:
                return self._not_compared("results are not unique (not comparable)")
            self._compared += 1
            if gaps:
                self._faults += 1
                return "fails to pass CompareWithCPU test", self._fault(call, results, spot, "mismatch", gaps)
            main = results if len(call.func._schema.returns) < 2 else [*call.written, *tensors_in(out[0])]
            kind = nonfinite_made(call.func, *call.inputs, main, spot.place.phase)
            if kind:
                return f"makes {kind}, as its reference does", self._fault(call, results, spot, kind, ())
            return _PASSED, None

    def _is_close_by_parts(self, call: Call, out: Any, results: list[Tensor]) -> bool:
        """Without the whole reference; False: unknown."""
        given = self._tolerance, self._limits
        return passes_screen(call, out, *given) or is_close_in_pieces(call, results, *given)

    def _count_passed(self) -> tuple[str, None]:
        self._compared += 1
        return _PASSED, None

    def _not_compared(self, why: str) -> tuple[str, None]:
        self._left_out[why] += 1
        return why, None

    def _fault(self, call: Call, results: list[Tensor], spot: Spot, kind: str, gaps: tuple[Gap, ...]) -> OpFault:
        place = spot.resolve()
        if place.phase == "optimizer":  # the parameter that it writes
            names = self._places.storages()
            name = next((n for t in results if (n := names.get(t.untyped_storage()._cdata))), "")
            place = replace(place, site=name)
        return OpFault(
            op=long_name(call.func),
            kind=kind,
            place=place,
            classes=spot.classes,
            inputs=notes_of(call),
            outputs=tuple(tensor_note(t, "", measured=True) for t in results),
            gaps=gaps,
        )

    def _reference_of(self, call: Call) -> Reference | None:
        product = independent_product(call) if self._reference == "wide" else None
        return reference_of(call, self._reference) if product is None else Reference((product,), True)


def _why_not_comparable(func: Any) -> str:
    """Why an operation cannot be compared, whatever its arguments; empty if it can."""
    if is_collective(func):
        return "collective"
    if func.namespace == "profiler":
        return "computes nothing"
    if func.namespace not in SAFE_NAMESPACES:
        return f"custom operation of {func.namespace!r} (name it in target_list to run it again)"
    name = bare_name(func)
    if is_view_op(func):
        return "view"
    if name in MEMORY or name.startswith(("sym_", "_assert")):
        return "computes nothing"
    if name in JUMP or any(a.name == "rounding_mode" for a in func._schema.arguments):
        return "jumps at rounding"
    return ""


def _kind(tensor: Tensor) -> tuple[torch.Size, bool, bool]:
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex()


def _is_random(op: Op) -> bool:
    """Tagged operations with a dropout of 0 (attention) draw nothing."""
    if _SEEDED not in op.func.tags:
        return False
    for i, argument in enumerate(op.func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = op.args[i] if i < len(op.args) else op.kwargs.get(argument.name, argument.default_value)
            return bool(value != 0)
    return True


def notes_of(call: Call) -> tuple[TensorNote, ...]:
    args, kwargs = call.inputs
    named = [(str(i), v) for i, v in enumerate(args)] + list(kwargs.items())
    return tuple(tensor_note(t, name, measured=True) for name, value in named for t in tensors_in(value))[:32]
