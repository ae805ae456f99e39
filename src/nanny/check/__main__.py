"""`python -m nanny.check PATH...` is `nanny check PATH...`."""

import sys
from collections.abc import Sequence

from ..core.command_line import check_words, exit_code_of, refusals_in_words
from .command import main


def run_check(argv: Sequence[str]) -> int:
    check_words(argv)
    with refusals_in_words("nanny check"):
        return main(argv)


sys.exit(exit_code_of(run_check, sys.argv[1:]))
