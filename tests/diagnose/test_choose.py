"""Which cause is chosen: by kind and traits of a hazard, and between causes that fit the same run."""

from __future__ import annotations

from itertools import permutations

import pytest

from nanny.core.examination import Hazard, Place
from nanny.diagnose.choose import HAZARD_RULES, PRECEDENCE, HazardRule, Precedence, best_first, hazard_cause, wins
from nanny.diagnose.knowledge import causes
from nanny.diagnose.records import Diagnosis
from nanny.diagnose.registry import CERTAIN, LEVELS, LIKELY, all_causes
from nanny.examine.hazards import all_kinds

FAMILIES = {cause.family for cause in all_causes().values()}
OF_DIFF = {"integers_rounded", "decision_flips", "layer_error"}


def diagnosis(cause: str, confidence: float = LIKELY, **more) -> Diagnosis:
    return Diagnosis(cause, all_causes()[cause].family, "somewhere", confidence=confidence, **more)


def losers(pair: Precedence) -> list[str]:
    """The cause that loses, or every cause of the family."""
    return [pair.loser] if pair.loser in all_causes() else [c.name for c in all_causes().values() if c.family == pair.loser]


@pytest.mark.parametrize("pair", PRECEDENCE, ids=lambda pair: f"{pair.winner}-before-{pair.loser}")
def test_between_two_causes_that_fit_alike_the_named_rule_decides(pair):
    for loser in losers(pair):
        if loser == pair.winner:
            continue
        one, other = diagnosis(pair.winner, step=9), diagnosis(loser, step=1)
        assert wins(one, other)
        assert wins(other, one) == ""
        for order in permutations((one, other)):
            assert best_first(order, lead=loser)[0] is one


@pytest.mark.parametrize("pair", PRECEDENCE, ids=lambda pair: f"{pair.winner}-before-{pair.loser}")
def test_a_surer_cause_goes_before_any_rule(pair):
    assert pair.reason
    one, other = diagnosis(pair.winner, LIKELY), diagnosis(next(n for n in losers(pair) if n != pair.winner), CERTAIN)
    assert best_first([one, other])[0] is other


def test_the_rules_name_causes_that_exist_and_run_in_no_circle():
    beats = {(p.winner, loser) for p in PRECEDENCE for loser in losers(p) if loser != p.winner}
    assert {p.winner for p in PRECEDENCE} <= set(all_causes())
    assert {p.loser for p in PRECEDENCE} <= set(all_causes()) | FAMILIES
    reach = set(beats)
    while more := {(a, d) for a, b in reach for c, d in beats if b == c} - reach:
        reach |= more
    assert not any(a == b for a, b in reach)


def test_without_a_rule_the_leading_cause_of_the_examined_steps_then_the_earlier_goes_first():
    late, early = diagnosis("router_low_precision", step=8), diagnosis("residual_absorption", step=2)
    assert best_first([late, early])[0] is early
    assert best_first([late, early], lead="router_low_precision")[0] is late


def test_an_early_warning_never_goes_before_what_has_happened():
    warning = diagnosis("activation_overflow_fp16", CERTAIN, early=True)
    assert best_first([warning, diagnosis("dead_relu", LEVELS[-1])])[0].cause == "dead_relu"


def hazard(rule: HazardRule) -> Hazard:
    phase = next((p for p in ("backward", "optimizer", "loop") if p in rule.traits), "forward")
    return Hazard(rule.kind, "mul", Place("layer", phase=phase), 3, traits=tuple(rule.traits))


@pytest.mark.parametrize("rule", HAZARD_RULES, ids=lambda rule: f"{rule.kind}-{'-'.join(sorted(rule.traits))}")
def test_every_rule_for_hazards_can_be_the_one_that_decides(rule):
    assert hazard_cause(hazard(rule)) == rule.cause


def test_every_kind_of_hazard_has_its_rules_and_every_rule_a_page():
    kinds = {kind.name for kind in all_kinds()}
    assert kinds | OF_DIFF == {rule.kind for rule in HAZARD_RULES}
    assert {rule.cause for rule in HAZARD_RULES} - {""} <= set(causes())
