"""Silent mistakes of a loop: the programs of the pages, watched."""

from __future__ import annotations

import pytest

from nanny import Finding, MixedPrecisionNanny
from nanny.diagnose.knowledge import causes

WATCHED = (
    "step_changes_nothing",
    "in_no_optimizer",
    "trained_but_frozen",
    "no_gradient_arrives",
    "gradient_never_cleared",
    "step_without_backward",
    "mode_mismatch",
    "gradient_gone_for_one_step",
    "autocast_not_applied",
)


def watched(program: str) -> tuple[list[Finding], str]:
    """Findings and verdict of a program that knows nothing of the nanny."""
    nanny = MixedPrecisionNanny(None, output_dir=None, live=False, strict=True)
    nanny.steps_by_themselves(find_models=True)
    try:
        exec(compile(program, "page.md", "exec"), {"__name__": "page"})
    finally:
        nanny.close()
    return nanny.findings, nanny.verdict("finished").text


@pytest.mark.slow
@pytest.mark.parametrize("name", WATCHED)
def test_the_program_of_a_page_is_told_and_the_repaired_one_is_not(name):
    fails, repaired = causes()[name].programs()
    found, verdict = watched(fails)
    told = [f for f in found if f.code == name.upper()]
    assert len(told) == 1
    assert told[0].step is not None
    assert told[0].step <= 20
    assert name in verdict
    assert [f.code for f in watched(repaired)[0]] == []
