"""What commands share: the flags (--db, --run, --format, --lang), spelt and explained alike, and where a result goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .finding import NannyError

LANGUAGES = ("en", "zh")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NannyError(f"{message}; type `{self.prog} --help`")


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that shows its description as it was written."""
    return argparse.ArgumentParser(
        prog=f"nanny {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Which recorded run."""
    parser.add_argument("--db", metavar="PATH", help="a metrics.db or its folder (default: the newest under nanny_logs)")
    parser.add_argument("--run", type=int, metavar="N", help="number of the run in it, see `nanny runs` (default: the newest)")


def add_format(parser: argparse.ArgumentParser, formats: Sequence[str]) -> None:
    parser.add_argument("--format", choices=tuple(formats), default=formats[0], help=f"default: {formats[0]}")


def add_language(parser: argparse.ArgumentParser, of: str, default: str | None = None) -> None:
    """`default` None leaves the choice to the browser."""
    shown = default or "the browser's language"
    parser.add_argument("--lang", choices=LANGUAGES, default=default, help=f"language of {of} (default: {shown})")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; take one from 1024 to 65535")
    return int(text)


def write_result(text: str, output: str | None) -> None:
    """To the terminal unless there is an `--output FILE`."""
    if not output:
        print(text)
        return
    try:
        Path(output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise NannyError(f"{output}: cannot be written ({error.strerror or error}); name another --output FILE") from None
    print(f"nanny: written to {output}", file=sys.stderr)
