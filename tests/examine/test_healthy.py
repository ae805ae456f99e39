"""Healthy steps of two dozen kinds, in two formats: an empty list, whatever small numbers are lost in them."""

from __future__ import annotations

import pytest
import torch

from examine.sanitizer_healthy import HEALTHY, LOW
from nanny import sanitize

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_has_no_hazards(name, dtype):
    torch.manual_seed(0)
    program = HEALTHY[name](LOW[dtype])
    program.step()
    with sanitize(program.model, program.scaler, strict=True) as seen:
        program.step()
    assert seen.hazards == ()
    assert "failed" not in seen.examination.facts


def test_an_overflow_that_the_gradscaler_will_cure_is_a_note_and_no_hazard():
    program = HEALTHY["scale_still_too_high"](LOW["fp16"])
    with sanitize(program.model, program.scaler, strict=True) as seen:
        program.step()
    assert seen.hazards == ()
    assert seen.examination.facts["scale_overflow"]
    assert "loss scale" in str(seen)


@pytest.mark.parametrize("name", ["transformer", "convnet", "variational"])
def test_gradients_of_healthy_models_are_near_those_of_fp32(name):
    program = HEALTHY[name](LOW["fp16"])
    with sanitize(program.model, program.scaler, strict=True) as seen:
        program.step()
    assert 0 < seen.examination.gradient_error < 0.05
    assert abs(seen.examination.loss - seen.examination.loss_reference) < 0.01
