"""Carried shadows that stop when they take too much memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .twins import CarriedShadows, Operation


class CappedShadows(CarriedShadows):
    """Gives its twins up when they take too much, and makes no more."""

    def __init__(self, on_op: Callable[[Operation], None], before_write: Callable[[Tensor], None]) -> None:
        super().__init__(on_op=on_op, before_write=before_write)
        self.spent = False
        self.left_out = ""

    def give_up(self) -> None:
        self.left_out = f"twins took {self.bytes_held >> 20} MiB; from there on the step was not compared"
        self.spent = True

    def _concerned(self, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
        return not self.spent and super()._concerned(tensors, args, kwargs)
