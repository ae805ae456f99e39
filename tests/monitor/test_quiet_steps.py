"""Steps in which nothing happens are passed as a block: what is told and remembered is what judging each of them gives."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from corpus import Program, asked, by_name
from corpus.asking import built, watched
from corpus.marks import question

from nanny.core.finding import Finding
from nanny.core.step import OptimizerState, QuietSteps, SiteTable, StepRecord, whole_norm
from nanny.diagnose.history import Recent, RunHistory, SiteHistory
from nanny.monitor.registry import _needs, _wakes, all_rules, judge_quiet, judge_step
from nanny.monitor.watch import MixedPrecisionNanny

STEPS, SITES = 300, 6
NAMES = tuple(f"layer{i // 2}.{'weight' if i % 2 == 0 else 'bias'}" for i in range(SITES))
SHAPES = tuple((4, 4) if i % 2 == 0 else (4,) for i in range(SITES))


@dataclass
class Course:
    """The numbers of a run, that a test bends: one entry or row per step."""

    losses: np.ndarray
    rates: np.ndarray | None
    norms: np.ndarray
    share: np.ndarray  # of the norm, the largest magnitude
    scales: np.ndarray | None = None  # in force at each step, and behind the last
    skipped: frozenset[int] = frozenset()

    def record(self, i: int) -> StepRecord:
        high = self.norms[i] * self.share[i]
        count = np.full(SITES, 16.0)
        columns = {"count": count, "min": -high / 2, "max": high, "norm": self.norms[i], "mean": np.zeros(SITES)}
        grads = SiteTable(NAMES, columns, ("float32",) * SITES, None, SHAPES)
        rate = None if self.rates is None else float(self.rates[i])
        scale, after = (None, None) if self.scales is None else map(float, self.scales[i : i + 2])
        return StepRecord(
            i, seconds=1e-3 * (i % 7), loss=float(self.losses[i]), lr=rate, stepped=True, calls=("backward", "step"), backwards=1,
            clipped=1.0, root_site="Model", grads=grads, scale=scale, scale_after=after, skipped=i in self.skipped,
        )  # fmt: skip

    def quiet(self, at: range) -> QuietSteps | None:
        part = slice(at.start, at.stop)
        losses, norms = self.losses[part], self.norms[part]
        if not (np.isfinite(losses).all() and np.isfinite(norms).all() and (norms > 0).all()):
            return None
        if not self.skipped.isdisjoint(at) or (self.scales is not None and np.ptp(self.scales[at.start : at.stop + 1])):
            return None
        records = [self.record(i) for i in at]
        high = norms * self.share[part]
        seconds, rates = np.array([r.seconds for r in records]), None if self.rates is None else self.rates[part]
        whole = np.array([whole_norm(row) for row in norms])
        return QuietSteps(records[-1], list(at), seconds, losses, rates, -high / 2, high, norms, whole)


def usual(draw: np.random.Generator) -> Course:
    spread = draw.choice([1e-3, 0.05, 0.3, 1.0, 2.0])
    losses = draw.choice([1.0, 1e-3, 1e4]) * np.exp(
        spread * draw.normal(size=STEPS) + np.linspace(0, draw.choice([0, -4, 2]), STEPS)
    )
    norms = np.exp(draw.normal(size=SITES) + spread * draw.normal(size=(STEPS, SITES)))
    return Course(losses, np.geomspace(1e-2, 1e-4, STEPS), norms, draw.uniform(0.3, 1.0, size=(STEPS, SITES)))


def _where(draw: np.random.Generator, long: bool = False) -> slice:
    start = int(draw.integers(30, STEPS - 40))
    return slice(start, start + (int(draw.integers(2, 200)) if long else 1))


def _losses(change: Callable[[np.ndarray], Any], long: bool = False) -> Callable[[Course, np.random.Generator], None]:
    def bend(course: Course, draw: np.random.Generator) -> None:
        at = _where(draw, long)
        course.losses[at] = change(course.losses[at])

    return bend


def _norms(factor: float, long: bool = True, sites: slice = slice(None)) -> Callable[[Course, np.random.Generator], None]:
    def bend(course: Course, draw: np.random.Generator) -> None:
        course.norms[_where(draw, long), sites] *= factor

    return bend


def _fading(course: Course, draw: np.random.Generator) -> None:
    course.norms[:, :2] *= np.geomspace(1, 10.0 ** -draw.integers(2, 14), STEPS)[:, None]


def _rates(value: float | None) -> Callable[[Course, np.random.Generator], None]:
    def bend(course: Course, draw: np.random.Generator) -> None:
        course.rates = None if value is None else np.full(STEPS, value)

    return bend


def _scaled(course: Course, draw: np.random.Generator) -> None:
    course.scales = np.full(STEPS + 1, 2.0 ** draw.integers(0, 17))


def _grown(course: Course, draw: np.random.Generator) -> None:
    course.scales = 2.0 ** (1 + np.arange(STEPS + 1) // draw.integers(20, 90))


def _sunk(course: Course, draw: np.random.Generator) -> None:
    """Each time by a step that was skipped."""
    course.scales = np.full(STEPS + 1, 2.0**16)
    for at in sorted(draw.integers(20, STEPS, size=draw.integers(1, 17)).tolist()):
        course.scales[at + 1 :] /= 2
        course.skipped |= {at}


BENT = {
    "as usual": lambda course, draw: None,
    "the loss jumps": _losses(lambda x: x * 30),
    "the loss stays high": _losses(lambda x: x * 10, long=True),
    "the loss stands still": _losses(lambda x: x[0], long=True),
    "the loss is 0 once": _losses(lambda x: 0.0),
    "the loss is negative": lambda course, draw: np.negative(course.losses, out=course.losses),
    "the loss is around 0": lambda course, draw: np.subtract(course.losses, np.median(course.losses), out=course.losses),
    "the loss is NaN once": _losses(lambda x: np.nan),
    "the loss has converged": _losses(lambda x: x * 1e-9, long=True),
    "gradients explode": _norms(1e3),
    "gradients explode for a step": _norms(50, long=False),
    "a layer explodes": _norms(1e3, sites=slice(0, 1)),
    "gradients vanish": _norms(1e-12),
    "a layer vanishes": _norms(1e-5, sites=slice(0, 2)),
    "a layer is far below": _norms(1e-2, sites=slice(2, 3)),
    "a layer fades": _fading,
    "gradients are gone for a step": _norms(0.0, long=False),
    "a gradient is gone": _norms(0.0, sites=slice(0, 1)),
    "a gradient overflows": _norms(np.inf, long=False, sites=slice(0, 1)),
    "no learning rate": _rates(None),
    "a learning rate of 0": _rates(0.0),
    "a loss scale": _scaled,
    "the loss scale grows": _grown,
    "the loss scale sinks": _sunk,
}


def singles(course: Course, run: RunHistory) -> list[Finding]:
    return [f for i in range(STEPS) for f in judge_step(first(course.record(i)), run, all_rules())]


def first(step: StepRecord) -> StepRecord:
    """The first step is traced, and knows its optimizer."""
    adam = OptimizerState("Adam", True, False, 0.1, 1e-8, 0.999, "float32", "float32")
    return replace(step, traced=True, optimizers=(adam,)) if step.step == 0 else step


def blocks(course: Course, run: RunHistory, draw: np.random.Generator) -> tuple[list[Finding], int]:
    """As many steps at a time as come; and how many were passed in a block."""
    found: list[Finding] = []
    start = passed = 0
    while start < STEPS:
        at = range(start, min(start + int(draw.integers(1, 41)), STEPS))
        quiet = course.quiet(at) if start > 30 and len(at) > 1 else None
        if quiet is not None and judge_quiet(quiet, run, all_rules()) is not None:
            passed += len(at)
        else:
            found += [f for i in at for f in judge_step(first(course.record(i)), run, all_rules())]
        start = at.stop
    return found, passed


def state(value: Any) -> Any:
    """Everything that is remembered, to the bit."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (RunHistory, SiteHistory, SiteTable, StepRecord)):
        return {name: state(one) for name, one in vars(value).items() if name not in CACHED}
    if isinstance(value, Recent):
        return list(value), vars(value)
    if isinstance(value, dict):
        return {key: state(one) for key, one in value.items()}
    return [state(one) for one in value] if isinstance(value, (list, tuple, deque)) else repr(value)


