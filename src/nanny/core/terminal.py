"""Text of others on a terminal: names, values, paths and messages that nanny did not write must not steer it.

`say(text)` prints what a command found; `visible(name)` is for the parts a renderer puts together. Inside `progress_shown()`,
which a command enters, `progress(text)` tells how far long work is.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
import unicodedata
from collections.abc import Iterator
from typing import TextIO

LONGEST_SENTENCE = 2000
LONGEST_LINE = 79
PROGRESS_SECONDS = 0.2
_told_at: float | None = None  # when progress was last told; None: nobody asked for it
_OWN_COLOURS = re.compile("(\x1b\\[(?:0|1|2|31;1|32|33)m)")  # what show.term.painted writes
_ANY_CONTROL = re.compile(r"[^\n\t\x20-\x7e]")


def visible(text: str) -> str:
    """Control characters, marks that turn the reading direction, hide or have no shape, by their code: `\\x1b`, `\\u202e`."""
    return text if text.isprintable() else "".join(map(_escape, text))


def visible_lines(text: str, colour: bool = False) -> str:
    """The same of a whole text: its line breaks and tabs stay, and, where they are wanted, the colours that nanny writes."""
    if not _ANY_CONTROL.search(text):
        return text
    if colour:
        return "".join(part if i % 2 else visible_lines(part) for i, part in enumerate(_OWN_COLOURS.split(text)))
    return "".join(char if char in "\n\t" else _escape(char) for char in text)


def one_sentence(text: str) -> str:
    """On one line and of a readable length; what is too long is left out in the middle, for the end says what to do."""
    sentence = visible(text.replace("\n", " "))
    if len(sentence) <= LONGEST_SENTENCE:
        return sentence
    half = LONGEST_SENTENCE // 2
    return f"{sentence[:half]} … {sentence[-half:]}"


def say(text: str, stream: TextIO | None = None, colour: bool = False) -> None:
    """Prints text in which words of others may stand, whatever this terminal's encoding can show of it."""
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(visible_lines(text, colour).encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def tell(text: str, colour: bool = False) -> None:
    """The same on stderr while a program of the user's runs: one that is closed, gone or replaced is no reason to fail."""
    try:
        if sys.stderr is not None:
            say(text, sys.stderr, colour)
    except Exception:  # noqa: BLE001 - the stream may be an object of the user's
        pass


def complain(text: str) -> None:
    """One sentence on stderr."""
    say(f"nanny: {one_sentence(text)}", sys.stderr)


@contextlib.contextmanager
def progress_shown() -> Iterator[None]:
    """One line of the terminal that is written over, a few times a second, and gone at the end; nothing where there is none."""
    global _told_at
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    _told_at = time.monotonic()
    try:
        yield
    finally:
        _told_at = None
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def progress(text: str) -> None:
    global _told_at
    if _told_at is not None and (now := time.monotonic()) - _told_at > PROGRESS_SECONDS:
        _told_at = now
        print(f"\r\x1b[K{visible(text)[:LONGEST_LINE]}\r", end="", file=sys.stderr, flush=True)


def _escape(char: str) -> str:
    if char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    return char.encode("unicode_escape").decode("ascii")
