"""The `nanny` command: picks which feature's `main(argv)` to call, and imports only that one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from ..core.command_line import check_words, exit_code_of, refusals_in_words
from ..core.finding import NannyError
from ..core.numbers import nearest

# name -> (module, what it does). A module's main(argv) gets the sub-command's name first where it serves several.
COMMANDS = {
    "check": ("nanny.check.command", "find mixed-precision mistakes in source code, before training"),
    "lsp": ("nanny.check.language_server", "the checker in an editor: findings, explanations and quick fixes as you type"),
    "tensor": ("nanny.tensor.command", "what fp16, bf16 or fp8 would do to a stored tensor"),
    "diff": ("nanny.diff.command", "where a model in bf16 or fp16 parts from its FP32 self, and which layer's fault it is"),
    "trace": ("nanny.ops.command", "run a script with every operation watched: who made the NaN, which kernel is wrong"),
    "replay": ("nanny.ops.replay", "run a dumped operation again beside its reference"),
    "run": ("nanny.cli.run", "run a training script under the monitor, without changing it"),
    "diagnose": ("nanny.runs.diagnose", "the root causes of what went wrong in a recorded run"),
    "summary": ("nanny.runs.command", "verdict on a recorded run, first culprit first"),
    "alerts": ("nanny.runs.command", "findings of a run, with filters"),
    "stats": ("nanny.runs.command", "statistics of every layer at one step"),
    "layer": ("nanny.runs.command", "history of one layer, parameter or gradient"),
    "runs": ("nanny.runs.command", "the runs in a file or folder"),
    "compare": ("nanny.runs.command", "where two runs part"),
    "whatif": ("nanny.runs.command", "would this run have survived in another format?"),
    "export": ("nanny.runs.command", "a run as csv, parquet or tensorboard"),
    "snapshot": ("nanny.runs.command", "a portable copy of a live run"),
    "sql": ("nanny.runs.command", "a read-only query"),
    "tail": ("nanny.runs.command", "follow a live run in the terminal"),
    "report": ("nanny.web.report", "a run as one HTML file that opens without network"),
    "ui": ("nanny.web.ui", "the page on a run in the browser, live"),
    "card": ("nanny.cli.card", "one picture of a run to paste into an issue"),
    "plot": ("nanny.cli.plot", "pictures of a run for papers and chat"),
    "rule": ("nanny.cli.explain", "explain a finding's code"),
    "mcp": ("nanny.agent.server", "let an AI agent check code and read runs"),
    "doctor": ("nanny.cli.doctor", "versions, devices, and what is missing for which command"),
    "demo": ("nanny.cli.demo", "see the tool work on a small real training run"),
    "completion": ("nanny.cli.completion", "what makes a shell complete these commands with Tab"),
}
SHARED = {"nanny.runs.command"}
# these take --db before their name, too
READ_RUNS = {*SHARED, "nanny.runs.diagnose", "nanny.web.report", "nanny.web.ui", "nanny.cli.card", "nanny.cli.plot"}
# in these an error of the operating system may be the user's program's own, and keeps its traceback
RUN_PROGRAMS = {"nanny.cli.run", "nanny.ops.command", "nanny.diff.command"}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: nanny [--version] COMMAND ...",
            "",
            "The nanny of mixed-precision training. Commands:",
            "",
            *lines,
            "",
            "nanny COMMAND --help says more about one of them. Begin with `nanny demo`, or with your own: `nanny run train.py`.",
        ]
    )


def split_db(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes a `--db PATH` that stands before the sub-command off the front."""
    head: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("--db"):
        take = 1 if rest[0].startswith("--db=") else 2
        head, rest = head + rest[:take], rest[take:]
    return head, rest


def run_command(argv: Sequence[str]) -> int:
    check_words(argv)
    head, rest = split_db(argv)
    if not rest or rest[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if rest else 2
    if rest[0] in ("-V", "--version"):
        from .. import __version__

        print(f"nanny {__version__}")
        return 0
    name = rest[0]
    if name not in COMMANDS:
        raise NannyError(f"there is no command {name!r}{nearest(name, COMMANDS) or ';'} type `nanny --help` for the list")
    module = COMMANDS[name][0]
    if head and module not in READ_RUNS:
        raise NannyError(f"`nanny {name}` reads no run, so --db has no meaning for it")
    main_of = importlib.import_module(module).main
    with nullcontext() if module in RUN_PROGRAMS else refusals_in_words(f"nanny {name}"):
        return int(main_of([*([name] if module in SHARED else []), *head, *rest[1:]]))


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code_of(run_command, sys.argv[1:] if argv is None else argv)
