"""For Lightning: a callback for its Trainer, and `watch` for the loop that Fabric leaves to its user.

from nanny.integrations.lightning import NannyCallback, watch

Trainer(precision="bf16-mixed", callbacks=[NannyCallback()]).fit(module, data)

model, optimizer = fabric.setup(model, optimizer)
with watch(model):
    ...  # the loop
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from ..monitor.watch import MixedPrecisionNanny
from .loops import watch

__all__ = ["NannyCallback", "watch"]


class NannyCallback(Callback):
    """Takes what `MixedPrecisionNanny` takes by name. `nanny` is that of the training that runs, or of the last one.

    A step is a window of accumulation, and all updates of one batch where a module optimizes by hand.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.nanny: MixedPrecisionNanny | None = None
        self._step, self._updates, self._is_open = 0, 0, False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.nanny is not None:
            self.nanny.close()
        self.nanny = MixedPrecisionNanny(pl_module, **self._options)
        self._step, self._is_open = trainer.global_step // max(1, len(trainer.optimizers)), False  # it counts each optimizer's

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.nanny is not None and not self._is_open:
            self._is_open, self._updates = True, trainer.global_step
            self.nanny.begin_step(self._step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.nanny is not None and trainer.global_step != self._updates:
            self._is_open = False
            self._step += 1
            self.nanny.end_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.nanny is not None:
            self.nanny.close("interrupted" if isinstance(exception, KeyboardInterrupt) else "crashed")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.nanny is not None:
            self.nanny.close()
