"""`watch_model(model)`: watches a training without a line in its loop, logs to stderr, writes no files."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..core.finding import Finding
from .watch import MixedPrecisionNanny


class Watch:
    """What `watch_model` gives back; `remove()` ends it."""

    def __init__(self, model: nn.Module, on_finding: Callable[[Finding], None] | None) -> None:
        self.nanny = MixedPrecisionNanny(model, output_dir=None, on_finding=on_finding)
        self._steps = None if not self.nanny.enabled else self.nanny.steps_by_themselves(find_models=False)

    @property
    def findings(self) -> list[Finding]:
        return self.nanny.findings

    def remove(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self.nanny.close()


def watch_model(model: nn.Module, on_finding: Callable[[Finding], None] | None = None) -> Watch:
    """Watches a model's training from now on and logs to stderr; writes no files. Steps are found by themselves."""
    return Watch(model, on_finding)
