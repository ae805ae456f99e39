"""Comments that silence findings: `# noqa: CODE` on the line, `# nanny: noqa` or `# nanny: noqa: CODE` for the file."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ..core.finding import Finding

EVERYTHING = frozenset({""})  # the empty prefix is a prefix of every code
_CODES = r"(?P<colon>\s*:\s*(?P<codes>[A-Z]\w*(?:(?:\s*,\s*|\s+)[A-Z]\w*)*)?)?"
_ON_LINE = rf"(?i)#\s*noqa\b{_CODES}"
_IN_FILE = rf"(?i)#\s*nanny\s*:\s*noqa\b{_CODES}"


@dataclass(frozen=True)
class Suppressions:
    in_file: frozenset[str] = frozenset()
    on_line: dict[int, frozenset[str]] = field(default_factory=dict)


NONE = Suppressions()


def selects(code: str, patterns: Collection[str]) -> bool:
    """A code, or the beginning of one: `SCALER` selects all of the family."""
    return any(code.startswith(pattern) for pattern in patterns)


def read_suppressions(text: str, is_python: bool = True) -> Suppressions:
    """Only real comments count, so a string that holds `# noqa` silences nothing."""
    if "noqa" not in text.lower():
        return NONE
    in_file: set[str] = set()
    on_line: dict[int, frozenset[str]] = {}
    for row, comment in _comments(text) if is_python else _hashes(text):
        whole = re.search(_IN_FILE, comment)
        if whole:
            in_file |= _codes_of(whole)
        else:
            part = re.search(_ON_LINE, comment)
            if part:
                on_line[row] = _codes_of(part)
    return Suppressions(frozenset(in_file), on_line)


def is_suppressed(finding: Finding, suppressions: Suppressions) -> bool:
    """A comment counts on the first and on the last line of the code that is meant."""
    if _names(suppressions.in_file, finding.code):
        return True
    return any(_names(suppressions.on_line.get(row or 0, ()), finding.code) for row in (finding.line, finding.end_line))


def _names(patterns: Collection[str], code: str) -> bool:
    """Whole words only: `# noqa: S` is meant for another linter."""
    return any(not pattern or code == pattern or code.startswith(f"{pattern}_") for pattern in patterns)


def _codes_of(match: re.Match[str]) -> frozenset[str]:
    """`# noqa:` followed by no code silences nothing: somebody began to name one."""
    if match["colon"] is None:
        return EVERYTHING
    words = re.split(r"[,\s]+", match["codes"] or "")
    codes = itertools.takewhile(lambda word: word.isupper() or "_" in word, words)  # then an explanation may follow
    return frozenset(code.upper().rstrip("_") for code in codes)


def _comments(text: str) -> Iterator[tuple[int, str]]:
    import tokenize

    comments = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments.append((token.start[0], token.string))
    except (tokenize.TokenError, SyntaxError):  # broken code: its comments up to here are known, the rest by their look
        known = comments[-1][0] if comments else 0
        comments += [(row, comment) for row, comment in _hashes(text) if row > known]
    yield from comments


def _hashes(text: str) -> Iterator[tuple[int, str]]:
    for row, line in enumerate(text.split("\n"), 1):
        if "#" in line:
            yield row, line[line.index("#") :]
