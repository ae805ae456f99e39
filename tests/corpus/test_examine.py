"""An examined step names a planted fault by kind, cause and place, with its line; a healthy step gives an empty list."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from corpus import FP16, Program, asked, by_name
from corpus.asking import built, examined, mistake
from corpus.marks import question
from corpus.rounding.steps import variance_of_squares


@pytest.mark.parametrize("program", [question("examine", p) for p in asked("examine", "planted")])
def test_a_fault_is_named_first_by_kind_cause_and_place(program: Program):
    assert mistake("examine", program, built(program), program.dtypes[0]) == ""


@pytest.mark.parametrize("program", [question("examine", p) for p in asked("examine", "repaired", "healthy")])
def test_a_healthy_step_has_no_hazards(program: Program):
    assert mistake("examine", program, built(program), program.dtypes[0]) == ""


def seen_in(name: str) -> Any:
    return examined(built(by_name()[name]))


def test_the_line_is_that_of_the_users_code():
    first = seen_in("variance_of_squares").hazards[0]
    lines, start = inspect.getsourcelines(variance_of_squares)
    assert first.place.file.endswith("rounding/steps.py")
    assert "mean**2" in lines[first.place.line - start]


def test_the_report_says_what_where_why_and_what_to_do():
    text = str(seen_in("tiny_eps"))
    for part in ("constant_lost at fault", "eps 1e-8 is 0 in fp16", "underflow/steps.py:", "eps_underflow_fp16", "fix: "):
        assert part in text
    assert "no numerical hazards" in str(seen_in("tiny_eps_fixed"))


def test_a_nan_is_traced_to_the_operation_that_made_it_and_absent_in_fp32():
    examination = seen_in("attention_scores").examination
    assert (examination.first_bad.op, examination.first_bad.place.site) == ("bmm", "fault")
    assert examination.first_bad.expected > 65504
    assert examination.first_bad_reference is None
    assert math.isnan(examination.loss)
    assert math.isfinite(examination.loss_reference)


def test_trouble_that_fp32_has_too_is_told_apart():
    examination = seen_in("root_of_zero").examination
    assert examination.first_bad_reference is not None
    assert examination.first_bad_reference.place == examination.first_bad.place
    assert examination.hazards[0].in_reference


def test_gradients_that_flush_are_seen_beside_those_of_fp32():
    examination = seen_in("gradients_without_scaler").examination
    weight = next(g for g in examination.gradients if g.name == "first.weight")
    assert weight.zero_share > 0.5
    assert weight.reference_zero_share < 0.5
    assert weight.error > 0.5
    assert examination.gradient_error > 0.1


def test_an_overflow_that_the_gradscaler_will_cure_is_a_note_and_no_hazard():
    seen = examined(built(by_name()["scale_still_too_high"], FP16))
    assert seen.hazards == ()
    assert seen.examination.facts["scale_overflow"]
    assert "loss scale" in str(seen)


@pytest.mark.parametrize("name", ["transformer", "convnet", "variational"])
def test_gradients_of_healthy_models_are_near_those_of_fp32(name):
    examination = examined(built(by_name()[name], FP16)).examination
    assert 0 < examination.gradient_error < 0.05
    assert abs(examination.loss - examination.loss_reference) < 0.01
