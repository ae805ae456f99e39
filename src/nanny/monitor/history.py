"""What a run has shown so far: the baseline against which a step is judged. Bounded in memory, and without torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.limits import Limits
from ..core.step import SiteTable, StepRecord
from .culprit import forward_culprit


@dataclass(frozen=True)
class Deviation:
    """How far a value is from its own history: robust z-score and ratio to the median."""

    zscore: float
    ratio: float
    median: float


def deviation(history: Iterable[float], value: float, logarithmic: bool = True) -> Deviation | None:
    """Median and MAD, of logarithms for what scales by factors. None if there is nothing to compare."""
    known = np.asarray([v for v in history if math.isfinite(v) and (v > 0 or not logarithmic)])
    if not known.size or not math.isfinite(value) or (logarithmic and value <= 0):
        return None
    values = np.log(known) if logarithmic else known
    x = math.log(value) if logarithmic else value
    middle = float(np.median(values))
    # a perfectly steady history still deserves a little room: 1 % of a factor, or of the level
    spread = max(1.4826 * float(np.median(np.abs(values - middle))), 0.01 * (1.0 if logarithmic else abs(middle)), 1e-12)
    median = math.exp(middle) if logarithmic else middle
    return Deviation((x - middle) / spread, value / median if median else math.inf, median)


class SiteHistory:
    """The last norms of every site of a kind, and for how many measured steps in a row each was exactly zero or bad."""

    def __init__(self, depth: int) -> None:
        self.names: tuple[str, ...] = ()
        self._column: dict[str, int] = {}
        self._ring = np.full((depth, 0), np.nan)
        self._next = 0
        self.zero_steps = np.zeros(0, dtype=np.int64)
        self.zero_record = np.zeros(0, dtype=np.int64)  # the longest run of zeros that came to an end
        self.low_steps = np.zeros(0, dtype=np.int64)
        self.ever = np.zeros(0, dtype=bool)  # had a finite, non-zero value
        self.level = np.zeros(0)  # slow average of the logarithm, a cheap screen before medians are taken

    def columns(self, names: tuple[str, ...]) -> Any:
        """Positions of these names here, which are made as needed."""
        if names == self.names:
            return slice(None)
        new = [n for n in names if n not in self._column]
        for name in new:
            self._column[name] = len(self._column)
        if new:
            self.names = tuple(self._column)
            grow = len(new)
            self._ring = np.concatenate([self._ring, np.full((len(self._ring), grow), np.nan)], axis=1)
            for field in ("zero_steps", "zero_record", "low_steps"):
                setattr(self, field, np.concatenate([getattr(self, field), np.zeros(grow, dtype=np.int64)]))
            self.ever = np.concatenate([self.ever, np.zeros(grow, dtype=bool)])
            self.level = np.concatenate([self.level, np.full(grow, np.nan)])
        return slice(None) if names == self.names else np.array([self._column[n] for n in names], dtype=np.int64)

    def past(self, name: str) -> np.ndarray:
        values = self._ring[:, self._column[name]] if name in self._column else np.zeros(0)
        return values[~np.isnan(values)]

    def add(self, table: SiteTable, keep: bool) -> None:
        """`keep` False (a skipped or bad step): streaks count on, the baseline does not learn from it."""
        at = self.columns(table.names)
        norm = np.asarray(table.columns["norm"], dtype=np.float64)
        measured = np.asarray(table.columns["count"]) > 0
        good = measured & np.isfinite(norm) & (norm > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            drift = np.where(good, np.log(np.where(good, norm, 1.0)) - self.level[at], 0.0)
        zero = measured & (norm == 0)
        ended = measured & ~zero
        self.zero_record[at] = np.where(ended, np.maximum(self.zero_record[at], self.zero_steps[at]), self.zero_record[at])
        self.zero_steps[at] = np.where(measured, np.where(zero, self.zero_steps[at] + 1, 0), self.zero_steps[at])
        self.low_steps[at] = np.where(drift < math.log(1e-2), self.low_steps[at] + 1, 0)
        if not keep:
            return
        self.ever[at] |= good
        first = good & np.isnan(self.level[at])
        level = np.where(first, np.log(np.where(good, norm, 1.0)), self.level[at] + np.where(good, 0.05 * drift, 0.0))
        self.level[at] = level
        row = np.full(self._ring.shape[1], np.nan)
        row[at] = np.where(good, norm, np.nan)
        self._ring[self._next] = row
        self._next = (self._next + 1) % len(self._ring)

    def drift(self, table: SiteTable) -> np.ndarray:
        """Logarithm of each norm against its slow average; 0 where nothing is known."""
        at = self.columns(table.names)
        norm = np.asarray(table.columns["norm"], dtype=np.float64)
        ok = np.isfinite(norm) & (norm > 0) & ~np.isnan(self.level[at])
        return np.where(ok, np.log(np.where(ok, norm, 1.0)) - np.where(ok, self.level[at], 0.0), 0.0)


class RunHistory:
    """The run so far. Only clean steps (not skipped, finite) enter the baselines."""

    def __init__(self, limits: Limits | None = None, bad_buffers: frozenset[str] = frozenset()) -> None:
        self.limits = limits or Limits()
        depth = int(self.limits.history_steps)
        self.steps = 0
        self.losses: deque[float] = deque(maxlen=depth)
        self.first_losses: list[float] = []
        self.first_norms: list[float] = []
        self.norms: deque[float] = deque(maxlen=depth)
        self.grads = SiteHistory(depth)
        self.skips: deque[bool] = deque(maxlen=int(self.limits.skip_window))
        self.skips_in_row = 0
        self.stepped_once = False  # GradScaler has let a step through
        self.scales: deque[float] = deque(maxlen=depth)
        self.first_scale: float | None = None
        self.pinned = 0  # skips in a row that left the scale as it was
        self.last_skipped = False
        self.same_loss = 0  # steps in a row with a bit-identical loss
        self.loss_high = 0
        self.norm_high = 0
        self.exploding = False  # and that has been told
        self.bad_buffers = bad_buffers  # not finite from the start: masks
        self.amp_dtype = ""
        self.last_trace: StepRecord | None = None
        self.last_bad_step: int | None = None
        self.weights_bad = False

    def add(self, step: StepRecord) -> None:
        self.steps += 1
        self.amp_dtype = step.amp_dtype or self.amp_dtype
        self._add_scale(step)
        norm = grad_norm(step)
        bad = step.skipped or (norm is not None and not math.isfinite(norm)) or not _finite(step.loss)
        if bad:
            self.last_bad_step = step.step
        self._add_loss(step)
        if norm is not None:
            known = deviation(self.norms, norm) if norm > 0 and not bad else None
            self.norm_high = self.norm_high + 1 if known and known.ratio > self.limits.grad_ratio else 0
            if not bad and norm > 0:
                self.norms.append(norm)
                if len(self.first_norms) < self.limits.baseline_steps:
                    self.first_norms.append(norm)
        if step.grads is not None:
            self.grads.add(step.grads, keep=not bad)
        producer = forward_culprit(step) if step.bad_calls else None
        self.weights_bad = self.weights_bad or (producer is not None and producer.code == "WEIGHT_NONFINITE")
        if step.traced:
            self.last_trace = step

    def _add_loss(self, step: StepRecord) -> None:
        if step.loss is None or not math.isfinite(step.loss):
            self.same_loss = 0
            return
        self.same_loss = self.same_loss + 1 if self.losses and self.losses[-1] == step.loss else 0
        self.losses.append(step.loss)
        if len(self.first_losses) < self.limits.baseline_steps:
            self.first_losses.append(step.loss)

    def _add_scale(self, step: StepRecord) -> None:
        if step.scale is None or not step.stepped:
            return
        if self.first_scale is None:
            self.first_scale = step.scale
        self.pinned = self.pinned + 1 if self.is_pinned(step) else 0
        if step.skipped:
            self.skips_in_row += 1
        else:
            self.skips_in_row = 0
            self.stepped_once = True
        if self.stepped_once:
            self.skips.append(step.skipped)
        self.scales.append(step.scale)
        self.last_skipped = step.skipped

    def is_pinned(self, step: StepRecord) -> bool:
        """Skipped like the step before it, at a scale that did not fall in between."""
        return (
            step.skipped and self.last_skipped and step.scale is not None and bool(self.scales) and step.scale >= self.scales[-1]
        )


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def grad_norm(step: StepRecord) -> float | None:
    """Global norm of the true gradients; NaN or infinite if one of them is."""
    if step.grads is None:
        return None
    norms = np.asarray(step.grads.columns["norm"], dtype=np.float64)
    measured = np.asarray(step.grads.columns["count"]) > 0
    if not measured.any():
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.square(norms[measured]).sum()))
