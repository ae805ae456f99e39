"""What is done in less time at every step is the same as what would be done in more."""

from __future__ import annotations

import gc
import re
import resource
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import mlp, watch

from nanny.core.formats import HISTOGRAM_BINS
from nanny.core.step import BadCall, Breach, OptimizerState, SiteTable, StepRecord, Update
from nanny.diagnose.history import RunHistory
from nanny.monitor.registry import _needs, all_rules, judge_step
from nanny.monitor.watch import FIRST_AT_ONCE, MOST_WAITING, MixedPrecisionNanny
from nanny.store import reader

KINDS = [
    "still", "unowned", "frozen_moves", "frozen_statistics", "said_frozen", "no_gradient", "uncleared", "no_backward", "no_step",
    "evaluation_mode", "training_mode", "same_batch", "full_precision",
]  # fmt: skip
TRAITS = {
    "training_mode": ("2",),
    "same_batch": ("2",),
    "full_precision": ("autocast", "float16", "float32"),
    "no_backward": ("again",),
}


def table(*norms: float, dtype: str = "float16") -> SiteTable:
    n = len(norms)
    values = np.array(norms)
    columns = {"count": np.full(n, 4.0), "min": -values, "max": values, "norm": values, "mean": values}
    histograms = np.zeros((n, HISTOGRAM_BINS), dtype=np.int64)
    return SiteTable(tuple(f"layer{i}.weight" for i in range(n)), columns, (dtype,) * n, histograms, ((2, 2),) * n)


def loud() -> StepRecord:
    """Nearly everything is wrong with this step."""
    return StepRecord(
        9, loss=float("nan"), lr=0.1, scale=0.25, scale_after=0.125, growth_interval=2000, skipped=True, stepped=True,
        traced=True, clipped=1.0, clipped_scaled=True,
        stale=("layer0.weight",), grads=table(np.nan, 0.0), outputs=table(np.inf, 65000.0),
        output_grads=table(0.0, 0.0), buffers=table(np.nan, 1.0), zero_outputs=("layer1",),
        called=frozenset({"layer0", "layer1"}),
        bad_calls=(BadCall("layer0", "Linear", "float16", 1, 1, 0, 4, inputs_clean=True, has_parameters=True),),
        updates=(Update("layer0.weight", "float16", 0.1, 4, 4, 0.0, 1.0),),
        optimizers=(OptimizerState("Adam", True, False, 0.1, 1e-8, 0.9999, "float16", "float16", 1e-9),),
        breaches=tuple(Breach(kind, ("layer0",), 1, 999, 1000, 4, traits=TRAITS.get(kind, ("ran",))) for kind in KINDS),
    )  # fmt: skip


def shaken() -> RunHistory:
    run = RunHistory()
    for i in range(40):
        judge_step(StepRecord(i, loss=1.0, lr=0.1, scale=1024.0, stepped=True, grads=table(1.0, 1.0)), run, {})
    for i in range(40, 60):
        judge_step(replace(loud(), step=i, loss=1.0, bad_calls=()), run, {})
    return run


UNSAID = {"nonfinite": {"loss": 1.0, "bad_calls": (), "grads": table(1.0, 1.0)}}


@pytest.mark.representative(10)
@pytest.mark.parametrize("code", [code for code in all_rules() if _needs[code]])
def test_a_rule_has_nothing_to_say_without_what_it_needs(code):
    unsaid: dict[str, object] = {}
    for name in _needs[code]:
        unsaid |= UNSAID.get(name) or {name: getattr(StepRecord(0), name)}
    assert not any(getattr(replace(loud(), **unsaid), name) for name in _needs[code])
    assert not list(all_rules()[code].function(replace(loud(), **unsaid), shaken()))


def test_the_loud_step_is_heard():
    said = {f.code for f in judge_step(loud(), shaken(), all_rules())}
    needy = {code for code in all_rules() if _needs[code]}
    assert len(said & needy) > len(needy) / 2


LAST = FIRST_AT_ONCE + 90  # all is looked at once more behind 128
TROUBLE = LAST - 9


class Nothing(torch.autograd.Function):
    """Hands its input on; its gradient is what `makes` holds, if anything."""

    makes: float | None = None

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad if Nothing.makes is None else torch.full_like(grad, Nothing.makes)


