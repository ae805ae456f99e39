"""`nanny run train.py ARGS...`: a training script under the monitor, without changing it.

The script's arguments, output, exceptions and exit code are its own; the nanny writes to stderr and to its folder only.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.command_line import Parser, add_language, terminal_language
from ..core.finding import NannyError
from ..watch.script import check_module, start_target

if TYPE_CHECKING:
    from .watch import MixedPrecisionNanny


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="nanny run",
        description="Runs a training script (or, with -m, a module) under the monitor. Options of nanny come first.",
        usage="nanny run [options] (SCRIPT | -m MODULE) [ARGS ...]",
    )
    parser.add_argument(
        "--trace-interval", type=int, default=100, metavar="N", help="trace module outputs every N steps (default 100)"
    )
    for name, word in (("include", "only"), ("exclude", "not")):
        parser.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar="LAYER",
            help=f"trace {word} this module (blocks.*.attn), and what is inside",
        )
    parser.add_argument(
        "--output-dir", default="nanny_logs", metavar="DIR", help="where the run is recorded (default nanny_logs)"
    )
    parser.add_argument(
        "--dump-on-error", action="store_true", help="save the culprit's inputs and weights (training data!) on an ERROR"
    )
    parser.add_argument("--no-try", action="store_true", help="try no remedies, beside the run, on a step that went wrong")
    parser.add_argument(
        "--ranks", metavar="WHO", help="ranks that write a record: 0,7,64-71 or sample:32 (default: all); the others only watch"
    )
    parser.add_argument(
        "--on-finding", metavar="CMD", help="a command to run, or a URL to POST to, at each warning and error: the alarm"
    )
    add_language(parser, "what is said", chosen_by="the locale")
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is a module, as in python -m")
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.ranks is not None:
        ranks_that_write(options.ranks, 1)  # refused before the script starts
    if not options.target:
        raise NannyError("nanny run needs a script: nanny run train.py ARGS..., or nanny run -m package.train ARGS...")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    name = options.target[0]
    if not options.module and not os.path.isfile(name):
        raise NannyError(f"there is no script {name!r}; for a module type: nanny run -m {name}")
    if options.module:
        check_module(name)
    if os.environ.get("NANNY_DISABLE", "") in ("", "0"):
        _watch_everything(options)
    start_target(options.target, options.module)
    return 0


def _watch_everything(options: argparse.Namespace) -> None:
    """The monitor closes itself when the interpreter ends, however that comes about."""
    from .alarm import alarm
    from .watch import MixedPrecisionNanny

    size, rank = (int(os.environ.get(name, "") or default) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    writes = options.ranks is None or rank in ranks_that_write(options.ranks, size)
    argv, sys.argv = sys.argv, list(options.target)  # the run is known by the script's own command line
    try:
        nanny = MixedPrecisionNanny(
            None,
            trace_interval=options.trace_interval,
            output_dir=options.output_dir if writes else None,
            dump_on_error=options.dump_on_error,
            try_remedies=not options.no_try,
            include=options.include,
            exclude=options.exclude,
            on_finding=None if options.on_finding is None else alarm(options.on_finding),
        )
    finally:
        sys.argv = argv
    nanny.set_language(terminal_language(options.lang))
    nanny.steps_by_themselves(find_models=True, first=None)
    _kept.append(nanny)


def ranks_that_write(text: str, size: int) -> set[int]:
    """`0,7,64-71`, or `sample:32`: so many, evenly spaced, the first among them."""
    kind, colon, number = text.partition(":")
    if colon and kind == "sample" and number.isdecimal() and int(number[:9]) > 0:
        count = min(int(number[:9]), size)
        return {i * size // count for i in range(count)}
    out: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and len(last) <= 9 and int(first) <= int(last)):
            raise NannyError(f"--ranks {text} names no ranks; write 0,7,64-71 or sample:32")
        out.update(range(int(first), min(int(last), size - 1) + 1))
    return out


_kept: list[MixedPrecisionNanny] = []  # alive until the interpreter ends


def recorded_at() -> tuple[Path, int] | None:
    """Store and number of the run that was watched, if it wrote any."""
    return _kept[-1].recorded_at if _kept else None


def saw_nothing() -> bool:
    """The script ended, and no training step was seen in it."""
    return bool(_kept) and _kept[-1].saw_nothing
