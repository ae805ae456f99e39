"""Each fault is one without us, and is named by its cause; its twin is called healthy."""

from __future__ import annotations

import math
from typing import Any

import pytest

import nanny

from . import FP32, Case, finished, is_worse, learned, tables, watched

pytestmark = pytest.mark.slow
WRONG: dict[str, str] = {}  # what is said instead: who mends one removes it here, or the suite turns red
WRONG_TWINS = {  # what is said of a healthy one
    "timm_resnet_statistics_beyond": "update_lost, suspected: behind gains of 0 the updates would be too small in any format",
}


def _questions(*, known: dict[str, str]) -> list[Any]:
    questions = []
    for library, why, cases in tables():
        if why:
            questions.append(pytest.param(None, id=library, marks=pytest.mark.skip(reason=why)))
        for case in cases:
            wrong = known.get(case.name)
            marks = [pytest.mark.xfail(reason=wrong, strict=True)] if wrong else []
            questions.append(pytest.param(case, id=case.name, marks=marks))
    return questions


def test_there_are_thirty() -> None:
    missing = [why for _, why, _ in tables() if why]
    cases = [case for _, _, cases in tables() for case in cases]
    assert len({case.name for case in cases}) == len(cases)
    assert len(cases) >= 30 or missing
    assert set(WRONG) <= {case.name for case in cases} or missing


@pytest.mark.parametrize("case", _questions(known={}))
def test_the_harm_is_there_without_us(case: Case) -> None:
    faulty, in_fp32 = finished(case, faulty=True), finished(case, faulty=True, dtype=FP32)
    twin, twin_in_fp32 = finished(case, faulty=False), finished(case, faulty=False, dtype=FP32)
    assert learned(twin)
    assert not is_worse(twin, twin_in_fp32)
    if case.precision:
        assert is_worse(faulty, in_fp32)
        assert all(map(math.isfinite, in_fp32.losses))
    else:
        assert is_worse(faulty, twin_in_fp32)
        assert is_worse(in_fp32, twin_in_fp32)


@pytest.mark.parametrize("case", _questions(known=WRONG))
def test_the_fault_is_named(case: Case) -> None:
    found = nanny.diagnose(watched(case, faulty=True))
    assert found, "nothing is said"
    best = found[0]
    assert best.cause in case.causes
    assert best.precision_caused == case.precision
    assert any(best.culprit == name or best.culprit.startswith(f"{name}." if name else "") for name in case.culprits), (
        best.culprit
    )


@pytest.mark.parametrize("case", _questions(known=WRONG_TWINS))
def test_the_twin_is_healthy(case: Case) -> None:
    assert nanny.diagnose(watched(case, faulty=False)) == []
