"""Suspects to hazards, on literals."""

from __future__ import annotations

from nanny.core.examination import Examination, Place
from nanny.examine.hazards import judge
from nanny.examine.records import Suspect


def test_a_product_is_subtracted_only_if_the_difference_leaves_little_of_it():
    """A gate's product meets the next cell's difference as well, behind a sum and a tanh; a variance by squares cancels."""
    causes = {}
    for cancelled in (False, True):
        product = Suspect("error", "mul", Place("cell"), 5, "bfloat16", plain=0.02, centred=0.3, level=0.05, consequence=0.2)
        product.met = dict.fromkeys(["add", "tanh", "sub"])
        product.cancelled = cancelled
        (told,) = judge(Examination(0, amp_dtype="bf16", suspects=(product,))).hazards
        causes[cancelled] = told.cause
    assert causes == {False: "scale_imbalance_absorption", True: "catastrophic_cancellation"}
