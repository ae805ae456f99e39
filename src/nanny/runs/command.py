"""Questions to a recorded run: summary, alerts, stats, layer, runs, compare, whatif, export, snapshot, sql, tail.

    nanny summary --db nanny_logs/metrics.db        (or: python -m nanny.runs.command summary ...)

Each command is a module of `nanny.runs` with `add_arguments(parser)` and `answer(args)`; nothing here imports torch.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence
from types import ModuleType

from ..core.finding import NannyError
from ..show.tables import FORMATS, Answer, rendered
from ..show.term import wants_colour, width_of

COMMANDS = ("summary", "alerts", "stats", "layer", "runs", "compare", "whatif", "export", "snapshot", "sql", "tail")


def parser_of(name: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"nanny {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--db", metavar="PATH", help="a metrics.db or its folder (default: the newest under nanny_logs)")
    parser.add_argument("--run", type=int, metavar="N", help="number of the run in it, see `nanny runs` (default: the newest)")
    module.add_arguments(parser)
    forms = getattr(module, "FORMATS", FORMATS)
    parser.add_argument("--format", choices=forms, default=forms[0], help=f"default: {forms[0]}")
    return parser


def ask(argv: Sequence[str]) -> tuple[Answer, str]:
    """The answer to a command line that starts with the command's name, and the format in which it is wanted."""
    if not argv or argv[0] not in COMMANDS:
        raise NannyError(f"name one of the query commands: {', '.join(COMMANDS)}")
    name, *rest = argv
    module = importlib.import_module(f"nanny.runs.{name}")
    args = parser_of(name, module).parse_args(rest)
    form = "text" if hasattr(module, "FORMATS") else args.format  # with formats of its own it writes them itself
    return module.answer(args), form


def main(argv: Sequence[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a layer's name must not break the output in an ASCII locale
    answer, form = ask(argv)
    text = rendered(answer, form, width_of(sys.stdout), wants_colour(sys.stdout))
    if text:
        print(text)
    return answer.exit_code
