"""The checker on marked source files: every `# expect: CODE` is found on its line, and nothing else anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nanny.check import Options, check_source

FIXTURES = Path(__file__).parent / "check_fixtures"
MARK = re.compile(r"#\s*expect:\s*([A-Z0-9_, ]+)")


def marks(text: str) -> set[tuple[int, str]]:
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        match = MARK.search(line)
        if match:
            found |= {(number, code.strip()) for code in match.group(1).split(",") if code.strip()}
    return found


def reported(text: str, name: str) -> set[tuple[int, str]]:
    return {(f.line or 0, f.code) for f in check_source(text, name, Options())}


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("bad/*.py")), ids=lambda p: p.stem)
def test_exactly_the_marked_lines_are_reported(path: Path):
    text = path.read_text()
    assert marks(text), "a bad fixture without a mark proves nothing"
    assert reported(text, path.name) == marks(text)


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("clean/*.py")), ids=lambda p: p.stem)
def test_right_code_stays_silent(path: Path):
    assert reported(path.read_text(), path.name) == set()
