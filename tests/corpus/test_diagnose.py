"""The planted cause is named with its culprit, and whether precision is to blame; other trainings have no diagnosis."""

from __future__ import annotations

import pytest

from corpus import Program, asked
from corpus.asking import built, mistake
from corpus.marks import question


@pytest.mark.quick(18)
@pytest.mark.parametrize("program", [question("diagnose", p) for p in asked("diagnose", "planted")])
def test_the_planted_cause_is_named(program: Program):
    assert mistake("diagnose", program, built(program), program.dtypes[0]) == ""


@pytest.mark.quick(6)
@pytest.mark.parametrize("program", [question("diagnose", p) for p in asked("diagnose", "repaired", "healthy")])
def test_a_healthy_training_has_no_diagnosis(program: Program):
    assert mistake("diagnose", program, built(program), program.dtypes[0]) == ""
