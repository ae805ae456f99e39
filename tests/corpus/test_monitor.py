"""The monitor's rules say something fair about faults that its statistics can see, and nothing about healthy trainings."""

from __future__ import annotations

import pytest

from corpus import Program, asked
from corpus.asking import built, mistake
from corpus.marks import question


@pytest.mark.quick(5)
@pytest.mark.parametrize("program", [question("monitor", p) for p in asked("monitor", "planted")])
def test_a_fault_that_statistics_show_is_found(program: Program):
    assert mistake("monitor", program, built(program), program.dtypes[0]) == ""


@pytest.mark.quick(5)
@pytest.mark.parametrize("program", [question("monitor", p) for p in asked("monitor", "repaired", "healthy")])
def test_nothing_above_information_is_found_in_a_healthy_training(program: Program):
    assert mistake("monitor", program, built(program), program.dtypes[0]) == ""
