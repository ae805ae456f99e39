"""Which loss scales gradients of known size could have had in a narrower format. Scales are powers of two, given in bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..core.formats import Format
from ..core.limits import Limits
from .ranges import NOTHING, overflows

GROWTH_INTERVAL = 2000  # torch.amp.GradScaler's defaults
START_BITS = 16


@dataclass(frozen=True)
class ScalePath:
    """The loss scale at each step, and the steps that it would have made overflow."""

    steps: np.ndarray
    limit_bits: np.ndarray  # the largest scale that overflows nothing at this step
    bits: np.ndarray
    fixed: bool  # the user named it; otherwise a dynamic scaler that starts at the best value

    @property
    def skipped(self) -> np.ndarray:
        return self.bits > self.limit_bits

    @property
    def skip_rate(self) -> float:
        return float(self.skipped.mean()) if len(self.steps) else 0.0

    @property
    def best_bits(self) -> int:
        return int(self.bits[0]) if len(self.bits) else 0

    def at(self, step: int) -> int:
        """The scale in force at a step; between the steps on record, that of the last one before."""
        if not len(self.steps):
            return 0
        return int(self.bits[max(int(np.searchsorted(self.steps, step, side="right")) - 1, 0)])


def limit_bits(peaks: np.ndarray, target: Format) -> np.ndarray:
    """The largest power of two (in bits) that keeps magnitudes of this size finite; NOTHING where there is no magnitude."""
    known = np.isfinite(peaks) & (peaks > 0)
    safe = np.where(known, peaks, 1.0)
    bits = np.floor(np.log2(target.overflow_at) - np.log2(safe)).astype(np.int64)
    too_much = overflows(np.ldexp(safe, np.clip(bits, -1000, 1000).astype(np.int32)), target)
    return np.where(known, bits - too_much, NOTHING)


def scale_path(peaks_by_step: Mapping[int, float], target: Format, limits: Limits, fixed_bits: int | None = None) -> ScalePath:
    """The path of a dynamic loss scaler over gradients whose largest magnitude at each step is known.

    It starts at the best value there is: the largest that at most one step in a hundred overflows. From there it does what
    torch's GradScaler does: halve and skip on overflow, double after 2000 clean steps.
    """
    steps = np.array(sorted(peaks_by_step), dtype=np.int64)
    most = limit_bits(np.array([peaks_by_step[int(step)] for step in steps], dtype=np.float64), target)
    steps, most = steps[most < NOTHING], most[most < NOTHING]
    if fixed_bits is not None or not len(steps):
        return ScalePath(steps, most, np.full(len(steps), fixed_bits or 0), fixed_bits is not None)
    scale = int(np.quantile(most, limits.skip_rate_warn, method="lower"))
    changed = int(steps[0])
    path = np.empty(len(steps), dtype=np.int64)
    for i, (step, limit) in enumerate(zip(steps.tolist(), most.tolist())):
        if step - changed >= GROWTH_INTERVAL:
            scale, changed = scale + 1, step
        path[i] = scale
        if scale > limit:
            scale, changed = scale - 1, step
    return ScalePath(steps, most, path, False)
