"""`nanny trace train.py ARGS...`: a training script with every operation watched, without changing it.

`--nan` (the default) names who made the first NaN or Inf, `--compare` holds every operation against FP32 or FP64 on the CPU,
`--sanitize` examines one step for numerical hazards. The script's output is its own; the trace goes to stderr or, with
--log, to a file per rank.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from ..core.command_line import Parser, add_result, terminal_language, write_result
from ..core.finding import NannyError
from ..core.plain_json import finding_object, to_text
from ..core.terminal import tell
from ..show.translation import translate
from ..watch.script import check_module, start_target


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="nanny trace",
        description="Runs a training script (or, with -m, a module) with every operation watched. Options of nanny come first.",
        usage="nanny trace [options] (SCRIPT | -m MODULE) [ARGS ...]",
    )
    parser.add_argument("--nan", action="store_true", help="who made the first NaN or Inf (the default)")
    parser.add_argument("--compare", action="store_true", help="compare every operation with FP32 or FP64 on the CPU")
    parser.add_argument("--sanitize", action="store_true", help="examine one step, --start-step, for numerical hazards")
    parser.add_argument("--start-step", type=int, default=0, metavar="A", help="first step that is watched (default 0)")
    parser.add_argument("--end-step", type=int, metavar="B", help="first step that is not watched any more")
    parser.add_argument("--op", action="append", metavar="GLOB", help="only these operations: addmm, '*norm*'; may be repeated")
    parser.add_argument("--module", action="append", metavar="GLOB", help="only in these modules: 'blocks.3.*'; may be repeated")
    parser.add_argument("--white-list", action="append", metavar="GLOB", help="not these operations; may be repeated")
    parser.add_argument("--atol", type=float, help="with --compare: absolute tolerance (default: by dtype and conditioning)")
    parser.add_argument("--rtol", type=float, help="with --compare: relative tolerance")
    parser.add_argument(
        "--dump", action="store_true", help="save inputs and outputs (training data!) of what is wrong, and go on"
    )
    parser.add_argument("--log", action="store_true", help="write to a file per rank instead of stderr")
    parser.add_argument("--output-dir", default="nanny_logs/ops", metavar="DIR", help="logs and dumps (default nanny_logs/ops)")
    parser.add_argument("--rank", type=int, action="append", metavar="R", help="only on this rank; may be repeated")
    parser.add_argument("--verbose", action="store_true", help="a line for every operation")
    add_result(parser, ("text", "json"), "the log")
    parser.add_argument("-m", dest="as_module", action="store_true", help="what follows is a module, as in python -m")
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.target:
        raise NannyError("nanny trace needs a script: nanny trace train.py ARGS..., or nanny trace -m package.train ARGS...")
    if not options.as_module and not os.path.isfile(options.target[0]):
        raise NannyError(f"there is no script {options.target[0]!r}; for a module type: nanny trace -m {options.target[0]}")
    if options.as_module:
        check_module(options.target[0])
    if options.output and options.format == "text":
        raise NannyError("-o FILE is for --format json, what was found as data; --log writes the text into a file per rank")
    if options.start_step < 0:
        raise NannyError(f"--start-step {options.start_step}: steps are counted from 0")
    if not (options.compare or options.sanitize):
        options.nan = True
    if (options.atol is not None or options.rtol is not None) and not options.compare:
        raise NannyError("--atol and --rtol are tolerances of --compare; add it")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The script's own exit code; 1 if it ended well and something was found."""
    options = parse(sys.argv[1:] if argv is None else argv)
    code = 0
    watched = _Watched(options)
    with watched:
        try:
            start_target(options.target, options.as_module)
        except SystemExit as end:
            if not isinstance(end.code, int) and end.code is not None:
                print(end.code, file=sys.stderr)
                code = 1
            else:
                code = end.code or 0
    if options.format == "json":
        write_result(to_text(watched.answer()), options.output)
    return code or (1 if watched.found else 0)


class _Watched:
    """The tools that were asked for, around the script; steps are counted by its optimizers."""

    def __init__(self, options: argparse.Namespace) -> None:
        from ..watch.steps import StepClock

        self._options = options
        self._tools = _tools(options)
        self._clock = StepClock(self._begin)
        self._lang = terminal_language(options.lang)
        self._examined: Any = None
        self._examination: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> _Watched:
        for tool in self._tools:
            self._stack.enter_context(tool)
        self._stack.callback(self._end_examination)
        self._stack.enter_context(self._clock)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)
        first = self._options.start_step
        if self._step < first and (first > 0 or self._options.sanitize):  # else operations outside steps were watched
            nothing = f"nothing was looked at: --start-step is {first}, training steps of the script: {self._step + 1}"
            counted = "counted from 0; a step begins with a forward call of a model in training mode"
            tell(f"nanny: {translate(nothing, self._lang)}\n({translate(counted, self._lang)})")

    def _begin(self, model: Any) -> None:
        for tool in self._tools:
            if self._step:
                tool.step()
        if self._options.sanitize:
            self._end_examination()
            if self._step == self._options.start_step:
                from ..examine.run import sanitize

                for tool in self._tools:
                    tool.pause()
                    left_out = f"{tool.tool} leaves out step {self._step}, which --sanitize examines"
                    tell(f"nanny: {translate(left_out, self._lang)}")
                self._examined = sanitize(model, step=self._step)
                self._examined.__enter__()

    def _end_examination(self) -> None:
        if self._examined is not None:
            examined, self._examined = self._examined, None
            examined.__exit__(None, None, None)
            from ..examine.text import render_examination

            self._examination = examined.examination
            tell(render_examination(self._examination, lang=self._lang))
            if examined.hazards and examined.hazards[0].cause:
                tell(f"\n{translate('next', self._lang)}: nanny rule {examined.hazards[0].cause}")
            for tool in self._tools:
                tool.pause(False)

    @property
    def _step(self) -> int:
        return self._clock.step

    @property
    def found(self) -> int:
        hazards = 0 if self._examination is None else len(self._examination.hazards)
        return hazards + sum(len(tool.findings) for tool in self._tools)

    def answer(self) -> dict[str, Any]:
        """What was found, as data."""
        examined = None if self._examination is None else asdict(replace(self._examination, suspects=()))
        return {"findings": [finding_object(f) for tool in self._tools for f in tool.findings], "examination": examined}


def _tools(options: argparse.Namespace) -> list[Any]:
    from .watch import CompareWithCPU, NanInfTracker

    shared: dict[str, Any] = {
        "target_list": options.op,
        "white_list": options.white_list,
        "dump_error_data": options.dump,
        "stop_on_error": False,
        "verbose": options.verbose,
        "enable_ranks": options.rank,
        "should_log_to_file": options.log,
        "output_dir": options.output_dir,
        "start_step": options.start_step,
        "end_step": options.end_step,
        "modules": options.module,
    }
    tools: list[Any] = []
    if options.nan:
        tools.append(NanInfTracker(**shared))
    if options.compare:
        tools.append(CompareWithCPU(atol=options.atol, rtol=options.rtol, **shared))
    for tool in tools:
        tool.lang = terminal_language(options.lang)
        tool.script = ("-m " if options.as_module else "") + shlex.join(options.target)
    return tools
