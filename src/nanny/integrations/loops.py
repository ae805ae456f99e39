"""For a loop that its user writes, whoever wraps its models: steps are found by themselves."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.finding import NannyError
from ..monitor.watch import MixedPrecisionNanny
from ..watch.names import unwrap


def watch(*models: nn.Module, first_step: int = 0, **options: Any) -> MixedPrecisionNanny:
    """Watches these models, wrapped or not, until `close()` or the end of a `with` block; several are one run (a GAN).

    `first_step`: the number of the first step, in a training that is resumed. The rest goes to `MixedPrecisionNanny`.
    """
    if not models:
        raise NannyError("watch() needs at least one model")
    nanny = MixedPrecisionNanny(models[0], **options)
    for model, prefix in zip(models[1:], _prefixes(models[1:])):
        nanny.add_model(model, prefix)
    nanny.steps_by_themselves(find_models=False, first=first_step)
    return nanny


def _prefixes(models: tuple[nn.Module, ...]) -> list[str]:
    names = [type(unwrap(model)).__name__ for model in models]
    return [name if names.count(name) == 1 else f"{name}{names[: i + 1].count(name) + 1}" for i, name in enumerate(names)]
