"""The advisor names the faulty module, and the error that it promises is the one that a real run then has."""

from __future__ import annotations

import pytest
import torch
from corpus.asking import network_parts
from corpus.ordinary.networks import transformer
from torch import nn

import nanny


@pytest.mark.parametrize(
    "name",
    ["variance_of_shifted_squares", "gated_product", "tiny_eps", "positions_of_four_thousand"],
)
def test_keeping_the_planted_module_wide_is_enough(name):
    model, x, *_ = network_parts(name)
    report = nanny.auto_diff(model, x, "fp16", backward=False, advise=True)
    assert report.advice.wide == ("fault",)
    assert report.advice.after <= report.advice.goal < report.advice.before
    assert "self.fault(x.float())" in str(report)


def test_the_promised_error_is_what_the_written_region_gives():
    model, x, *_ = network_parts("gated_product")
    advice = nanny.auto_diff(model, x, "fp16", backward=False, advise=True).advice
    with torch.no_grad():
        reference = model(x)
        inner = model.fault.forward

        def wide(value):
            with torch.autocast("cpu", enabled=False):
                return inner(value.float())

        model.fault.forward = wide
        with torch.autocast("cpu", torch.float16):
            out = model(x)
    error = (out.double() - reference.double()).norm() / reference.double().norm()
    assert advice.after == pytest.approx(float(error), rel=1e-6)


def test_a_healthy_model_needs_no_advice():
    torch.manual_seed(0)
    healthy = transformer(layers=2)
    advice = nanny.auto_diff(healthy.model, *healthy.example.inputs, "bf16", backward=False, advise=True).advice
    assert (advice.wide, advice.runs) == ((), 0)


class Between(nn.Module):
    """The fault is in the model's own code; `cast` makes it one that no autocast region can take away."""

    def __init__(self, cast):
        super().__init__()
        self.first, self.last, self.cast = nn.Linear(8, 8), nn.Linear(8, 2), cast

    def forward(self, x):
        h = self.first(x)
        h = h.half() if self.cast else h
        return self.last((h * 300 * 300 / 90000).float())


def test_a_fault_between_the_modules_is_cured_by_the_models_own_code_in_fp32():
    torch.manual_seed(0)
    x = torch.randn(4, 8) * 6
    report = nanny.auto_diff(Between(cast=False), x, "fp16", backward=False, advise=True)
    assert (report.advice.wide, report.advice.reached) == (("",), True)
    assert (report.advice.parameter_share, report.advice.flop_share) == (0.0, 0.0)
    assert "keep the model's own code between its layers in FP32" in str(report)


def test_a_fault_that_no_region_cures_is_not_promised_away():
    report = nanny.auto_diff(Between(cast=True), torch.randn(4, 8) * 6, "fp16", backward=False, advise=True)
    assert not report.advice.reached
    assert "no set of modules was found" in str(report)


def test_under_a_plain_cast_the_module_keeps_wide_weights():
    model, x, *_ = network_parts("variance_of_shifted_squares")
    report = nanny.auto_diff(model, x, "bf16", backward=False, advise=True, policy="full")
    assert report.advice.wide == ("fault",)
    assert report.advice.after <= report.advice.goal < report.advice.before
    assert "model.fault.float()  # after model.to(torch.bfloat16)" in str(report)
    inner = model.fault.forward
    with torch.no_grad():
        reference = model(x)
        model.bfloat16().fault.forward = lambda value: inner(value.float()).bfloat16()
        out = model(x.bfloat16())
    error = (out.double() - reference.double()).norm() / reference.double().norm()
    assert max(c.error.rel_l2 for c in report.outputs) > float(error)
    assert report.advice.after == pytest.approx(float(error), rel=1e-6)


def test_the_cost_of_the_advice_is_told_in_parameters_and_flops():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return (self.inner(x) + 1000) - 1000

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Wide(), nn.Linear(16, 16), nn.Linear(16, 16))
    advice = nanny.auto_diff(model, torch.randn(8, 16), "bf16", backward=False, advise=True).advice
    assert advice.wide == ("1",)
    assert advice.parameter_share == 0.25
    assert advice.flop_share == 0.25
