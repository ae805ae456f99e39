"""`nanny diagnose`: the root cause of what went wrong in a recorded run. Exit code 1 if anything did."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..core.command_line import add_result, add_run, command_parser, examine_command, terminal_language, write_result
from ..core.plain_json import to_text
from ..diagnose.text import diagnosis_block, render_markdown
from ..show.tables import Line, lines_text, translate_line
from ..show.term import wants_colour, width_of
from ..show.translation import translate
from .opening import open_job
from .summary import Summary, summarize


def main(argv: Sequence[str]) -> int:
    parser = command_parser("diagnose", "The root cause of what went wrong in a recorded run.")
    add_run(parser)
    add_result(parser, ("text", "json", "markdown"), "what is said")
    parser.add_argument("--no-try", action="store_true", help="leave out what remedies did when they were tried on the bad step")
    options = parser.parse_args(list(argv))
    with open_job(options.db, options.run) as (sources, notes):
        summary = summarize(sources, notes, tried=not options.no_try)
    verdict, source = summary.verdict, summary.culprit_rank.source
    language = terminal_language(options.lang) if options.format != "json" else options.lang or "en"
    cause = None if verdict.diagnosis is None else verdict.diagnosis.in_language(language)
    title = f"run {options.run} in {source.shown}" if options.run else source.shown
    if options.format == "json":
        write_result(to_text([cause.to_json()] if cause is not None else []), options.output)
    elif options.format == "markdown":
        write_result(render_markdown(verdict, cause, title, _proof(summary), language), options.output)
    else:
        lines = [Line(title, whole=True), Line(""), *diagnosis_lines_of(summary, language)]
        left_out = translate("   remedies that were tried on the step are left out: --no-try", language)
        lines += [Line(left_out)] if options.no_try else []
        colour = wants_colour(sys.stdout) and not options.output
        write_result(lines_text(lines, min(width_of(sys.stdout), 120), colour), options.output, colour)
    return int(verdict.healthy is False)


def diagnosis_lines_of(summary: Summary, language: str) -> list[Line]:
    """The diagnosis as `nanny diagnose` and the end of `nanny run` show it."""
    verdict, prove, why_not = summary.verdict, _proof(summary), _why_not_again(summary)
    cause = None if verdict.diagnosis is None else verdict.diagnosis.in_language(language)
    lines = diagnosis_block(verdict, cause, "" if cause else prove, language)
    if why_not and prove:
        to_see = f"; to see it: {prove}" if cause else ""
        lines.append(Line(f"   the bad step was not run again beside FP32: {why_not}{to_see}", indent=3))
    return [line if line.whole else translate_line(line, language) for line in lines]


def _why_not_again(summary: Summary) -> str:
    return str(summary.culprit_rank.source.run.meta.get("not_again") or "")


def _proof(summary: Summary) -> str:
    """The command that would prove what this record does not."""
    verdict, cause = summary.verdict, summary.verdict.diagnosis
    if not verdict.unproved and not (_why_not_again(summary) and cause is not None and not cause.where):
        return ""
    return examine_command(summary.culprit_rank.source.run.argv, None if verdict.first is None else verdict.first.step)
