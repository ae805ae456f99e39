"""The corpus tells the truth: every planted fault does its harm, low precision is to blame where the record says so, and the
repaired and the healthy ones train. No tool is asked here."""

from __future__ import annotations

import re

import pytest

from corpus import FP32, Program, all_programs, by_name
from corpus.asking import ANSWERS, built
from corpus.known_wrong import KNOWN_WRONG
from corpus.loops import play
from corpus.quick import QUICK
from corpus.variants import variants_of
from nanny.diagnose.knowledge import causes
from nanny.examine.hazards import all_kinds

PROGRAMS = all_programs()
PLANTED = [p for p in PROGRAMS if p.role == "planted"]
OUTSIDE = re.compile(r"op:\w+|loop:\w+|(optimizer|scaler)(\.\w+)?|data(:\w+)?")  # culprits that are no part of the model


def truths(programs: list[Program]) -> list[object]:
    return [pytest.param(p, id=p.name, marks=[] if p.name in QUICK["truth"] else [pytest.mark.slow]) for p in programs]


@pytest.mark.quick(25)
@pytest.mark.parametrize("program", truths([p for p in PROGRAMS if p.shows]))
def test_a_program_does_what_it_claims(program: Program):
    run = play(built(program), program.steps)
    assert program.shows is not None
    assert program.shows(run), f"losses {run.losses}, skipped {sum(run.skipped)}, still {sorted(run.still)}"


@pytest.mark.quick(15)
@pytest.mark.parametrize("program", truths([p for p in PLANTED if p.shows]))
def test_precision_is_to_blame_where_the_record_says_so(program: Program):
    """The same program in FP32 trains; or it does not, and precision is innocent."""
    run = play(built(program, FP32), program.steps)
    if program.precision_caused is False:
        assert program.shows(run), run.losses
    else:
        assert run.learned, run.losses
        assert run.weights_finite


@pytest.mark.parametrize("program", PLANTED, ids=str)
def test_a_culprit_of_the_model_is_there(program: Program):
    model = built(program).model
    parts = {name for kind in (model.named_modules, model.named_parameters, model.named_buffers) for name, _ in kind()}
    assert program.culprits
    assert [name for name in program.culprits if not OUTSIDE.fullmatch(name) and name not in parts] == []


def test_names_are_unique_and_the_healthy_ones_accuse_nobody():
    assert len({p.name for p in PROGRAMS}) == len(PROGRAMS)
    assert all(not p.cause and not p.culprits and p.precision_caused is None for p in PROGRAMS if p.role != "planted")
    assert [p.name for p in PLANTED if p.shows and f"{p.name}_fixed" not in by_name()] == []


def test_every_program_is_asked_about_and_every_name_in_the_lists_exists():
    assert [p.name for p in PROGRAMS if not p.tools] == []
    assert {tool for p in PROGRAMS for tool in p.tools} == set(ANSWERS)
    assert {name for names in QUICK.values() for name in names} <= set(by_name())
    questions = {(tool, p.name, str(v)) for p in PROGRAMS for tool in p.tools for v in ("", "*", *variants_of(p, tool))}
    assert set(KNOWN_WRONG) - questions == set()


def test_every_family_has_planted_and_healthy_programs_in_the_quick_part():
    quick = {by_name()[name] for names in QUICK.values() for name in names}
    assert {p.family for p in quick if p.role == "planted"} == {p.family for p in PLANTED}
    assert {p.family for p in quick if p.role != "planted"} == {p.family for p in PROGRAMS if p.role != "planted"}


OF_MANY_PROCESSES = {"replicas_apart", "reduce_dtype_low_precision"}  # planted in tests/distributed
OF_LOOPS = {  # whole programs each, in tests/scripts and on the pages that tests/monitor/test_loops.py runs
    "autocast_not_applied", "backward_without_step", "gradient_gone_for_one_step", "gradient_never_cleared", "in_no_optimizer",
    "mode_mismatch", "no_gradient_arrives", "same_batch_again", "step_changes_nothing", "step_without_backward",
    "trained_but_frozen",
}  # fmt: skip


def test_every_cause_of_the_knowledge_base_is_planted_somewhere():
    assert {p.cause for p in PLANTED if "diagnose" in p.tools} == set(causes()) - OF_MANY_PROCESSES - OF_LOOPS


def test_every_kind_of_hazard_that_is_claimed_says_what_it_is():
    kinds = {kind.name: kind.doc for kind in all_kinds()}
    assert {kind for p in PLANTED for kind in p.hazards} <= set(kinds)
    assert all(kinds.values())


def test_there_are_enough_of_both_kinds():
    assert len(PLANTED) >= 189
    assert len([p for p in PROGRAMS if p.role == "healthy"]) >= 95
