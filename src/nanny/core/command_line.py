"""What commands share: a parser whose complaints are NannyErrors, and a result that goes to the terminal or into a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from .finding import NannyError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NannyError(f"{message}; type `{self.prog} --help`")


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
