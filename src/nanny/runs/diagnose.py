"""`nanny diagnose`: the root cause of what went wrong in a recorded run. Exit code 1 if anything did."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..core.command_line import add_format, add_language, add_run, command_parser, examine_command
from ..core.plain_json import to_text
from ..core.terminal import say
from ..diagnose.text import render_markdown, render_text
from ..show.term import width_of
from .source import open_job
from .summary import summarize


def main(argv: Sequence[str]) -> int:
    parser = command_parser("diagnose", "The root cause of what went wrong in a recorded run.")
    add_run(parser)
    add_format(parser, ("text", "json", "markdown"))
    add_language(parser, "the remedy", "en")
    parser.add_argument("--no-try", action="store_true", help="leave out what remedies did when they were tried on the bad step")
    options = parser.parse_args(list(argv))
    with open_job(options.db, options.run) as (sources, notes):
        summary = summarize(sources, notes, tried=not options.no_try)
    verdict, source = summary.verdict, summary.culprit_rank.source
    cause = None if verdict.diagnosis is None else verdict.diagnosis.in_language(options.lang)
    title = f"run {options.run} in {source.shown}" if options.run else source.shown
    why_not = str(source.run.meta.get("not_again") or "")
    wanted = verdict.unproved or (bool(why_not) and cause is not None and not cause.where)
    prove = examine_command(source.run.argv, None if verdict.first is None else verdict.first.step) if wanted else ""
    if options.format == "json":
        say(to_text([cause.to_json()] if cause is not None else []))
    elif options.format == "markdown":
        say(render_markdown(verdict, cause, title, prove, options.lang))
    else:
        say(render_text(verdict, cause, title, prove, min(width_of(sys.stdout), 120), options.lang).rstrip())
        if why_not and wanted:
            say(f"   the bad step was not run again beside FP32: {why_not}" + (f"; to see it: {prove}" if cause else ""))
        if options.no_try:
            say("   remedies that were tried on the step are left out: --no-try")
    return int(verdict.healthy is False)
