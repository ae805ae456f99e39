"""What-if of a training recorded in FP32 foretells what the same training did in low precision."""

from __future__ import annotations

import pytest

from corpus import FP32, Program, asked
from corpus.asking import built, mistake
from corpus.marks import question


@pytest.mark.parametrize("program", [question("whatif", p) for p in asked("whatif")])
def test_the_fate_of_the_recorded_run_is_that_of_the_real_one(program: Program):
    assert mistake("whatif", program, built(program, FP32), program.dtypes[0]) == ""
