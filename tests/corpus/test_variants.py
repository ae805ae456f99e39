"""What is right on a program is right on its variants: renamed, reseeded, resized, in the other format, in another layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from corpus import Program, all_programs
from corpus.asking import mistake
from corpus.marks import question
from corpus.variants import Variant, variants_of, varied

VARIED = ("diagnose", "examine", "diff")  # the monitor and what-if see a part of what the diagnosis sees
QUESTIONS = {
    tool: [
        question(tool, program, variant)
        for program in all_programs()
        if tool in program.tools
        for variant in variants_of(program, tool)
    ]
    for tool in VARIED
}


@pytest.mark.quick(5)
@pytest.mark.representative(10)
@pytest.mark.parametrize(("program", "variant"), QUESTIONS["diagnose"])
def test_a_variant_has_the_same_diagnosis(program: Program, variant: Variant):
    with varied(program, variant) as (training, name):
        assert mistake("diagnose", program, training, variant.dtype, name) == ""


@pytest.mark.representative(10)
@pytest.mark.parametrize(("program", "variant"), QUESTIONS["examine"])
def test_a_variant_has_the_same_hazard(program: Program, variant: Variant):
    with varied(program, variant) as (training, name):
        any_kind = replace(program, hazards=())  # what shows first of a mechanism depends on the numbers
        assert mistake("examine", any_kind, training, variant.dtype, name) == ""


@pytest.mark.quick(5)
@pytest.mark.representative(10)
@pytest.mark.parametrize(("program", "variant"), QUESTIONS["diff"])
def test_a_variant_has_the_same_first_culprit(program: Program, variant: Variant):
    with varied(program, variant) as (training, name):
        assert mistake("diff", program, training, variant.dtype, name) == ""
