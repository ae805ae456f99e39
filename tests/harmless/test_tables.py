"""Every operation, module and optimizer of PyTorch's own tables under every watcher: same bits, no failure, no false finding.

KNOWN_TABLE_HARM lists what breaks this promise today, and is exact: what is mended has to leave it.
"""

from __future__ import annotations

from typing import Any

import pytest

from .tables import CASES, PRECISIONS, WATCHERS, Case, Result, ask, is_in_part, known_harm, problems, try_cases

PARTS = {"operations": 24, "modules": 6, "optimizers": 3}
KNOWN = known_harm()


@pytest.mark.landing
def test_a_few_operations_are_unharmed_by_every_watcher() -> None:
    tally = try_cases("quick", lambda name: True, ("float32",), WATCHERS)
    assert tally.problems == []
    assert dict(tally.cases) == dict.fromkeys(WATCHERS, 22)


@pytest.mark.slow
@pytest.mark.parametrize("part", [f"{table} {n}/{parts}" for table, parts in PARTS.items() for n in range(parts)])
def test_tables_are_unharmed_by_every_watcher(part: str) -> None:
    table, part = part.split()
    tally = ask(table, part)
    found = {
        (table, name, precision, watcher, what.partition(":")[0]): what for name, precision, watcher, what in tally["problems"]
    }
    known = {key for key in KNOWN if key[0] == table and is_in_part(key[1], part)}
    assert {key: what for key, what in found.items() if key not in known} == {}
    assert known - set(found) == set(), "mended: remove the lines from KNOWN_TABLE_HARM"
    assert all(tally["cases"][watcher] > 0 for watcher in WATCHERS)


def test_known_harm_names_tables_watchers_and_precisions() -> None:
    for table, _, precision, watcher, kind in KNOWN:
        assert table in CASES
        assert watcher in WATCHERS
        assert precision in PRECISIONS
        assert kind in ("bits", "raised", "left", "warned", "false")


def test_a_difference_is_seen() -> None:
    """The comparison itself: what a harmful tool would do is not overlooked."""
    case = Case("add", "float32", lambda: None, lambda made: None)
    clean: dict[str, Any] = {"fingerprint": "a"}
    assert list(problems(case, Result(**clean), Result(**clean))) == []
    for change in (
        {"fingerprint": "b"},
        {"error": "ValueError: x"},
        {"own_warnings": ["NannyWarning: x"]},
        {"other_warnings": ["UserWarning: x"]},
        {"errors_found": ["OP_MISMATCH: x"]},
        {"nonfinite_found": ["OP_NONFINITE: x"]},
    ):
        assert list(problems(case, Result(**clean), Result(**{**clean, **change}))), change
