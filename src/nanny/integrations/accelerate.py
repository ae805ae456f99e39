"""For Accelerate: the models that it has prepared.

from nanny.integrations.accelerate import watch

model, optimizer, data = accelerator.prepare(model, optimizer, data)
with watch(accelerator):
    ...  # the loop
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from ..core.finding import NannyError
from ..monitor.watch import MixedPrecisionNanny
from . import loops


def watch(accelerator: Accelerator, first_step: int = 0, **options: Any) -> MixedPrecisionNanny:
    """`first_step`: the number of the first step, in a training that is resumed. The rest goes to `MixedPrecisionNanny`."""
    if not accelerator._models:
        raise NannyError("nothing is prepared yet; call watch(accelerator) after accelerator.prepare(model, ...)")
    return loops.watch(*accelerator._models, first_step=first_step, **options)
