"""`auto_diff` blames what has the planted fault, and nobody in a healthy network."""

from __future__ import annotations

import pytest
import torch

import nanny
from corpus import BOTH, Program, asked
from corpus.asking import built, loud, mistake, network_parts
from corpus.marks import question
from corpus.ordinary.networks import reward


@pytest.mark.quick(6)
@pytest.mark.parametrize("program", [question("diff", p) for p in asked("diff", "planted")])
def test_a_planted_fault_is_blamed_first(program: Program):
    assert mistake("diff", program, built(program), program.dtypes[0]) == ""


@pytest.mark.parametrize("program", [question("diff", p) for p in asked("diff", "repaired", "healthy")])
def test_a_healthy_network_raises_nothing_above_information(program: Program):
    assert mistake("diff", program, built(program), program.dtypes[0]) == ""


def test_a_model_at_its_optimum_is_not_accused_of_gradients_that_cancel():
    """Pairs that contradict each other: scores and gradients go to 0, and what is left of them is rounding."""
    torch.manual_seed(11)
    training = reward()
    assert training.example is not None
    model, (better, worse), loss = training.model, training.example.inputs, training.example.loss
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        loss(model(better, worse)).backward()
        optimizer.step()
    for dtype in BOTH:
        report = nanny.auto_diff(model, (better, worse), dtype, loss_fn=loss)
        assert report.total.rel_l2 > 0.05
        assert loud(report.findings) == []


@pytest.mark.slow
def test_a_layer_that_only_receives_what_another_stored_badly_is_not_blamed():
    """The norms behind the shift have own errors of 20 %; the shift's own is 0.03 %."""
    model, x, loss, y = network_parts("loud_residual_stream")
    report = nanny.auto_diff(model, x, "fp16", loss_fn=loss, target=y)
    assert report.culprits[0] == "shift"
    assert {t.site for t in report.trials} >= {"shift", "blocks.2.ln1"}
    assert "with it in FP32 the output error is" in report.findings[0].message


def test_own_errors_of_backward_are_small_in_health_and_name_the_sum_that_loses():
    model, x, loss, y = network_parts("layernorm_rows")
    report = nanny.auto_diff(model, x, "bf16", loss_fn=loss, target=y)
    own = {g.name: g.own for g in report.gradients}
    assert own["norm.bias"] > 0.5
    assert own["head.weight"] < 0.01


def test_no_backward_step_of_a_healthy_model_is_off_by_itself():
    model, x, loss, y = network_parts("llama")
    report = nanny.auto_diff(model, x, "bf16", loss_fn=loss, target=y)
    own = [g.own for g in report.activation_gradients if g.own is not None]
    assert len(own) > 20
    assert 0 < max(own) < 0.01
    assert {g.own_site for g in report.activation_gradients} >= {"(loss)", "norm", "blocks.3.gate", "blocks.0.norm1"}
