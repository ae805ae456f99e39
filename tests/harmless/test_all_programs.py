"""Every program in every setting.

KNOWN_HARM lists what breaks the promise today. Such a test must fail: once it is mended, its line has to go.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from .harness import HERE, SETTINGS, differing, harms_of, known_harm, plain_record, run_program
from .program import BUILDS, load_programs

pytestmark = pytest.mark.slow
load_programs()
KNOWN = known_harm()


def _cases() -> list[Any]:
    cases = []
    for setting in SETTINGS:
        for name in sorted(BUILDS):
            reason = KNOWN.get((name, setting))
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            cases.append(pytest.param(name, setting, marks=marks, id=f"{setting}-{name}"))
    return cases


@pytest.mark.parametrize("name", sorted(BUILDS))
def test_program_alone_is_the_same_twice(name: str) -> None:
    """A program that differs from itself proves nothing about a tool."""
    record, again = plain_record(name), run_program("plain", name)
    assert "died" not in record
    assert differing(record["state"], again["state"]) == []
    assert record["error"] == again["error"]


@pytest.mark.parametrize(("name", "setting"), _cases())
def test_program_is_unharmed(name: str, setting: str) -> None:
    assert harms_of(setting, name) == []


def test_known_harm_names_programs_and_settings() -> None:
    assert {name for name, _ in KNOWN} <= set(BUILDS)
    assert {setting for _, setting in KNOWN} <= set(SETTINGS)


def test_what_the_readme_names_is_there() -> None:
    text = (HERE / "README.md").read_text().partition("## What was broken once")[2]
    named = re.findall(r"`([^` ]+)`", text)
    files = {name for name in named if "/" in name or name.endswith(".py")}
    places = (HERE, HERE.parent, HERE.parent.parent)
    assert {name for name in files if not any((place / name).exists() for place in places)} == set()
    assert set(named) - files - {"code"} <= set(BUILDS)
    assert len(set(named) - files) > 20
