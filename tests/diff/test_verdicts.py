"""Healthy models stay silent in both formats; a single planted fault is blamed on what has it."""

from __future__ import annotations

import pytest
import torch

import nanny
from diff import diff_faults, diff_healthy
from diff.diff_gallery import FAULTS, HEALTHY, sandwich
from nanny.core.finding import Severity

ALL_HEALTHY = {**HEALTHY, **diff_healthy.HEALTHY}
HALF_OF_THEM = [name for i, name in enumerate(diff_healthy.HEALTHY) if i % 2]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in HEALTHY for dtype in ("bf16", "fp16")),
        *((name, "bf16") for name in diff_healthy.HEALTHY if name not in HALF_OF_THEM),
        *((name, "fp16") for name in HALF_OF_THEM),
        *(pytest.param(name, "bf16", marks=pytest.mark.slow) for name in HALF_OF_THEM),
        *(pytest.param(name, "fp16", marks=pytest.mark.slow) for name in diff_healthy.HEALTHY if name not in HALF_OF_THEM),
    ],
)
def test_healthy_models_raise_nothing_above_information(name, dtype):
    torch.manual_seed(0)
    model, x, loss, y = ALL_HEALTHY[name]()
    report = nanny.auto_diff(model, x, dtype, loss_fn=loss, target=y)
    assert [f for f in report.findings if f.severity > Severity.INFO] == []
    assert report.total.rel_l2 > 0
    assert not report.reseeds


@pytest.mark.parametrize("policy", ["native", "full"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", diff_healthy.ODD)
def test_healthy_models_in_an_odd_state_raise_nothing_above_information(name, dtype, policy):
    torch.manual_seed(5)
    model, x, loss, y = diff_healthy.ODD[name]()
    model_loss = (lambda out, target: loss(out.float(), target)) if policy == "full" else loss
    report = nanny.auto_diff(model, x, dtype, loss_fn=model_loss, target=y, policy=policy)
    assert [f for f in report.findings if f.severity > Severity.INFO] == []


def test_a_model_at_its_optimum_is_not_accused_of_gradients_that_cancel():
    """Pairs that contradict each other: scores and gradients go to 0, and what is left of them is rounding."""
    torch.manual_seed(11)
    model, (better, worse), loss, _ = diff_healthy.reward()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        loss(model(better, worse)).backward()
        optimizer.step()
    for dtype in ("bf16", "fp16"):
        report = nanny.auto_diff(model, (better, worse), dtype, loss_fn=loss)
        assert report.total.rel_l2 > 0.05
        assert [f for f in report.findings if f.severity > Severity.INFO] == []


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, (_, dtypes) in FAULTS.items() for dtype in dtypes])
def test_a_planted_fault_is_blamed_first_on_its_module(name, dtype):
    model, x = sandwich(FAULTS[name][0])
    report = nanny.auto_diff(model, x, dtype)
    assert report.culprits[0] == "fault"
    assert report.findings[0].severity >= Severity.WARNING


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, (_, dtypes, _, _) in diff_faults.FAULTS.items() for dtype in dtypes]
)
def test_a_fault_in_a_real_architecture_a_loss_or_a_backward_is_blamed_first(name, dtype):
    make, _, policy, culprits = diff_faults.FAULTS[name]
    torch.manual_seed(0)
    model, x, loss, y = make()
    report = nanny.auto_diff(model, x, dtype, loss_fn=loss, target=y, policy=policy)
    assert report.culprits[0] in culprits


def test_a_layer_that_only_receives_what_another_stored_badly_is_not_blamed():
    """The norms behind the shift have own errors of 20 %; the shift's own is 0.03 %."""
    torch.manual_seed(0)
    model, x, loss, y = diff_faults.loud_residual_stream()
    report = nanny.auto_diff(model, x, "fp16", loss_fn=loss, target=y)
    assert report.culprits[0] == "shift"
    assert {t.site for t in report.trials} >= {"shift", "blocks.2.ln1"}
    assert "with it in FP32 the output error is" in report.findings[0].message


def test_own_errors_of_backward_are_small_in_health_and_name_the_sum_that_loses():
    torch.manual_seed(0)
    model, x, loss, y = diff_faults.layernorm_rows()
    report = nanny.auto_diff(model, x, "bf16", loss_fn=loss, target=y)
    own = {g.name: g.own for g in report.gradients}
    assert own["norm.bias"] > 0.5
    assert own["head.weight"] < 0.01


def test_no_backward_step_of_a_healthy_model_is_off_by_itself():
    torch.manual_seed(0)
    model, x, loss, y = diff_healthy.llama()
    report = nanny.auto_diff(model, x, "bf16", loss_fn=loss, target=y)
    own = [g.own for g in report.activation_gradients if g.own is not None]
    assert len(own) > 20
    assert 0 < max(own) < 0.01
    assert {g.own_site for g in report.activation_gradients} >= {"(loss)", "norm", "blocks.3.gate", "blocks.0.norm1"}
