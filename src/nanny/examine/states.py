"""Low-precision tensors that outlive the step (weights, averages, gradients that are added up): did they move as they should?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.ops import REPLACES, TWO_TERMS, bare_op
from ..watch.places import Spot
from ..watch.storages import StorageMap, key_of
from ..watch.tensors import has_storage, short_dtype
from ..watch.twins import Operation
from .measure import scalars_in
from .records import Operand, Suspect

_MOST_BYTES = 1 << 29


@dataclass
class State:
    role: str
    name: str
    alias: Tensor
    before: Tensor
    ops: list[str] = field(default_factory=list)
    spot: Spot | None = None
    order: int = 0
    is_average: bool = False  # moved by a difference from what it was
    factors: list[float] = field(default_factory=list)  # multiplied with
    lost_factors: list[float] = field(default_factory=list)  # ... without any effect


class States:
    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._held: dict[int, State] = {}
        self._most_bytes = min(most_bytes, _MOST_BYTES)
        self._bytes = 0
        self.left_out = 0

    def keep(self, tensor: Tensor, before: Tensor, role: str, name: str) -> None:
        """Before the first write into a tensor that was there before the step."""
        if key_of(tensor) in self._held:
            return
        if self._bytes > self._most_bytes:
            self.left_out += 1
            return
        self._bytes += before.untyped_storage().nbytes()
        self._held[key_of(tensor)] = State(role, name, tensor.detach(), before)

    def note(
        self,
        op: Operation,
        spot: Spot,
        order: int,
        overwritten: dict[int, Tensor],
        towards: StorageMap[tuple[frozenset[int], float]],
        decayed: StorageMap[tuple[int, float]],
    ) -> None:
        """`towards`: differences times a number, which an average moves by. `decayed`: what it is made anew from."""
        others = op.args[1] if len(op.args) > 1 else None
        written = op.written
        for i, tensor in enumerate(written):
            state = self._held.get(key_of(tensor)) if has_storage(tensor) else None
            if state is None:
                continue
            name = bare_op(op.name)
            other = others[i] if isinstance(others, (list, tuple)) and len(others) == len(written) else others
            if name == "copy" and isinstance(other, Tensor) and has_storage(other) and key_of(other) == key_of(tensor):
                continue  # `s[k] += 1` puts back what it has just written
            itself = decayed.find(other) if name == "copy" and isinstance(other, Tensor) and has_storage(other) else None
            if itself is not None and itself[0] == key_of(tensor):
                state.factors.append(itself[1])
                state.is_average, name = True, "average"
            state.ops.append(name)
            if state.spot is None:
                state.spot, state.order = spot, order
            known = towards.find(other) if isinstance(other, Tensor) and has_storage(other) else None
            if name in TWO_TERMS and known is not None and key_of(tensor) in known[0]:
                state.factors.append(1 - abs(known[1] * float(op.kwargs.get("alpha", 1))))
                state.is_average = True
            scalars = scalars_in(op.args, op.kwargs)
            if name in ("mul", "lerp") and scalars:
                factor = scalars[0] if name == "mul" else 1 - scalars[0]
                state.factors.append(factor)
                old = overwritten.get(key_of(tensor))
                if name == "mul" and factor != 1 and old is not None and old.shape == tensor.shape and torch.equal(old, tensor):
                    state.lost_factors.append(factor)

    def moved_shares(self, twin_of: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """The share of the 16-bit weights that the update moved, as it was and on a copy of them in FP32."""
        of_weights = [s for s in self._held.values() if s.role == "parameter" and s.spot is not None]
        elements = sum(s.before.numel() for s in of_weights) or 1
        real = sum(int((s.alias != s.before).sum()) for s in of_weights)
        wide = sum(int((twin_of(s.alias) != s.before.float()).sum()) for s in of_weights)
        return real / elements, wide / elements

    def suspects(self, twin_of: Callable[[Tensor], Tensor], kept_limit: float, unchanged_limit: float) -> list[Suspect]:
        """States that stood still while their twins moved, and factors that did nothing."""
        out = []
        for state in self._held.values():
            if state.spot is None or not state.ops or any(name in REPLACES for name in state.ops):
                continue
            meant = twin_of(state.alias).double() - state.before.double()
            moved = state.alias.double() - state.before.double()
            size = float(meant.square().sum())
            there = meant != 0
            if not 0 < size < float("inf") or not bool(there.any()):
                continue
            unchanged = float(((moved == 0) & there).double().sum() / there.double().sum())
            kept = float((moved * meant).sum()) / size
            lost = [f for f in state.lost_factors if f != 1]
            if (kept < kept_limit and unchanged > unchanged_limit) or lost:
                out.append(_suspect(state, unchanged, kept, lost))
        return out


def _suspect(state: State, unchanged: float, kept: float, lost: list[float]) -> Suspect:
    assert state.spot is not None
    return Suspect(
        "state",
        state.ops[-1],
        state.spot.place,
        state.order,
        dtype=short_dtype(state.before.dtype),
        count=state.before.numel(),
        share=unchanged,
        kept=kept,
        unchanged=unchanged,
        repeats=len(state.ops),
        operands=(Operand(state.role, state.name, dtype=short_dtype(state.before.dtype)),),
        numbers={
            "ops": tuple(state.ops[:8]),
            "average": state.is_average,
            "factors": tuple(state.factors[:4]),
            "lost_factors": tuple(lost[:4]),
        },
        spot=state.spot,
    )
