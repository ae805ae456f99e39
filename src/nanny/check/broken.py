"""SYNTAX_ERROR: a file that cannot be parsed is a finding of its own, and the other files go on."""

from __future__ import annotations

import re
import sys

from ..core.finding import Finding, Severity

# What Python 3 says about constructs of Python 2.
_PYTHON_2 = (
    "Missing parentheses in call to",
    "multiple exception types must be parenthesized",
    "leading zeros in decimal integer literals",
    "inconsistent use of tabs and spaces",
)
# f-strings with quotes and line breaks inside, `type X = ...`, `def f[T](...)`: since Python 3.12
_NEWER = r"""\b[rR]?[fF][rR]?["']|^\s*type \w+(?:\[.*\])? *=|^\s*(?:async def|def|class) \w+\["""
PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"


def broken_code(error: SyntaxError, path: str, reader: str = PYTHON, cell: int | None = None) -> Finding:
    reason = error.msg or "invalid syntax"
    hint = "Correct the line, or name the file under `exclude` in [tool.nanny] of pyproject.toml."
    if _is_python_2(error):
        hint = f"This looks like Python 2: convert the file (2to3), or leave it out. {hint}"
    is_newer = sys.version_info < (3, 12) and bool(reader) and re.search(_NEWER, error.text or "") is not None
    if is_newer:
        hint = f"This may be the syntax of a newer Python: run nanny with Python 3.12 or later. {hint}"
    return Finding(
        code="SYNTAX_ERROR",
        # the other cells of a notebook are checked; code for a newer Python is no mistake
        severity=Severity.ERROR if cell is None and not is_newer else Severity.WARNING,
        message=f"nothing in this {'file' if cell is None else 'cell'} was checked: "
        f"{f'{reader} cannot read it, ' if reader else ''}{reason.rstrip('.?')}",
        hint=hint,
        file=path,
        cell=cell,
        line=error.lineno or 1,
        column=max(error.offset or 1, 1),
        end_line=error.end_lineno if error.end_lineno and error.end_offset else None,
        end_column=error.end_offset if error.end_lineno and error.end_offset and error.end_offset > 0 else None,
    )


def too_deep(path: str) -> str:
    return f"{path}: skipped, its code is nested too deeply to be read"


def _is_python_2(error: SyntaxError) -> bool:
    text = (error.text or "").strip()
    return any(part in (error.msg or "") for part in _PYTHON_2) or text.startswith(("exec ", "raise ")) or "<>" in text