CACHED = ("bad", "whole_norm", "weakest", "are_all_live")  # of a table, once they were asked for


@pytest.mark.parametrize("bent", BENT)
def test_a_block_tells_and_leaves_behind_what_each_of_its_steps_does(bent):
    passed = 0
    for seed in range(4):
        draw = np.random.default_rng(seed)
        course = usual(draw)
        for _ in range(seed % 3 + 1):
            BENT[bent](course, draw)
        one_by_one, together = RunHistory(), RunHistory()
        told = singles(course, one_by_one)
        found, number = blocks(course, together, draw)
        passed += number
        assert list(map(repr, found)) == list(map(repr, told))
        assert state(together) == state(one_by_one)
    assert passed > 0 or bent == "the loss is around 0"


@pytest.fixture
def early(monkeypatch) -> list[int]:
    """Steps wait from the 25th on, whatever the clock says; gives how many were passed in each block."""
    monkeypatch.setattr("nanny.monitor.watch.LONGEST_WAIT", 1e9)
    monkeypatch.setattr("nanny.monitor.watch.FIRST_AT_ONCE", 25)
    monkeypatch.setattr("nanny.monitor.watch.MOST_WAITING", 10)
    passed: list[int] = []
    add_quiet = MixedPrecisionNanny._add_quiet

    def noting(self: MixedPrecisionNanny, captures: Any) -> bool:
        is_taken = add_quiet(self, captures)
        passed.extend([len(captures)] if is_taken else [])
        return is_taken

    monkeypatch.setattr(MixedPrecisionNanny, "_add_quiet", noting)
    return passed


def trained(program: Program, steps: int = 90) -> tuple[list[str], dict[str, Any], str, list[Any]]:
    training = built(program)
    nanny = watched(training, steps, trace_interval=10**9, examine="off")
    curves = {name: (list(steps), list(map(repr, values))) for name, (steps, values) in nanny._history._curves.items()}
    del curves["step_ms"]
    facts = re.sub(r"seconds=[^,]*", "", repr(nanny._history.facts))
    return (
        list(map(repr, nanny.findings)),
        curves,
        facts,
        [state(p.detach().float().numpy()) for p in training.model.parameters()],
    )


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "program", [question("monitor", p, is_judged=False) for p in asked("monitor", "planted", "repaired", "healthy")]
)
def test_a_program_is_told_the_same_whether_its_steps_wait_or_not(program: Program, early, monkeypatch):
    waited = trained(program)
    monkeypatch.setattr("nanny.monitor.watch.FIRST_AT_ONCE", 10**9)
    assert waited == trained(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])  # the last with a GradScaler
def test_the_steps_of_a_healthy_program_are_passed_in_blocks(early, dtype):
    trained(replace(by_name()["integer_features"], dtypes=(dtype,)), steps=140)
    assert sum(early) > 70  # of 115; now and then all is looked at


def test_every_rule_says_what_it_needs_or_what_wakes_it():
    """Else no step waits for another, in any run."""
    assert [code for code in all_rules() if not _needs[code] and code not in _wakes] == []
