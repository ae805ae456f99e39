"""What a run has shown so far: the baseline against which rules judge a step, and the facts from which causes are told.

One `RunHistory` for both, fed with each step once. Bounded in memory, and without torch.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from ..core.examination import Examination
from ..core.finding import Finding
from ..core.limits import Limits
from ..core.step import CURVES, TOLD, OptimizerState, QuietSteps, SiteTable, StepRecord, Update, unchanged_share
from .evidence import Evidence, GradientLevel, Reach, RunFacts, Surprise
from .first_nonfinite import bad_sites, culprit_of, forward_culprit

MOST_INCIDENTS = 12
MOST_POINTS = 64
MOST_PARAMETERS = 512
LONGEST_CURVE = 20_000
SAME_UNIT = 1.5  # two sums are compared if one has at most so many times the terms of the other
_LOW = math.log(1e-2)  # of its own average


@dataclass(frozen=True)
class Deviation:
    """How far a value is from its own history: robust z-score and ratio to the median."""

    value: float
    median: float
    past: Sequence[float]  # as it is now
    logarithmic: bool

    @property
    def ratio(self) -> float:
        return self.value / self.median if self.median else math.inf

    @cached_property
    def zscore(self) -> float:
        """By the median absolute deviation; asked for by those alone whom the ratio has not satisfied."""
        values = [math.log(v) for v in self.past] if self.logarithmic else self.past
        middle = median(values)
        # a perfectly steady history still deserves a little room: 1 % of a factor, or of the level
        room = max(0.01 * (1.0 if self.logarithmic else abs(middle)), 1e-12)
        spread = max(1.4826 * median([abs(v - middle) for v in values]), room)
        return ((math.log(self.value) if self.logarithmic else self.value) - middle) / spread


class Recent(deque[float]):
    """The last finite numbers of a run, which are also kept in order of size: a median is asked for at every step.

    Each has a unit (`StepRecord.loss_unit`, `norm_unit`): only numbers of about the same one can be compared.
    """

    def __init__(self, depth: int) -> None:
        super().__init__(maxlen=depth)
        self.ranked: list[float] = []
        self._units: deque[float] = deque(maxlen=depth)
        self._first_unit: float | None = None
        self._is_mixed = False

    def append(self, value: float, unit: float = 1.0) -> None:
        if len(self) == self.maxlen:
            del self.ranked[bisect_left(self.ranked, self[0])]
        insort(self.ranked, value)
        self._units.append(unit)
        self._first_unit = unit if self._first_unit is None else self._first_unit
        self._is_mixed = self._is_mixed or unit != self._first_unit
        super().append(value)

    def add_all(self, values: Sequence[float]) -> None:
        """Of the one unit that there is."""
        self.extend(values)
        self._units.extend([self._units[-1]] * len(values))
        self.ranked = sorted(self)

    def median_bounds(self, more: int) -> tuple[float, float] | None:
        """Between which numbers the median stays, whatever the next ones are: each moves it by one place at most."""
        low, high = (len(self) - 1) // 2 - more, len(self) // 2 + more
        return (self.ranked[low], self.ranked[high]) if low >= 0 and high < len(self) else None

    def is_of(self, unit: float) -> bool:
        return not self._is_mixed and unit == (self._first_unit or unit)

    def comparable(self, unit: float) -> Sequence[float]:
        """Those of about this unit; itself if all are."""
        if self.is_of(unit):
            return self
        return [value for value, known in zip(self, self._units) if unit / SAME_UNIT <= known <= unit * SAME_UNIT]


def deviation(history: Iterable[float], value: float, logarithmic: bool = True) -> Deviation | None:
    """Median and MAD, of logarithms for what scales by factors. None if there is nothing to compare."""
    if isinstance(history, Recent):
        ranked = history.ranked
    else:
        ranked = sorted(float(v) for v in history if math.isfinite(v))
    if logarithmic and ranked and ranked[0] <= 0:
        ranked = [v for v in ranked if v > 0]
    if not ranked or not math.isfinite(value) or (logarithmic and value <= 0):
        return None
    low, high = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    usual = math.exp((math.log(low) + math.log(high)) / 2) if logarithmic else (low + high) / 2
    return Deviation(value, usual, ranked, logarithmic)


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
        self.has_streaks = True  # a site is new, or has been zero or low for some steps
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
            self.has_streaks = True
        return slice(None) if names == self.names else np.array([self._column[n] for n in names], dtype=np.int64)

    def ring(self, names: tuple[str, ...]) -> np.ndarray:
        """The last norms of these, [steps, sites], in no order; NaN where there was none."""
        at = self.columns(names)  # may make new ones, so it comes first
        return self._ring[:, at]

    def past(self, name: str) -> np.ndarray:
        values = self._ring[:, self._column[name]] if name in self._column else np.zeros(0)
        return values[~np.isnan(values)]

    def add(self, table: SiteTable, keep: bool) -> None:
        """`keep` False (a skipped or bad step): streaks count on, the baseline does not learn from it."""
        at = self.columns(table.names)
        norm = np.asarray(table.columns["norm"], dtype=np.float64)
        if keep and table.are_all_live and not self.has_streaks and isinstance(at, slice):
            self.add_steady(norm[None])
            return
        measured = np.asarray(table.columns["count"]) > 0
        good = measured & (norm > 0) & (norm < np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            drift = np.where(good, np.log(np.where(good, norm, 1.0)) - self.level[at], 0.0)
        zero = measured & (norm == 0)
        ended = measured & ~zero
        self.zero_record[at] = np.where(ended, np.maximum(self.zero_record[at], self.zero_steps[at]), self.zero_record[at])
        self.zero_steps[at] = np.where(measured, np.where(zero, self.zero_steps[at] + 1, 0), self.zero_steps[at])
        self.low_steps[at] = np.where(drift < _LOW, self.low_steps[at] + 1, 0)
        if keep:
            self.ever[at] |= good
            first = good & np.isnan(self.level[at])
            level = np.where(first, np.log(np.where(good, norm, 1.0)), self.level[at] + np.where(good, 0.05 * drift, 0.0))
            self.level[at] = level
            row = np.full(self._ring.shape[1], np.nan)
            row[at] = np.where(good, norm, np.nan)
            self._ring[self._next] = row
            self._next = (self._next + 1) % len(self._ring)
        self.has_streaks = bool(self.zero_steps.any() or self.low_steps.any() or not self.ever.all())

    def add_steady(self, norms: np.ndarray) -> None:
        """The same for steps at which every site has a value, as before, and nothing lasts: a tenth of the calls."""
        for row, norm in zip(np.log(norms), norms):
            drift = row - self.level
            if drift.min(initial=0.0) < _LOW:
                self.low_steps[drift < _LOW] = 1
                self.has_streaks = True
            drift *= 0.05
            self.level += drift
            self._ring[self._next] = norm
            self._next = (self._next + 1) % len(self._ring)

    def will_be_steady(self, names: tuple[str, ...], norms: np.ndarray) -> bool:
        """Does nothing last, and will nothing begin to, at any of these steps? An average stays below the largest."""
        if names != self.names or self.has_streaks:
            return False
        highest = np.maximum(self.level, np.log(norms.max(axis=0)))
        return bool((np.log(norms.min(axis=0)) - highest > 0.99 * _LOW).all())

    def drift(self, table: SiteTable) -> np.ndarray:
        """Logarithm of each norm against its slow average; 0 where nothing is known."""
        at = self.columns(table.names)
        norm = np.asarray(table.columns["norm"], dtype=np.float64)
        ok = np.isfinite(norm) & (norm > 0) & ~np.isnan(self.level[at])
        return np.where(ok, np.log(np.where(ok, norm, 1.0)) - np.where(ok, self.level[at], 0.0), 0.0)


class RunHistory:
    """The run so far: baselines for the rules, into which only clean steps (not skipped, finite) enter, and facts for the causes.

    `facts` folds every field of the step records without knowing them; what needs more than that has a method of its own.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        depth = int(self.limits.history_steps)
        self.steps = 0
        self.told: set[str] = set()  # codes that are told once
        self.losses = Recent(depth)
        self.first_losses: list[float] = []
        self.first_norms: list[float] = []
        self.norms = Recent(depth)
        self.grads = SiteHistory(depth)
        self.skips: deque[bool] = deque(maxlen=int(self.limits.skip_window))
        self.skips_in_row = 0
        self.stepped_once = False  # GradScaler has let a step through
        self.scales: deque[float] = deque(maxlen=depth)
        self.first_good_scale: float | None = None  # at which a step passed
        self.pinned = 0  # skips in a row that left the scale as it was
        self.searches_begun = 0  # anew, from a higher scale, before the last one had let a step through
        self.last_skipped = False
        self.schedule_skips = 0  # skipped steps behind which the learning rate was another
        self.same_loss = 0  # steps in a row with a bit-identical loss
        self.loss_high = 0
        self.loss_jump = 0.0  # the first of them, if the updates before were usual
        self.norm_high = 0
        self.exploding = False  # and that has been told
        self.bad_buffers: frozenset[str] = frozenset()  # not finite from the start: masks
        self.amp_dtype = ""
        self.last_trace: StepRecord | None = None
        self.last_bad_step: int | None = None
        self.weights_bad = False
        self.examinations: list[Examination] = []
        self._told: Counter[str] = Counter()
        self._first: dict[str, Any] = {}
        self._first_steps: dict[str, int] = {}
        self._latest: dict[str, Any] = {}
        self._largest: dict[str, float] = {}
        self._facts = RunFacts()  # what is not folded field by field
        self.scalars: dict[str, float] = {}  # of the last step
        self._curves: dict[str, tuple[array[int], array[float]]] = {}
        self._column: dict[str, int] = {}
        self._known: tuple[tuple[str, ...], Any] = ((), slice(0))  # names asked for last, and their columns
        self._counts = np.zeros((4, 0))  # per parameter: steps read, of them zero; average of the squared norm, steps in that
        self._first_grads: SiteTable | None = None
        self._last_grads: SiteTable | None = None

    def add(self, step: StepRecord) -> None:
        self.steps += 1
        self._fold(step)
        self._add_curves(step)
        self._add_weights(step)
        self._add_incident(step)
        self._add_buffers(step)
        self._add_updates(step)
        self._add_gradients(step)
        self._add_reach(step)
        self.amp_dtype = step.amp_dtype or self.amp_dtype
        self._add_scale(step)
        norm = grad_norm(step)
        bad = step.skipped or (norm is not None and not math.isfinite(norm)) or not _finite(step.loss)
        if bad:
            self.last_bad_step = step.step
        self._add_loss(step)
        if norm is not None:
            known = deviation(self.norms.comparable(step.norm_unit), norm) if norm > 0 and not bad else None
            self.norm_high = self.norm_high + 1 if known and known.ratio > self.limits.grad_ratio else 0
            if not bad and norm > 0:
                self.norms.append(norm, step.norm_unit)
                if len(self.first_norms) < self.limits.baseline_steps:
                    self.first_norms.append(norm)
        if step.grads is not None:
            self.grads.add(step.grads, keep=not bad)
        producer = forward_culprit(step) if step.bad_calls else None
        self.weights_bad = self.weights_bad or (producer is not None and producer.code == "WEIGHT_NONFINITE")
        if step.traced:
            self.last_trace = step

    def are_steady(self, quiet: QuietSteps) -> bool:
        """Does `add` do nothing to any of these steps but what `add_quiet` does to all of them at once?"""
        grads, enough = quiet.last.grads, self.limits.baseline_steps
        if grads is None or self._first_grads is None or "loss" not in self._first or len(quiet) > len(self.norms):
            return False
        if (quiet.rates is not None and "lr" not in self._first) or min(len(self.first_losses), len(self.first_norms)) < enough:
            return False
        usual = self.norms.median_bounds(len(quiet))
        if usual is None or not (self.losses.is_of(quiet.last.loss_unit) and self.norms.is_of(quiet.last.norm_unit)):
            return False
        is_high = quiet.whole_norms.max() > 0.999 * self.limits.grad_ratio * usual[0]  # of the median that it will have
        return not is_high and self.grads.will_be_steady(grads.names, quiet.norms)

    def add_quiet(self, quiet: QuietSteps) -> dict[str, np.ndarray]:
        """`add` of steps that are usual. Gives what they have added to the curves."""
        last, losses = quiet.last, quiet.losses.tolist()
        assert last.grads is not None
        self.steps += len(quiet)
        self._fold(last, len(quiet))
        for name, values in (("loss", quiet.losses), ("lr", quiet.rates)):
            if values is not None:
                self._largest[name] = max(self._largest.get(name, -math.inf), float(values.max()))
        self.scalars = step_scalars(last)
        changing = {"loss": quiet.losses, "lr": quiet.rates, "step_ms": 1e3 * quiet.seconds, "grad_norm": quiet.whole_norms}
        columns = {n: changing[n] if n in changing else np.full(len(quiet), value) for n, value in self.scalars.items()}
        for name, values in columns.items():
            self._extend_curve(name, quiet.steps, values)
        self._count_gradients(last, last.grads, quiet.steps, quiet.norms)
        for _ in quiet.steps:
            self._add_scale(last)
        for before, loss in pairwise([self.losses[-1], *losses]):
            self.same_loss = self.same_loss + 1 if loss == before else 0
        self.losses.add_all(losses)
        self.norms.add_all(quiet.whole_norms.tolist())
        self.norm_high = 0
        self.grads.add_steady(quiet.norms)
        return columns

    def _fold(self, step: StepRecord, times: int = 1) -> None:
        fields = vars(step)
        for name, nothing, condition in TOLD:
            value = fields[name]
            if value is nothing or value == nothing or (condition and not fields[condition]):
                continue
            self._told[name] += times
            if name not in self._first:
                self._first[name], self._first_steps[name] = value, step.step
            self._latest[name] = value
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > self._largest.get(name, -math.inf):
                self._largest[name] = value

    @property
    def lost_updates(self) -> tuple[Update, ...]:
        """Of the 16-bit weights, at the first and worst probed step at which most of them stayed as they were."""
        return tuple(u for u in self._facts.lost_updates if u.may_be_lost)

    @property
    def optimizers(self) -> tuple[OptimizerState, ...]:
        """As they were last told."""
        told: tuple[OptimizerState, ...] = self._latest.get("optimizers", ())
        return told

    @property
    def facts(self) -> RunFacts:
        early, late = (() if t is None else self._levels(t) for t in (self._first_grads, self._last_grads))
        return replace(
            self._facts,
            steps=self.steps,
            counts=dict(self._told),
            first=StepRecord(0, **self._first),
            first_steps=dict(self._first_steps),
            latest=StepRecord(0, **self._latest),
            largest=dict(self._largest),
            early_levels=early,
            levels=late,
        )

    def evidence(self, findings: Sequence[Finding]) -> Evidence:
        scalars = {name: (np.array(steps, np.int64), np.array(values)) for name, (steps, values) in self._curves.items()}
        return Evidence(self.facts, scalars, tuple(findings), tuple(self.examinations), self.limits)

    def add_examination(self, examination: Examination) -> None:
        """A step that was made again is told by that examination."""
        self.examinations = [*(e for e in self.examinations if e.step != examination.step), examination]

    def _add_curves(self, step: StepRecord) -> None:
        self.scalars = step_scalars(step)
        for name, value in self.scalars.items():
            self._extend_curve(name, (step.step,), (value,))

    def _extend_curve(self, name: str, steps: Sequence[int], values: Any) -> None:
        known, numbers = self._curves.setdefault(name, (array("q"), array("d")))
        room = LONGEST_CURVE - len(known)
        if room > 0:
            known.extend(steps[:room])
            numbers.extend(values[:room])

    def _add_weights(self, step: StepRecord) -> None:
        if step.weights is not None and not self._facts.parameters:
            names = step.weights.names[:MOST_PARAMETERS]
            sizes = {n: math.prod(shape) for n, shape in zip(names, step.weights.shapes)}
            vectors = tuple(n for n, shape in zip(names, step.weights.shapes) if len(shape) < 2)
            self._facts = replace(self._facts, parameters=names, sizes=sizes, vectors=vectors)

    def _add_incident(self, step: StepRecord) -> None:
        bad = bad_sites(step.grads)
        loss_bad = step.loss is not None and not math.isfinite(step.loss)
        if not bad and not loss_bad and not step.skipped:
            return
        self._facts = replace(self._facts, bad_steps=self._facts.bad_steps + 1)
        searches = step.skipped and not loss_bad and not step.bad_calls  # for a loss scale: leaves room for what comes of itself
        if len(self._facts.incidents) >= (MOST_INCIDENTS // 2 if searches else MOST_INCIDENTS):
            return
        culprit = culprit_of(replace(step, skipped=False, between=()))
        nan = False
        if step.grads is not None and bad:
            low = np.asarray(step.grads.columns["min"])
            nan = bool(np.isnan(low[[step.grads.names.index(n) for n in bad]]).any())
        one = step.without_tables(
            bad_grads=tuple(bad[-8:]),
            nan_grads=nan,
            bad_calls=step.bad_calls[:3],
            culprit_code=culprit.code if culprit is not None else "",
            culprit_site=culprit.site if culprit is not None else "",
        )
        self._facts = replace(self._facts, incidents=(*self._facts.incidents, one))

    def _add_buffers(self, step: StepRecord) -> None:
        bad = tuple(n for n in bad_sites(step.buffers) if n not in self.bad_buffers)
        if bad and not self._facts.bad_buffers:
            self._facts = replace(self._facts, bad_buffers=bad, bad_buffers_step=step.step)

    def _add_updates(self, step: StepRecord) -> None:
        if not step.updates or step.skipped:
            return
        part, known = unchanged_share(step.updates), unchanged_share(self._facts.lost_updates)
        lost = part is not None and part > self.limits.unchanged_share_warn
        self._facts = replace(
            self._facts,
            updates=step.updates[:MOST_PARAMETERS],
            updates_step=step.step,
            probes=self._facts.probes + (part is not None),
            lost_probes=self._facts.lost_probes + lost,
        )
        if part is not None and lost and (known is None or known <= self.limits.unchanged_share_error < part):
            self._facts = replace(self._facts, lost_updates=self._facts.updates, lost_step=step.step)

    def _add_gradients(self, step: StepRecord) -> None:
        norm = grad_norm(step)
        if step.grads is None or norm is None or not math.isfinite(norm):
            return
        norms = np.asarray(step.grads.columns["norm"], dtype=np.float64)
        self._count_gradients(step, step.grads, [step.step], norms[None])

    def _count_gradients(self, last: StepRecord, grads: SiteTable, steps: list[int], norms: np.ndarray) -> None:
        """Of steps that are alike; `grads` are those of the last."""
        at = self._columns(grads.names)
        self._counts[0, at] += len(steps)
        if not grads.are_all_live:
            self._counts[1, at] += (norms == 0).sum(axis=0)
        if last.stepped and not last.skipped:
            self._add_surprises(steps, grads.names, at, norms)
        self._first_grads, self._last_grads = self._first_grads or grads, grads

    def _columns(self, names: tuple[str, ...]) -> Any:
        if names != self._known[0]:
            new = [n for n in names if n not in self._column]
            if new:
                self._column.update(zip(new, range(len(self._column), len(self._column) + len(new))))
                self._counts = np.concatenate([self._counts, np.zeros((4, len(new)))], axis=1)
            whole = names == tuple(self._column)
            self._known = names, slice(None) if whole else np.array([self._column[n] for n in names], dtype=np.int64)
        return self._known[1]

    def _add_surprises(self, steps: list[int], names: tuple[str, ...], at: Any, norms: np.ndarray) -> None:
        """What Adam's second moment makes of the norms: the same recurrence, on whole parameters."""
        beta2 = next((o.beta2 for o in self.optimizers if o.beta2 is not None), None)
        if beta2 is None:
            return
        average, n = self._counts[2, at], self._counts[3, at] + np.arange(len(steps))[:, None]
        averages = np.empty_like(norms)
        for before, new in zip(averages, (1 - beta2) * np.square(norms)):
            before[:] = average
            average = beta2 * average + new
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(averages > 0, norms / np.sqrt(averages / (1 - beta2**n)), 0.0)
        self._counts[2, at] = average
        self._counts[3, at] += len(steps)
        for i in np.flatnonzero(ratio.max(axis=1) > self.limits.surprise_noted):
            worst = int(ratio[i].argmax())
            one = Surprise(steps[i], names[worst], float(ratio[i, worst]))
            known = sorted((*self._facts.surprises, one), key=lambda s: -s.ratio)[:MOST_POINTS]
            self._facts = replace(self._facts, surprises=tuple(sorted(known, key=lambda s: s.step)))

    def _levels(self, grads: SiteTable) -> tuple[GradientLevel, ...]:
        columns = grads.columns
        largest = np.maximum(np.abs(np.asarray(columns["min"])), np.abs(np.asarray(columns["max"])))
        read, zeros = self._counts[:2, self._columns(grads.names)].astype(int)
        numbers = [x[:MOST_PARAMETERS].tolist() for x in (np.asarray(columns["norm"]), largest, zeros, read)]
        return tuple(
            GradientLevel(name, norm, most, dtype, none, times)
            for name, dtype, norm, most, none, times in zip(grads.names, grads.dtypes, *numbers)
        )

    def _add_reach(self, step: StepRecord) -> None:
        if step.outputs is None:
            return
        low, high = np.asarray(step.outputs.columns["min"]), np.asarray(step.outputs.columns["max"])
        largest = np.maximum(np.abs(low), np.abs(high))
        narrow = [i for i, d in enumerate(step.outputs.dtypes) if d == "float16" and np.isfinite(largest[i])]
        if narrow:
            top = max(narrow, key=lambda i: largest[i])
            first = next(i for i in narrow if largest[i] >= 0.9 * largest[top])  # later ones mostly hand it on
            one = Reach(step.step, step.outputs.names[first], float(largest[first]))
            self._facts = replace(self._facts, reach=(*self._facts.reach, one)[-MOST_POINTS:])

    def _add_loss(self, step: StepRecord) -> None:
        if step.loss is None or not math.isfinite(step.loss):
            self.same_loss = 0
            return
        self.same_loss = self.same_loss + 1 if self.losses and self.losses[-1] == step.loss else 0
        self.losses.append(step.loss, step.loss_unit)
        if len(self.first_losses) < self.limits.baseline_steps:
            self.first_losses.append(step.loss)

    def _add_scale(self, step: StepRecord) -> None:
        if step.scale is None or not step.stepped:
            return
        self.pinned = self.pinned + 1 if self.is_pinned(step) else 0
        self.searches_begun += self.is_begun_anew(step)
        if step.skipped:
            self.skips_in_row += 1
        else:
            self.skips_in_row = self.searches_begun = 0
            self.stepped_once = True
            self.first_good_scale = self.first_good_scale or step.scale
        if self.stepped_once:
            self.skips.append(step.skipped)
        self.scales.append(step.scale)
        self.last_skipped = step.skipped

    def is_pinned(self, step: StepRecord) -> bool:
        """Skipped like the step before it, at a scale that hardly fell in between."""
        if not (step.skipped and self.last_skipped) or step.scale is None or not self.scales:
            return False
        return step.scale >= self.limits.scale_stuck * self.scales[-1]

    def is_begun_anew(self, step: StepRecord) -> bool:
        return self.is_pinned(step) and step.scale is not None and step.scale > self.scales[-1]


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def grad_norm(step: StepRecord) -> float | None:
    """Global norm of the true gradients; NaN or infinite if one of them is."""
    return None if step.grads is None else step.grads.whole_norm


def step_scalars(step: StepRecord) -> dict[str, float]:
    """The numbers of the whole run at one step, by the names under which they are stored."""
    fields = vars(step)
    values: dict[str, float | None] = {
        **{curve: fields[name] for name, curve in CURVES.items()},
        "step_ms": None if step.seconds is None else 1e3 * step.seconds,
        "grad_norm": grad_norm(step),
        "weight_norm": None if step.weights is None else step.weights.whole_norm,  # as it found them; at the end, as it left them
        "skipped": float(step.skipped) if step.scale is not None else None,
        "traced": 1.0 if step.traced else None,
    }
    moving = [u for u in step.updates if u.count and u.lr]
    total = sum(u.count for u in moving)
    if total:
        values["unchanged_share"] = sum(u.unchanged for u in moving) / total
        values["update_ratio"] = max((u.update_rms / u.weight_rms for u in moving if u.weight_rms), default=0.0)
    return {name: value for name, value in values.items() if value is not None}
