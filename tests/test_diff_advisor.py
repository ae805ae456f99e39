"""The advisor names the faulty module, and the error that it promises is the one that a real run then has."""

from __future__ import annotations

import pytest
import torch
from diff_gallery import FAULTS, Overflow, sandwich, transformer
from torch import nn

import nanny


@pytest.mark.parametrize("name", ["cancellation", "overflow", "eps", "positions"])
def test_keeping_the_planted_module_wide_is_enough(name):
    model, x = sandwich(FAULTS[name][0])
    report = nanny.auto_diff(model, x, "fp16", backward=False, advise=True)
    assert report.advice.wide == ("fault",)
    assert report.advice.after <= report.advice.goal < report.advice.before
    assert "self.fault(x.float())" in str(report)


def test_the_promised_error_is_what_the_written_region_gives():
    model, x = sandwich(Overflow)
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
    model, x, _, _ = transformer(layers=2)
    advice = nanny.auto_diff(model, x, "bf16", backward=False, advise=True).advice
    assert (advice.wide, advice.runs) == ((), 0)


def test_a_fault_between_the_modules_is_not_promised_away():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.last((self.first(x).half() * 300 * 300 / 90000).float())

    report = nanny.auto_diff(Between(), torch.randn(4, 8) * 6, "fp16", backward=False, advise=True)
    assert not report.advice.reached
    assert "no set of modules was found" in str(report)
