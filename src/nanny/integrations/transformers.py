"""For the transformers Trainer, and the trainers of TRL, which are built on it.

    from nanny.integrations.transformers import NannyCallback

    Trainer(model, args, train_dataset=data, callbacks=[NannyCallback()]).train()

What the Trainer logs is not what is read: its gradients are clipped by then, and a NaN loss is logged as 0.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ..monitor.watch import MixedPrecisionNanny


class NannyCallback(TrainerCallback):
    """Takes what `MixedPrecisionNanny` takes by name. `nanny` is that of the training that runs, or of the last one.

    Steps have the Trainer's own numbers, so those of a resumed training go on.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.nanny: MixedPrecisionNanny | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.nanny is not None:
            self.nanny.close("crashed")  # the Trainer says nothing of an exception; closed already, this does nothing
        self.nanny = MixedPrecisionNanny(given.get("model"), **self._options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.nanny is not None:
            self.nanny.begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.nanny is not None:
            self.nanny.end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.nanny is not None:
            self.nanny.close()
