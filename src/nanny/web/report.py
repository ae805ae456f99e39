"""`nanny report`: a recorded run as one HTML file that opens anywhere, without network.

For instance:

    nanny report --db nanny_logs -o report.html
    nanny report --run 3 --compare 2        the same with run 2 as the reference: where do they part?
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..core.command_line import add_language, add_run, command_parser
from ..core.finding import NannyError
from ..core.numbers import short
from ..core.terminal import progress_shown, say


def parser() -> argparse.ArgumentParser:
    parser = command_parser("report", __doc__)
    add_run(parser)
    parser.add_argument("--compare", metavar="RUN", help="the reference: a run's number, or a path such as fp32/metrics.db:1")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    add_language(parser, "the page")
    return parser


def write_report(
    output: Path, db: str | Path | None = None, run: int | None = None, compare: str | None = None, lang: str | None = None
) -> int:
    """Writes the page and returns its size in bytes."""
    from .data import page_data
    from .page import render

    text = render(page_data(db, run, compare), live=False, lang=lang).encode("utf-8")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(text)
    except OSError as error:
        raise NannyError(f"cannot write {output} ({error.strerror or error}); name another file with -o FILE") from error
    return len(text)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    with progress_shown():
        size = write_report(args.output, args.db, args.run, args.compare, args.lang)
    say(f"{args.output}: {short(size / 1e6)} MB, opens in any browser, needs no network")
    return 0
