"""What a diagnosis works from: the curves of a run, its findings, its examined steps, and facts about its loop.

`Gathering` folds step records into it while the run goes on; `Evidence` is the same whether it comes from there or from a
store. Bounded in memory, plain data, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..core.examination import Examination
from ..core.finding import Finding, Severity
from ..core.limits import Limits
from ..core.step import Autopsy, BadCall, Growth, OptimizerState, SiteTable, StepRecord, Update
from ..monitor.culprit import bad_sites, culprit_of
from ..monitor.history import grad_norm

MOST_INCIDENTS = 12
MOST_POINTS = 64
MOST_PARAMETERS = 512
LONGEST_CURVE = 20_000


@dataclass(frozen=True)
class Incident:
    """A step at which the loss or a gradient was not finite."""

    step: int
    loss: float | None = None
    scale: float | None = None
    skipped: bool = False
    traced: bool = False
    bad_grads: tuple[str, ...] = ()  # the last one is nearest to the loss
    grads: int = 0  # that were read
    nan: bool = False  # one of them holds NaN, not only infinities
    code: str = ""  # of the first producer, as the rules name it
    site: str = ""
    said: str = ""
    calls: tuple[BadCall, ...] = ()
    autopsy: Autopsy | None = None
    singular: Autopsy | None = None


@dataclass(frozen=True)
class Level:
    """A gradient's norm at some step."""

    name: str
    norm: float
    largest: float
    dtype: str = ""
    zeros: int = 0  # steps at which it was exactly zero
    steps: int = 0  # at which it was read


@dataclass(frozen=True)
class Surprise:
    """A gradient that the optimizer's second moment did not expect: |g| / sqrt(v)."""

    step: int
    name: str
    ratio: float


@dataclass(frozen=True)
class Reach:
    """The largest magnitude of a 16-bit module output at a traced step."""

    step: int
    site: str
    largest: float


@dataclass(frozen=True)
class RunFacts:
    """How the loop treats loss, gradients, scaler and optimizer, and what was seen at its worst steps."""

    steps: int = 0
    optimizer_steps: int = 0  # at which an optimizer was asked to step
    calls: tuple[str, ...] = ()  # of the last such step, in order
    amp_dtype: str = ""
    root_site: str = ""
    parameters: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # elements of each
    low_parameters: tuple[str, ...] = ()  # of them, kept in 16 bits or less
    scalers: int = 0
    scaler_steps: int = 0
    scale_given: int = 0  # steps whose update() was told the scale
    scale_static: bool = False
    clipped_scaled: int = 0
    clips: int = 0
    stale: int = 0  # steps that began with non-finite gradients of an earlier one
    stale_names: tuple[str, ...] = ()
    backwards: int = 0  # the most in one step
    loss_dtype: str = ""
    loss_factor: float | None = None  # the largest number by which the loss was multiplied by hand
    incidents: tuple[Incident, ...] = ()
    bad_steps: int = 0
    bad_buffers: tuple[str, ...] = ()
    bad_buffers_step: int | None = None
    optimizers: tuple[OptimizerState, ...] = ()
    updates: tuple[Update, ...] = ()  # of the last step that was probed
    updates_step: int | None = None
    lost_probes: int = 0  # probed steps at which most of the 16-bit weights stayed as they were
    probes: int = 0
    early_levels: tuple[Level, ...] = ()  # gradients of the first clean step
    levels: tuple[Level, ...] = ()  # of the last clean step
    surprises: tuple[Surprise, ...] = ()  # the largest, in order of time
    reach: tuple[Reach, ...] = ()
    growths: tuple[Growth, ...] = ()  # of the first step
    growths_step: int | None = None
    examinations: int = 0


