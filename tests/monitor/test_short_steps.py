"""What is done in less time at every step is the same as what would be done in more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nanny.core.formats import HISTOGRAM_BINS
from nanny.core.step import BadCall, Breach, OptimizerState, SiteTable, StepRecord, Update
from nanny.diagnose.history import RunHistory
from nanny.monitor.registry import _needs, all_rules, judge_step

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
        traced=True, clipped=1.0, clipped_scaled=True, stale=("layer0.weight",), grads=table(np.nan, 0.0), outputs=table(np.inf, 65000.0),
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
