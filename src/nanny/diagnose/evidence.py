"""What a diagnosis works from: the curves of a run, its findings, its examined steps, and facts about its loop.

`history.RunHistory` folds step records into it while the run goes on; it is the same when it comes from a store. Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ..core.examination import Examination
from ..core.finding import Finding
from ..core.limits import Limits
from ..core.step import StepRecord, Update


@dataclass(frozen=True)
class GradientLevel:
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


_nothing_told = partial(StepRecord, 0)


@dataclass(frozen=True)
class RunFacts:
    """What the steps of a run have told: how the loop treats loss, gradients, scaler and optimizer, and its worst steps."""

    steps: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)  # field of StepRecord -> steps that told it
    first: StepRecord = field(default_factory=_nothing_told)  # every field as it was first told
    first_steps: Mapping[str, int] = field(default_factory=dict)  # and at which step
    latest: StepRecord = field(default_factory=_nothing_told)  # as it was last told
    largest: Mapping[str, float] = field(default_factory=dict)  # of numbers
    parameters: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # elements of each
    vectors: tuple[str, ...] = ()  # parameters of one dimension: biases, gains of norms
    incidents: tuple[StepRecord, ...] = ()  # the first steps at which the loss or a gradient was not finite
    bad_steps: int = 0
    bad_buffers: tuple[str, ...] = ()
    bad_buffers_step: int | None = None
    updates: tuple[Update, ...] = ()  # of the last step that was probed
    updates_step: int | None = None
    lost_probes: int = 0  # probed steps at which most of the 16-bit weights stayed as they were
    lost_updates: tuple[Update, ...] = ()  # of the first of them, or of the first at which nearly all did
    lost_step: int | None = None
    probes: int = 0
    early_levels: tuple[GradientLevel, ...] = ()  # gradients of the first clean step
    levels: tuple[GradientLevel, ...] = ()  # of the last clean step
    surprises: tuple[Surprise, ...] = ()  # the largest, in order of time
    reach: tuple[Reach, ...] = ()

    def count(self, name: str) -> int:
        """Steps at which a field of StepRecord was told."""
        return self.counts.get(name, 0)


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

    def without_trials(self) -> Evidence:
        """As if no remedy had been tried."""
        return replace(self, examinations=tuple(replace(exam, trials=()) for exam in self.examinations))

    @property
    def first_bad_step(self) -> int | None:
        return self.facts.incidents[0].step if self.facts.incidents else None