@dataclass(frozen=True)
class Evidence:
    facts: RunFacts
    scalars: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # name -> steps, values
    findings: tuple[Finding, ...] = ()
    examinations: tuple[Examination, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return self.scalars.get(name, (np.zeros(0, np.int64), np.zeros(0)))

    def finding(self, *codes: str) -> Finding | None:
        """The first of these codes that is more than information."""
        return next((f for f in self.findings if f.code in codes and f.severity > 1), None)

    @property
    def first_bad_step(self) -> int | None:
        return self.facts.incidents[0].step if self.facts.incidents else None


def step_scalars(step: StepRecord) -> dict[str, float]:
    """The numbers of the whole run at one step, by the names under which they are stored."""
    values: dict[str, float | None] = {
        "loss": step.loss,
        "step_ms": None if step.seconds is None else 1e3 * step.seconds,
        "lr": step.lr,
        "grad_norm": grad_norm(step),
        "scale": step.scale,
        "clip": step.clipped,
        "skipped": float(step.skipped) if step.scale is not None else None,
        "traced": 1.0 if step.traced else None,
    }
    moving = [u for u in step.updates if u.count and u.lr]
    total = sum(u.count for u in moving)
    if total:
        values["unchanged_share"] = sum(u.unchanged for u in moving) / total
        values["update_ratio"] = max((u.update_rms / u.weight_rms for u in moving if u.weight_rms), default=0.0)
    return {name: value for name, value in values.items() if value is not None}


def looks_wrong(found: Sequence[Finding]) -> bool:
    """Is the next step worth an examination? What GradScaler does by itself while it looks for its scale is not."""
    return any(f.severity > Severity.INFO or f.code in ("GRAD_EXPLOSION", "LOSS_SPIKE") for f in found)


class Gathering:
    """Folds the steps of a run into facts, one after the other."""

    def __init__(self, limits: Limits | None = None, bad_buffers: frozenset[str] = frozenset()) -> None:
        self.limits = limits or Limits()
        self._facts = RunFacts()
        self.examinations: list[Examination] = []
        self.masks = bad_buffers  # not finite from the start
        self._curves: dict[str, tuple[list[int], list[float]]] = {}
        self._column: dict[str, int] = {}
        self._counts = np.zeros((4, 0))  # per parameter: steps read, of them zero; average of the squared norm, steps in that
        self._first: SiteTable | None = None
        self._last: SiteTable | None = None

    def add(self, step: StepRecord) -> None:
        for name, value in step_scalars(step).items():
            steps, values = self._curves.setdefault(name, ([], []))
            if len(steps) < LONGEST_CURVE:
                steps.append(step.step)
                values.append(value)
        facts = self._facts
        self._facts = replace(
            facts,
            steps=facts.steps + 1,
            optimizer_steps=facts.optimizer_steps + step.stepped,
            calls=step.calls if step.stepped else facts.calls,
            amp_dtype=step.amp_dtype or facts.amp_dtype,
            root_site=step.root_site or facts.root_site,
            scalers=facts.scalers + step.new_scaler,
            scaler_steps=facts.scaler_steps + (step.scale is not None),
            scale_given=facts.scale_given + step.scale_given,
            scale_static=facts.scale_static or step.scale_static,
            clips=facts.clips + (step.clipped is not None),
            clipped_scaled=facts.clipped_scaled + step.clipped_scaled,
            stale=facts.stale + bool(step.stale),
            stale_names=facts.stale_names or step.stale,
            backwards=max(facts.backwards, step.backwards),
            loss_dtype=step.loss_dtype or facts.loss_dtype,
            loss_factor=_larger(facts.loss_factor, step.loss_factor),
            optimizers=step.optimizers or facts.optimizers,
        )
        if step.weights is not None and not facts.parameters:
            narrow = tuple(n for n, d in zip(step.weights.names, step.weights.dtypes) if d not in ("float32", "float64"))
            names = step.weights.names[:MOST_PARAMETERS]
            sizes = {n: math.prod(shape) for n, shape in zip(names, step.weights.shapes)}
            self._facts = replace(self._facts, parameters=names, sizes=sizes, low_parameters=narrow[:MOST_PARAMETERS])
        if step.growths and not facts.growths:
            self._facts = replace(self._facts, growths=step.growths, growths_step=step.step)
        self._add_incident(step)
        self._add_buffers(step)
        self._add_updates(step)
        self._add_gradients(step)
        self._add_reach(step)

    @property
    def facts(self) -> RunFacts:
        early, late = (() if t is None else self._levels(t) for t in (self._first, self._last))
        return replace(self._facts, early_levels=early, levels=late)

    def add_examination(self, examination: Examination) -> None:
        self.examinations.append(examination)
        self._facts = replace(self._facts, examinations=self._facts.examinations + 1)

    def evidence(self, findings: Sequence[Finding]) -> Evidence:
        scalars = {name: (np.array(steps, np.int64), np.array(values)) for name, (steps, values) in self._curves.items()}
        return Evidence(self.facts, scalars, tuple(findings), tuple(self.examinations), self.limits)

    def _add_incident(self, step: StepRecord) -> None:
        bad = bad_sites(step.grads)
        loss_bad = step.loss is not None and not math.isfinite(step.loss)
        if not bad and not loss_bad and not step.skipped:
            return
        self._facts = replace(self._facts, bad_steps=self._facts.bad_steps + 1)
        if len(self._facts.incidents) >= MOST_INCIDENTS:
            return
        culprit = culprit_of(replace(step, skipped=False))
        nan = False
        if step.grads is not None and bad:
            low = np.asarray(step.grads.columns["min"])
            nan = bool(np.isnan(low[[step.grads.names.index(n) for n in bad]]).any())
        one = Incident(
            step=step.step, loss=step.loss, scale=step.scale, skipped=step.skipped, traced=step.traced,
            bad_grads=tuple(bad[-8:]), grads=0 if step.grads is None else len(step.grads.names), nan=nan,
            code=culprit.code if culprit is not None else "", site=culprit.site if culprit is not None else "",
            said=culprit.message if culprit is not None else "", calls=step.bad_calls[:3],
            autopsy=step.autopsy, singular=step.singular,
        )  # fmt: skip
        self._facts = replace(self._facts, incidents=(*self._facts.incidents, one))

    def _add_buffers(self, step: StepRecord) -> None:
        bad = tuple(n for n in bad_sites(step.buffers) if n not in self.masks)
        if bad and not self._facts.bad_buffers:
            self._facts = replace(self._facts, bad_buffers=bad, bad_buffers_step=step.step)

    def _add_updates(self, step: StepRecord) -> None:
        if not step.updates or step.skipped:
            return
        narrow = [u for u in step.updates if u.dtype in ("bfloat16", "float16") and u.count and u.lr]
        total = sum(u.count for u in narrow)
        lost = total > 0 and sum(u.unchanged for u in narrow) > self.limits.unchanged_share_warn * total
        self._facts = replace(
            self._facts,
            updates=step.updates[:MOST_PARAMETERS],
            updates_step=step.step,
            probes=self._facts.probes + (total > 0),
            lost_probes=self._facts.lost_probes + lost,
        )

    def _add_gradients(self, step: StepRecord) -> None:
        norm = grad_norm(step)
        if step.grads is None or norm is None or not math.isfinite(norm):
            return
        at = self._columns(step.grads.names)
        norms = np.asarray(step.grads.columns["norm"], dtype=np.float64)
        self._counts[0, at] += 1
        self._counts[1, at] += norms == 0
        self._add_surprise(step, step.grads.names, at, norms)
        self._first, self._last = self._first or step.grads, step.grads

    def _columns(self, names: tuple[str, ...]) -> np.ndarray:
        new = [n for n in names if n not in self._column]
        if new:
            self._column.update(zip(new, range(len(self._column), len(self._column) + len(new))))
            self._counts = np.concatenate([self._counts, np.zeros((4, len(new)))], axis=1)
        return np.array([self._column[n] for n in names], dtype=np.int64)

    def _add_surprise(self, step: StepRecord, names: tuple[str, ...], at: np.ndarray, norms: np.ndarray) -> None:
        """What Adam's second moment makes of the norms: the same recurrence, on whole parameters."""
        beta2 = next((o.beta2 for o in self._facts.optimizers if o.beta2 is not None), None)
        if beta2 is None or not step.stepped or step.skipped:
            return
        average, n = self._counts[2, at], self._counts[3, at]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(average > 0, norms / np.sqrt(average / (1 - beta2**n)), 0.0)
        self._counts[2, at] = beta2 * average + (1 - beta2) * np.square(norms)
        self._counts[3, at] += 1
        worst = int(np.argmax(ratio))
        if ratio[worst] > self.limits.surprise_noted:
            one = Surprise(step.step, names[worst], float(ratio[worst]))
            known = sorted((*self._facts.surprises, one), key=lambda s: -s.ratio)[:MOST_POINTS]
            self._facts = replace(self._facts, surprises=tuple(sorted(known, key=lambda s: s.step)))

    def _levels(self, grads: SiteTable) -> tuple[Level, ...]:
        columns = grads.columns
        largest = np.maximum(np.abs(np.asarray(columns["min"])), np.abs(np.asarray(columns["max"])))
        read, zeros = self._counts[:2, self._columns(grads.names)].astype(int)
        return tuple(
            Level(name, float(columns["norm"][i]), float(largest[i]), grads.dtypes[i], int(zeros[i]), int(read[i]))
            for i, name in enumerate(grads.names[:MOST_PARAMETERS])
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


def _larger(a: float | None, b: float | None) -> float | None:
    known = [x for x in (a, b) if x is not None]
    return max(known, default=None)