def run(
    more: float = 0.0, gradient: float | None = None, lr: float = 1e-4, lasting: bool = False, folder: Path | None = None
) -> tuple[MixedPrecisionNanny, dict[str, int]]:
    """The same batch again and again; at step TROUBLE something is different. Gives at which step each code was told."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    told: dict[str, int] = {}
    with watch(
        model, optimizer, interval=10**9, output_dir=folder, examine="off", on_finding=lambda f: told.setdefault(f.code, i)
    ) as nanny:
        for i in range(LAST):
            trouble = i == TROUBLE or (lasting and i > TROUBLE)
            Nothing.makes = gradient if trouble else None
            with nanny.step(i):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(Nothing.apply(model(x)), y) + (more if trouble else 0.0)
                loss.backward()
                optimizer.step()
    return nanny, told


@pytest.fixture
def patient(monkeypatch):
    """What follows does not depend on the clock."""
    monkeypatch.setattr("nanny.monitor.watch.LONGEST_WAIT", 1e9)


def test_steps_in_which_nothing_happens_are_judged_together(patient, monkeypatch):
    judged: list[list[int]] = []
    catch_up = MixedPrecisionNanny._catch_up

    def noting(self: MixedPrecisionNanny, wait: bool = False) -> None:
        judged.append([capture.record.step for capture in self._waiting])
        catch_up(self, wait)

    monkeypatch.setattr(MixedPrecisionNanny, "_catch_up", noting)
    run()
    assert list(chain.from_iterable(judged)) == list(range(LAST))  # each once, and in order
    assert max(map(len, judged)) == MOST_WAITING
    assert all(len(several) <= 1 or several[0] > FIRST_AT_ONCE - 2 for several in judged)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        ({"gradient": float("nan")}, "NAN"),
        ({"gradient": float("inf")}, "INF"),
        ({"more": float("nan")}, "NAN"),
        ({"gradient": 1e6}, "GRAD_EXPLOSION"),
        ({"more": 100.0}, "LOSS_SPIKE"),
        ({"gradient": 0.0}, "GRADIENT_GONE_FOR_ONE_STEP"),
    ],
)
def test_trouble_is_told_when_the_next_step_begins(patient, trouble, code):
    nanny, told = run(**trouble)
    found = next(f for f in nanny.findings if f.code == code)
    assert (found.step, told[code]) == (TROUBLE, TROUBLE + 1)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "trouble", [{}, {"gradient": 1e3, "lasting": True}, {"gradient": 1e-9, "lasting": True}, {"lr": 0.9}, {"lr": 0.0}]
)
def test_findings_facts_and_record_are_those_of_steps_judged_one_by_one(patient, monkeypatch, tmp_path, trouble):
    several, _ = run(**trouble, folder=tmp_path / "several")
    monkeypatch.setattr("nanny.monitor.watch.FIRST_AT_ONCE", 10**9)
    single, _ = run(**trouble, folder=tmp_path / "single")
    assert [(f.code, f.site, f.step, f.message) for f in several.findings] == [
        (f.code, f.site, f.step, f.message) for f in single.findings
    ]
    facts = [re.sub(r"seconds=[^,]*", "", repr(one._history.facts)) for one in (several, single)]  # NaN is NaN here
    assert facts[0] == facts[1]
    stored = []
    for name in ("several", "single"):
        with reader.reading(tmp_path / name / "metrics.db") as db:
            curves = reader.scalars(db, 1, ["loss", "grad_norm", "lr"])
            stored.append(
                [*(part.tolist() for curve in curves.values() for part in curve), *map(np.ndarray.tolist, _samples(db))]
            )
    assert repr(stored[0]) == repr(stored[1])


def _samples(db) -> list[np.ndarray]:
    return [np.asarray(part) for part in reader.samples(db, 1, "grad", "norm")[:2]]


def test_what_is_asked_for_between_two_steps_is_up_to_date(patient):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(16, 8)
    with watch(model, optimizer, interval=10**9, examine="off") as nanny:
        for i in range(LAST):
            with nanny.step(i):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        nanny.begin_step(LAST)
        assert nanny.evidence().facts.steps == LAST


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_resident_memory_is_flat_over_twenty_thousand_steps(tmp_path):
    """But for the curves of the run, which end at 20,000 points: 16 bytes each, five of them."""

    def megabytes() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(16, 8)
    with watch(model, optimizer, interval=1000, output_dir=tmp_path) as nanny:
        for i in range(20_000):
            if i == 4000:
                early = megabytes()
            with nanny.step(i):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        assert megabytes() - early < 6.0
