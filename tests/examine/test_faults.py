"""Each planted fault is named by kind, cause and place, with its line; the repaired step gives an empty list."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from examine.sanitizer_faults import FAULTS, Program
from nanny import sanitize
from nanny.examine.hazards import all_kinds

torch.set_num_threads(1)  # some kernels' results depend on the number of threads


QUICK_AND_SLOW = [pytest.param(name, marks=pytest.mark.slow) if name == "micro_batches_in_bf16" else name for name in FAULTS]


def examined(program: Program):
    with sanitize(program.model, program.scaler, strict=True) as seen:
        program.step()
    return seen


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_a_fault_is_named_first_by_kind_cause_and_place(name):
    fault = FAULTS[name]
    first = examined(fault.build(False)).hazards[0]
    assert first.kind in fault.kinds
    assert first.cause == fault.cause
    assert first.culprit in fault.culprits
    assert first.in_reference == fault.in_reference
    assert first.message
    assert first.remedy


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_the_repaired_step_is_clean(name):
    assert examined(FAULTS[name].build(True)).hazards == ()


def test_every_kind_that_is_claimed_has_a_title():
    kinds = {kind.name: kind.title for kind in all_kinds()}
    claimed = {kind for fault in FAULTS.values() for kind in fault.kinds}
    assert claimed <= set(kinds)
    assert all(kinds.values())


def test_the_line_is_that_of_the_users_code():
    first = examined(FAULTS["variance_of_squares"].build(False)).hazards[0]
    lines, start = inspect.getsourcelines(FAULTS["variance_of_squares"].build)
    assert first.place.file.endswith("sanitizer_faults_rounding.py")
    assert "mean**2" in lines[first.place.line - start]


def test_the_report_says_what_where_why_and_what_to_do():
    text = str(examined(FAULTS["tiny_eps"].build(False)))
    for part in ("constant_lost at fault", "eps 1e-8 is 0 in fp16", "sanitizer_faults_range.py:", "eps_underflow_fp16", "fix: "):
        assert part in text
    assert "no numerical hazards" in str(examined(FAULTS["tiny_eps"].build(True)))


def test_a_nan_is_traced_to_the_operation_that_made_it_and_absent_in_fp32():
    examination = examined(FAULTS["attention_scores"].build(False)).examination
    assert (examination.first_bad.op, examination.first_bad.place.site) == ("bmm", "fault")
    assert examination.first_bad.expected > 65504
    assert examination.first_bad_reference is None
    assert math.isnan(examination.loss)
    assert math.isfinite(examination.loss_reference)


def test_trouble_that_fp32_has_too_is_told_apart():
    examination = examined(FAULTS["root_of_zero"].build(False)).examination
    assert examination.first_bad_reference is not None
    assert examination.first_bad_reference.place == examination.first_bad.place
    assert examination.hazards[0].in_reference


def test_gradients_that_flush_are_seen_beside_those_of_fp32():
    examination = examined(FAULTS["gradients_without_scaler"].build(False)).examination
    weight = next(g for g in examination.gradients if g.name == "first.weight")
    assert weight.zero_share > 0.5
    assert weight.reference_zero_share < 0.5
    assert weight.error > 0.5
    assert examination.gradient_error > 0.1
