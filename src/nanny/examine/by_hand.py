"""What the loop makes itself of gradients from a scaled loss that nobody has divided again: updates, penalties on their size."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..core.ops import JOINS, REDUCTIONS, SAME_VALUE, SCALINGS, SQUARES, TWO_TERMS, bare_op
from ..watch.places import Spot
from ..watch.storages import StorageMap
from ..watch.tensors import has_storage, tensors_in
from ..watch.twins import Operation
from .measure import rms_of, scalars_in
from .tags import Ledger

_SAME_NUMBER = 1e-3
_SMALL = 1e-3  # an eps, or the 0 with which a sum begins
_SIZES = REDUCTIONS | JOINS | SQUARES | {"abs", "sqrt"}  # what is as many times as large as they are, or its power


class ScaledGradients:
    """`see` every operation of a step; `updates` and `penalty` tell."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._factors: StorageMap[float] = StorageMap()  # of losses: what they were multiplied with last
        self._scaled: StorageMap[float] = StorageMap()  # of gradients, and what the loop makes of them; 0: divided again
        self._factor = self._last = 0.0  # of the loss that is differentiated, and of the last one that had any
        self._moved = self._size = 0.0
        self._scale = 0.0
        self._spot: Spot | None = None
        self._penalty: tuple[float, Spot] | None = None

    def note_factor(self, loss: Tensor, factor: float) -> None:
        self._factors.put(loss, factor)

    def begin_backward(self, loss: Tensor) -> None:
        self._factor = self._factors.find(loss) or 0.0
        self._last = self._factor or self._last

    def see(self, op: Operation, spot: Spot) -> None:
        phase = spot.place.phase
        if phase == "backward":
            for tensor in op.made if self._factor else ():
                self._scaled.put(tensor, self._factor)
        elif phase == "loop":
            self._factor = 0.0  # backward is over
            if not op.is_view:
                self._follow(op, spot)

    def _follow(self, op: Operation, spot: Spot) -> None:
        args = [a for a in tensors_in(op.args) if has_storage(a)]
        factors = [self._scaled.find(a) or 0.0 for a in args]
        if not any(factors) or not isinstance(op.out, Tensor):
            return
        name, factor, out = bare_op(op.name), max(factors), op.out
        if name in TWO_TERMS and len(args) == 2 and not factors[0] and self._is_weight(args[0]):
            if any(t is args[0] for t in op.written):
                self._note(args[0], args[1], float(op.kwargs.get("alpha", 1)) * (1 if name == "sub" else -1), factor, spot)
        elif name == "mul" and len(args) == 2 and all(factors):
            self._scaled.put(out, factors[0] * factors[1])
        elif name in SCALINGS:
            other = next((n for a in op.args[:2] if (n := self._plain_number(a)) is not None), 1.0)
            divisor = other if name == "div" else 1 / other if other else 0.0
            self._scaled.put(out, 0.0 if abs(divisor / factor - 1) < _SAME_NUMBER else factor)
        elif name in SAME_VALUE | {"neg"}:
            self._scaled.put(out, factor)
        elif name in TWO_TERMS and self._meets_another(op, factors) and any(a.requires_grad for a in args):
            self._penalty = self._penalty or (self._last, spot)  # differentiated once more
        elif name in _SIZES | TWO_TERMS:
            exponent = {"pow": 2.0, "square": 2.0, "sqrt": 0.5}.get(name, 1.0)
            self._scaled.put(out, factor**exponent)

    def _plain_number(self, value: Any) -> float | None:
        """That is no gradient."""
        if isinstance(value, Tensor):
            return float(value.detach()) if value.numel() == 1 and not (has_storage(value) and self._scaled.find(value)) else None
        return float(value)

    @staticmethod
    def _meets_another(op: Operation, factors: list[float]) -> bool:
        """Beside a number that is not multiplied."""
        return not all(factors) or any(abs(constant) > _SMALL for constant in scalars_in(op.args, {}))

    def _is_weight(self, tensor: Tensor) -> bool:
        return (tensor.requires_grad and tensor.is_leaf) or self._ledger.role(tensor)[0] == "parameter"

    def _note(self, weight: Tensor, by: Tensor, times: float, factor: float, spot: Spot) -> None:
        """It is written already: what was there is the rest."""
        update = by.detach().double() * times
        self._moved += rms_of(update) ** 2 * weight.numel()
        self._size += rms_of(weight.detach().double() + update) ** 2 * weight.numel()
        self._scale, self._spot = factor, self._spot or spot

    def penalty(self) -> dict[str, Any] | None:
        """A size of gradients that is differentiated itself, while they are still multiplied by the scale."""
        if self._penalty is None:
            return None
        scale, place = self._penalty[0], self._penalty[1].resolve()
        return {"scale": scale, "where": place.where, "source": place.source}

    def updates(self, least: float) -> dict[str, Any] | None:
        """Updates that are `least` times as long as the weights, or longer, and would not be if the gradients were divided."""
        ratio = math.sqrt(self._moved / self._size) if self._size else 0.0
        if self._spot is None or not least <= ratio < math.inf or ratio / self._scale >= least:
            return None
        place = self._spot.resolve()
        return {"scale": self._scale, "ratio": ratio, "where": place.where, "source": place.source}
