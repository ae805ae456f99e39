"""The gallery tells the truth: every planted fault does its harm, low precision is to blame where the case says so, and the
repaired and the healthy ones train. The nanny is not asked here."""

from __future__ import annotations

import re

import pytest
import torch
from gallery import Case, all_cases, play

from nanny.diagnose.knowledge import causes

CASES = all_cases()
PLANTED = [case for case in CASES if case.cause]
OUTSIDE = re.compile(r"op:\w+|loop:\w+|(optimizer|scaler)(\.\w+)?|data(:\w+)?")  # culprits that are no part of the model


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_does_what_it_claims(case: Case):
    run = play(case.build, case.steps)
    assert case.shows is not None
    assert case.shows(run), f"losses {run.losses}, skipped {sum(run.skipped)}, still {sorted(run.still)}"


@pytest.mark.parametrize("case", [case for case in PLANTED if case.fp32], ids=str)
def test_precision_is_to_blame_where_the_case_says_so(case: Case):
    """The same program in fp32 trains; or it does not, and precision is innocent."""
    run = play(case.fp32, case.steps)
    if case.precision_caused is False:
        assert case.shows(run), run.losses
    else:
        assert run.learned, run.losses
        assert run.weights_finite


@pytest.mark.parametrize("case", PLANTED, ids=str)
def test_a_culprit_of_the_model_is_there(case: Case):
    torch.manual_seed(0)
    model = case.build().model
    parts = {name for kind in (model.named_modules, model.named_parameters, model.named_buffers) for name, _ in kind()}
    assert case.culprits
    assert [name for name in case.culprits if not OUTSIDE.fullmatch(name) and name not in parts] == []


def test_names_are_unique_and_every_planted_case_has_a_repaired_twin():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert [case.name for case in PLANTED if f"{case.name}_fixed" not in names] == []
    assert all(not case.culprits and case.precision_caused is None for case in CASES if not case.cause)


def test_every_cause_of_the_knowledge_base_is_planted_somewhere():
    assert {case.cause for case in PLANTED} == set(causes())


def test_there_are_enough_of_both_kinds():
    own = [case for case in CASES if not case.cause and not case.name.endswith("_fixed")]
    assert len(PLANTED) >= 40
    assert len(own) >= 25
