"""Would a shorter update have lowered the loss? Asked of an examined step, on its own batch, once the optimizer has stepped.

    trial = ShorterUpdate.of(calls, loss)   # backward begins: how this loss came about
    trial.keep()                            # the gradients are complete, the weights as they were
    trial.tried()                           # the optimizer has stepped: a `Trial` if the loss rose and need not have

An update along its gradient lowers the loss of its own batch unless it is too long: what rises behind the whole update and falls
behind a tenth of it is neither the batch's fault nor that of the precision. Weights and all else are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from ..core.examination import Trial
from ..watch.calls import ModelCall
from ..watch.memory import free_bytes
from ..watch.ranks import has_group
from ..watch.tensors import answers_itself, tensors_in
from .again import Again, NotAgain, calls_to_loss, is_scaled

_RISES = 0.01  # of the loss: less is rounding, or the noise of an update that is long enough
_TIMES_SHORTER = (10.0, 100.0, 1000.0)
_MEMORY_SHARE = 8  # of what is free, for the weights before and behind the update


class ShorterUpdate:
    def __init__(self, calls: Sequence[ModelCall], read: Callable[[Sequence[Any]], float | None], start: float) -> None:
        self._calls, self._read, self._start = tuple(calls), read, start
        self._before: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def of(cls, made: Sequence[ModelCall], root: Tensor) -> ShorterUpdate | None:
        """None: how the loss came about cannot be told, or not made again."""
        if not made or has_group():
            return None
        for at, call in enumerate(made):
            for position, node in enumerate(call.nodes):
                if is_scaled(root.grad_fn, node):
                    start = _number(call.results()[position])
                    return None if start is None else cls(made, _reader(at, position), start)
        with suppress(SyntaxError):
            return cls._of_line(made, root)
        return None

    @classmethod
    def _of_line(cls, made: Sequence[ModelCall], root: Tensor) -> ShorterUpdate | None:
        found = calls_to_loss(made, root.grad_fn)
        start = None if found is None else _number(*tensors_in(found[1]))
        return cls(found[0], _reader(-1, 0), start) if found and start is not None and _follow_from_each_other(found[0]) else None

    def keep(self) -> None:
        """The weights of all that was called, unless they are kept, or there is no room for them."""
        if self._before:
            return
        held = {id(p): p for call in self._calls for p in call.module.parameters() if p.requires_grad and not p.is_meta}
        size = sum(p.numel() * p.element_size() for p in held.values())
        if held and size * _MEMORY_SHARE <= free_bytes(next(iter(held.values())).device):
            self._before = [(p, p.detach().clone()) for p in held.values()]

    def tried(self) -> Trial | None:
        try:
            return self._tried() if self._before else None
        except NotAgain:
            return None
        finally:
            self._before = []

    def _tried(self) -> Trial | None:
        after = self._loss(())
        if after is None or after <= self._start + _RISES * abs(self._start):
            return None
        if self._loss(self._before) != self._start:
            return None  # what is made again is not what was made
        whole = [(p, before, p.detach() - before) for p, before in self._before]
        for times in _TIMES_SHORTER:
            loss = self._loss([(p, before + moved / times) for p, before, moved in whole])
            if loss is not None and loss < self._start:
                return Trial("shorter_update", value=times, was_bad=False, loss=loss, loss_start=self._start, loss_before=after)
        return None

    def _loss(self, weights: Sequence[tuple[Tensor, Tensor]]) -> float | None:
        again = Again(self._calls)
        again.weights = weights
        again.run()
        return self._read(again.results)


def _reader(call: int, position: int) -> Callable[[Sequence[Any]], float | None]:
    def read(results: Sequence[Any]) -> float | None:
        found = tensors_in(results[call])
        return _number(found[position]) if position < len(found) else None

    return read


def _number(value: Tensor | None = None, *_: Tensor) -> float | None:
    if value is None or answers_itself(value) or value.numel() != 1 or not value.is_floating_point():
        return None
    return float(value.detach())


def _follow_from_each_other(calls: Sequence[ModelCall]) -> bool:
    """What has a graph and goes into one of them was given by one before it: nothing of the old weights is left."""
    return all(
        any(before.position_of(t) is not None for before in calls[:at])
        for at, call in enumerate(calls)
        for t in call.inputs
        if t.grad_fn is not None
    )
