"""Colour, width and line breaks of the terminal. Colour is decoration: every line says the same without it."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import TextIO

DEFAULT_WIDTH = 100
_WIDE = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef"
_CLOSING = "，。；：！？、）”》"  # no line begins with one
_PIECE = rf"[^\S\xa0]+|(?:[{_WIDE}]|[^\s{_WIDE}](?:[^\s{_WIDE}]|\xa0)*)[{_CLOSING}]*"
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


def paint(text: str, style: str, colour: bool) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if colour and style in _CODES else text


def columns_of(text: str) -> int:
    """Columns of a terminal that the text fills: a Chinese character takes two, a combining mark none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def whole_shares(text: str) -> str:
    """No line ends inside `5 %`."""
    return re.sub(r"(?<=\d) (?=%)", "\xa0", text)


def wrap(text: str, width: int, indent: int = 0) -> list[str]:
    """Lines of at most `width` columns, broken at spaces and between Chinese characters; words stay whole, and so does `5 %`."""
    lines, line, filled = [], "", 0
    for piece in re.findall(_PIECE, whole_shares(text)):
        wide = columns_of(piece)
        if line.strip() and filled + wide > width and not piece.isspace():
            lines.append(line.rstrip())
            line, filled = " " * indent, indent
        if not (piece.isspace() and lines and not line.strip()):
            line, filled = line + piece, filled + wide
    return [text.replace("\xa0", " ") for text in [*lines, line.rstrip()]]
