"""`check_loss_scale(scaler)`: once per step, for who has a GradScaler and wants nothing else."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch.amp.grad_scaler import GradScaler

from ..core.finding import Finding
from ..core.step import StepRecord
from ..diagnose.history import RunHistory
from .live_log import LiveLog
from .registry import all_rules, judge_step
from .watch import disabled


@dataclass
class _ScaleWatch:
    """What `check_loss_scale` remembers of one scaler."""

    run: RunHistory = field(default_factory=RunHistory)
    last: float | None = None
    told: set[str] = field(default_factory=set)  # codes of the trouble that is going on


_scale_watches: weakref.WeakKeyDictionary[GradScaler, _ScaleWatch] = weakref.WeakKeyDictionary()
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
