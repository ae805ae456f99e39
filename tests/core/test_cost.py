"""What watching cost is said in seconds where a share would be that of the start alone."""

from __future__ import annotations

import pytest

from nanny.core.cost import cost_text
from nanny.show.translation import translate

SHORT = {
    "cost_percent": 771.84,
    "watched_seconds": 0.52,
    "examined_seconds": 0.2,
    "run_seconds": 0.97,
    "later_from": 16,
    "later_percent": 4.217,
}


@pytest.mark.parametrize(
    ("totals", "english", "chinese"),
    [
        (SHORT, "0.7 s of the run's 1.0 s, from step 16 on 4.22 % of the training time", "从第 16 步起占训练时间的 4.22 %"),
        ({**SHORT, "later_percent": None}, "0.7 s of the run's 1.0 s", "运行 1.0 s 中的 0.7 s"),
        ({**SHORT, "cost_percent": 1.7, "run_seconds": 3600.0}, "1.7 % of the training time", "训练时间的 1.7 %"),
        ({"cost_percent": 1.7}, "1.7 % of the training time", "训练时间的 1.7 %"),  # recorded before seconds were
    ],
)
def test_a_short_run_is_told_in_seconds_and_a_long_one_in_percent(totals, english, chinese):
    assert cost_text(totals) == english
    assert chinese in translate(english, "zh")


def test_a_run_that_does_not_know_its_cost_says_nothing():
    assert cost_text({}) == ""
