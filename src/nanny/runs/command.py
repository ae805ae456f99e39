"""Questions to a recorded run: summary, alerts, stats, layer, runs, compare, whatif, export, snapshot, sql, tail.

    nanny summary --db nanny_logs/metrics.db

Here are only their arguments: each asks a function of this room, and its file in `text/` shows what that returns. Nothing here
imports torch.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.command_line import (
    add_format,
    add_language,
    add_output,
    add_run,
    command_parser,
    positive,
    seconds,
    terminal_language,
    whole,
    write_result,
)
from ..core.finding import NannyError, Severity
from ..core.formats import TARGETS, format_of
from ..core.numbers import amount
from ..core.plain_json import finding_object, to_text
from ..core.terminal import progress_shown, say
from ..show.tables import FORMATS, Answer, Column, Line, Table, render_answer
from ..show.term import wants_colour, width_of
from ..store.damage import Damage, damage_sentence
from .opening import open_job, open_named, open_run
from .source import step_range, title_of
from .stats import KINDS

FILES_SHOWN = 20
LAYERS = "only layers whose name matches, such as 'encoder.*'"


def _summary(args: argparse.Namespace) -> Answer:
    from .summary import summarize
    from .text.summary import summary_answer

    with open_job(args.db, args.run, args.damage) as (sources, notes):
        return summary_answer(summarize(sources, notes), terminal_language(args.lang))


def _alert_arguments(parser: argparse.ArgumentParser) -> None:
    from .text.alerts import ALERTS_SHOWN as shown

    parser.add_argument("--severity", type=Severity.parse, help="info, warning or error: this severity and above")
    parser.add_argument("--code", action="append", help="only this code (may be repeated)")
    parser.add_argument("--step", type=step_range, metavar="A:B", help="only these steps: 100, 100:200, 100: or :200")
    parser.add_argument("--layer", metavar="GLOB", help=LAYERS)
    parser.add_argument("--limit", type=positive, metavar="N", help=f"at most N findings (text shows {shown} unless told)")
    parser.add_argument("--fail-on", type=Severity.parse, metavar="SEVERITY", help="exit code 1 if a finding is that bad")


def _alerts(args: argparse.Namespace) -> Answer:
    from .alerts import find_alerts
    from .text.alerts import alerts_answer

    with open_job(args.db, args.run, args.damage) as (sources, notes):
        filters = {"severity": args.severity, "codes": args.code or (), "steps": args.step, "layer": args.layer}
        found = find_alerts(sources, notes, **filters)
        for code in found.unknown_codes:  # a mistyped code must not pass for a run without findings
            from ..show.pages import page_of

            page_of(code)
        return alerts_answer(found, args.limit, in_blocks=args.format == "text", fail_on=args.fail_on)


def _stats_arguments(parser: argparse.ArgumentParser) -> None:
    from .text.stats import STATS_SHOWN as shown

    parser.add_argument("--step", type=whole, metavar="N", help="the step (default: the last one that was traced in full)")
    parser.add_argument("--layer", metavar="GLOB", help=LAYERS)
    parser.add_argument("--kind", choices=KINDS, help="only this kind")
    parser.add_argument("--limit", type=positive, metavar="N", help=f"rows of each table in text and markdown (default: {shown})")


def _stats(args: argparse.Namespace) -> Answer:
    from .stats import stats_at
    from .text.stats import stats_answer

    with open_run(args.db, args.run, damage=args.damage) as source:
        return stats_answer(stats_at(source, args.step, kind=args.kind, layer=args.layer), args.limit)


def _layer_arguments(parser: argparse.ArgumentParser) -> None:
    from .text.layer import STEPS_SHOWN as shown

    parser.add_argument("name", metavar="NAME", help="the layer, or enough of its name")
    parser.add_argument("--kind", choices=KINDS, help="only this kind")
    parser.add_argument("--step", type=step_range, metavar="A:B", help="only these steps")
    parser.add_argument("--limit", type=positive, metavar="N", help=f"steps shown for each kind in text (default: {shown})")


def _layer(args: argparse.Namespace) -> Answer:
    from .layer import layer_history
    from .text.layer import layer_answer

    with open_run(args.db, args.run, damage=args.damage) as source:
        return layer_answer(layer_history(source, args.name, kind=args.kind, steps=args.step), args.limit)


def _runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verify", action="store_true", help="read every row of every run; exit code 1 if one is lost")


def _runs(args: argparse.Namespace) -> Answer:
    from .runs import judged, list_runs, verify_runs
    from .text.runs import RUNS_SHOWN, runs_answer, verified_answer

    if args.verify:
        return verified_answer(verify_runs(args.db, args.run))
    found = list_runs(args.db, args.run, args.damage)
    unseen = max(len(found.runs) - RUNS_SHOWN, 0) if args.format in ("text", "markdown") else 0
    return runs_answer(replace(found, runs=[*found.runs[:unseen], *judged(found.runs[unseen:], args.damage)]), args.db)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    from .text.compare import COMPARED_SHOWN as shown

    parser.add_argument("run_a", metavar="RUN_A", help="the reference: a number, or a path such as fp32/metrics.db:1")
    parser.add_argument("run_b", metavar="RUN_B", help="the other run")
    parser.add_argument("--layer", metavar="GLOB", help=LAYERS)
    parser.add_argument("--limit", type=positive, metavar="N", help=f"rows of the table in text and markdown (default: {shown})")


def _compare(args: argparse.Namespace) -> Answer:
    from .compare import compare_runs
    from .text.compare import comparison_answer

    if args.run is not None:
        raise NannyError("`nanny compare` takes the numbers of both runs, RUN_A and RUN_B; leave --run out")
    with open_named(args.run_a, args.db, damage=args.damage) as a, open_named(args.run_b, args.db, damage=args.damage) as b:
        return comparison_answer(compare_runs(a, b, args.layer), args.limit, args.db)


def _what_if_arguments(parser: argparse.ArgumentParser) -> None:
    from .text.what_if import OUTCOMES_SHOWN as shown

    parser.add_argument("--dtype", required=True, choices=TARGETS, help="the format to imagine")
    parser.add_argument("--scale", type=float, metavar="S", help="a fixed loss scale, a power of two (default: the best one)")
    parser.add_argument("--layer", metavar="GLOB", help=LAYERS)
    parser.add_argument("--limit", type=positive, metavar="N", help=f"rows of the table in text and markdown (default: {shown})")


def _what_if(args: argparse.Namespace) -> Answer:
    from .text.what_if import what_if_answer
    from .what_if import judge_in_format

    with open_run(args.db, args.run, damage=args.damage) as source:
        return what_if_answer(judge_in_format(source, format_of(args.dtype), args.scale, args.layer), args.limit)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    said = "folder (parquet: or URL) to write into; made if need be"
    parser.add_argument("-o", "--output", "--out", dest="out", metavar="DIR", required=True, help=said)
    parser.add_argument(
        "--as", dest="number", type=whole, metavar="N", help="number of the run in the dataset (default: its own)"
    )


def _export(args: argparse.Namespace) -> Answer:
    from .export import export_job, export_run

    columns = (Column("file", elastic=True), Column("rows"))
    if args.format == "parquet":
        with open_job(args.db, args.run, args.damage) as (sources, notes):
            with progress_shown():
                written = export_job(sources, args.out, args.number)
            number = sources[0].run.id if args.number is None else args.number
        lines = [Line(f"{amount(len(sources), 'rank')}, {amount(len(written), 'file')} in {args.out}")]
        lines += [Line(note, "warning") for note in notes]
        table = Table(columns, written, most=FILES_SHOWN, rest="files")
        return Answer(lines=lines, tables=[table], next=[f"nanny summary --db {shlex.quote(args.out)} --run {number}"])
    with open_run(args.db, args.run, damage=args.damage) as source, progress_shown():
        written = export_run(source, Path(args.out), args.format)
    return Answer(lines=[Line(f"{amount(len(written), 'file')} in {args.out}")], tables=[Table(columns, written)])


def _snapshot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="file or folder to write")
    parser.add_argument("--force", action="store_true", help="replace what is there")


def _snapshot(args: argparse.Namespace) -> Answer:
    from .snapshot import copy_stores

    if args.run is not None:
        raise NannyError("a snapshot holds all runs of the file; leave --run out")
    sizes = {path: path.stat().st_size for path in copy_stores(args.db, args.out, args.force)}
    return Answer(
        lines=[Line(f"{path} ({size / 1e6:.1f} MB)") for path, size in sizes.items()],
        data={"files": [{"path": str(path), "bytes": size} for path, size in sizes.items()]},
        next=[f"nanny summary --db {args.out}"],
    )


def _sql_arguments(parser: argparse.ArgumentParser) -> None:
    from .sql import ROWS, SECONDS

    parser.add_argument("query", metavar="SELECT", help="one SELECT statement")
    parser.add_argument("--limit", type=positive, default=ROWS, metavar="N", help=f"at most N rows (default: {ROWS})")
    parser.add_argument("--timeout", type=seconds, default=SECONDS, metavar="S", help=f"seconds (default: {SECONDS:g})")


def _sql(args: argparse.Namespace) -> Answer:
    from .sql import query

    if args.run is not None:
        raise NannyError(f"a query says itself which run it means; write WHERE run = {args.run} instead of --run {args.run}")
    found = query(args.db, args.query, args.limit, args.timeout, args.damage)
    table = Table(tuple(Column(name, elastic=True) for name in found.columns), found.rows)
    lines = [Line(f"only the first {args.limit} rows; --limit N shows more", "warning")] if found.cut else []
    lines += [] if found.rows else [Line("no rows")]
    data = {"columns": found.columns, "rows": [list(row) for row in found.rows], "cut": found.cut}
    return Answer(lines=lines, tables=[table], data=data)


def _tail_arguments(parser: argparse.ArgumentParser) -> None:
    from .tail import STEPS_BEFORE

    parser.add_argument("--interval", type=seconds, default=1.0, metavar="S", help="seconds between two looks (default: 1)")
    parser.add_argument("--lines", type=positive, default=STEPS_BEFORE, metavar="N", help="steps shown of what has been")


def _tail(args: argparse.Namespace) -> Answer:
    """Prints as it goes; what is left to say at the end is the answer."""
    from .tail import follow
    from .text.alerts import finding_lines
    from .text.tail import end_text, step_text

    in_json = args.format == "json"
    with open_run(args.db, args.run, live=True, damage=args.damage) as source:
        if not in_json:
            _print(Answer(lines=[Line(title_of(source), "strong", 4)]), lang=terminal_language(args.lang))
        news = follow(source, args.lines, args.interval)
        try:
            while True:
                item = next(news)
                if in_json:
                    say(to_text(item if isinstance(item, dict) else finding_object(item), None))
                else:
                    lines = [Line(step_text(item))] if isinstance(item, dict) else finding_lines(item)
                    _print(Answer(lines=lines), lang=terminal_language(args.lang))
        except StopIteration as end:
            if in_json:
                say(to_text({"status": end.value}, None))
                return Answer()
            return Answer(lines=[Line(end_text(end.value))], next=[source.command("summary")])
        except KeyboardInterrupt:
            return Answer(next=[] if in_json else [source.command("summary")])


@dataclass(frozen=True)
class Command:
    module: str  # whose docstring describes it
    add_arguments: Callable[[argparse.ArgumentParser], None] | None  # beside those of every command
    answer: Callable[[argparse.Namespace], Answer]
    formats: tuple[str, ...] = FORMATS
    writes: bool = False  # elsewhere, or as it goes: what is left to say is text, on the terminal


COMMANDS = {
    "summary": Command("summary", None, _summary),
    "alerts": Command("alerts", _alert_arguments, _alerts),
    "stats": Command("stats", _stats_arguments, _stats),
    "layer": Command("layer", _layer_arguments, _layer),
    "runs": Command("runs", _runs_arguments, _runs),
    "compare": Command("compare", _compare_arguments, _compare),
    "whatif": Command("what_if", _what_if_arguments, _what_if),
    "export": Command("export", _export_arguments, _export, ("csv", "parquet", "tensorboard"), writes=True),
    "snapshot": Command("snapshot", _snapshot_arguments, _snapshot),
    "sql": Command("sql", _sql_arguments, _sql),
    "tail": Command("tail", _tail_arguments, _tail, ("text", "json"), writes=True),
}


def main(argv: Sequence[str]) -> int:
    """`argv` begins with the name of the command."""
    if not argv or argv[0] not in COMMANDS:
        raise NannyError(f"name one of the query commands: {', '.join(COMMANDS)}")
    name, *rest = argv
    command = COMMANDS[name]
    parser = command_parser(name, importlib.import_module(f"nanny.runs.{command.module}").__doc__)
    add_run(parser)
    if command.add_arguments is not None:
        command.add_arguments(parser)
    add_format(parser, command.formats)
    if not command.writes:
        add_output(parser)
    add_language(parser, "what is said", chosen_by="the locale")
    damage: Damage = {}
    args = parser.parse_args(rest, argparse.Namespace(damage=damage))
    answer = command.answer(args)
    _print(answer, "text" if command.writes else args.format, terminal_language(args.lang), getattr(args, "output", None))
    for path, parts in damage.items():
        count = f"`nanny runs --verify --db {path}` counts what is missing"
        print(f"nanny: {damage_sentence(path, parts)}; what can be read is shown, {count}", file=sys.stderr)
    return 2 if damage else answer.exit_code


def _print(answer: Answer, form: str = "text", lang: str = "en", output: str | None = None) -> None:
    colour = wants_colour(sys.stdout) and not output
    shown = render_answer(answer, form, width_of(sys.stdout), colour, lang)
    if shown:
        write_result(shown, output, colour)
