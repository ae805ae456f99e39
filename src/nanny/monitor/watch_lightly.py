"""Watching with less, which writes no files: `watch_model(model)` and `check_loss_scale(scaler)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.weak import WeakIdKeyDictionary

from ..core.finding import Finding
from ..core.step import StepRecord
from ..diagnose.history import RunHistory
from .live_log import LiveLog
from .registry import all_rules, judge_step
from .watch import MixedPrecisionNanny, disabled


class Watch:
    """What `watch_model` gives back; `remove()` ends it."""

    def __init__(self, model: nn.Module, on_finding: Callable[[Finding], None] | None) -> None:
        self.nanny = MixedPrecisionNanny(model, output_dir=None, on_finding=on_finding)
        self.nanny.steps_by_themselves(find_models=False)

    @property
    def findings(self) -> list[Finding]:
        return self.nanny.findings

    def remove(self) -> None:
        self.nanny.close()


def watch_model(model: nn.Module, on_finding: Callable[[Finding], None] | None = None) -> Watch:
    """Watches a model's training from now on and logs to stderr; writes no files. Steps are found by themselves."""
    return Watch(model, on_finding)


@dataclass
class _ScaleWatch:
    """What `check_loss_scale` remembers of one scaler."""

    run: RunHistory = field(default_factory=RunHistory)
    last: float | None = None
    told: set[str] = field(default_factory=set)  # codes of the trouble that is going on


_scale_watches = WeakIdKeyDictionary()  # of a scaler, whose class may have no hash
_SCALE_RULES = ("SCALE_DECLINE", "SCALE_COLLAPSE", "SCALE_LOW", "SKIP_RATE")


def check_loss_scale(scaler: GradScaler) -> list[Finding]:
    """Call it once per step: compares the loss scale with the last time, logs trouble when it begins, returns it always.

    It sees the scale alone, so it cannot tell why a step was skipped; `MixedPrecisionNanny` can.
    """
    if disabled() or not scaler.is_enabled():
        return []
    watch = _scale_watches.setdefault(scaler, _ScaleWatch())
    now = float(scaler.get_scale())
    before, watch.last = watch.last, now
    if before is None:
        return []
    step = StepRecord(
        step=watch.run.steps,
        scale=before,
        scale_after=now,
        skipped=now < before,
        stepped=True,
        growth_interval=scaler.get_growth_interval(),
    )
    if not step.skipped:
        watch.told.clear()
    rules = all_rules()
    found = judge_step(step, watch.run, {code: rules[code] for code in _SCALE_RULES})
    log = LiveLog()
    for finding in found:
        if finding.code not in watch.told:
            log.show(finding)
    watch.told.update(f.code for f in found)
    return found
