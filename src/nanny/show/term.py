"""Colour and width of the terminal. Colour is decoration: every line says the same without it."""

from __future__ import annotations

import os
from typing import TextIO

DEFAULT_WIDTH = 100
_CODES = {"error": "31;1", "warning": "33", "good": "32", "quiet": "2", "strong": "1"}


def wants_colour(stream: TextIO) -> bool:
    """True on a terminal that shows colour, unless NO_COLOR says otherwise (FORCE_COLOR asks for it anywhere)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def width_of(stream: TextIO) -> int:
    """Columns to fill: the terminal's, within reason; 100 where there is none."""
    if not stream.isatty():
        return DEFAULT_WIDTH
    import shutil  # 4 ms, and a pipe has no width

    return min(max(shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns, 60), 160)


def painted(text: str, style: str, colour: bool) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if colour and style in _CODES else text
