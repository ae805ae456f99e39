"""How the list of runs looks, and what `--verify` found."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from ...core.formats import short_name
from ...core.numbers import amount, duration
from ...show.tables import Answer, Column, Line, Table
from ...store.damage import words_of
from ...store.files import DEFAULT_FOLDER, store_name
from ..runs import ListedRun, RunList, VerifiedRun

RUNS_SHOWN = 40

_RUN_COLUMNS = (
    Column("file", elastic=True),
    Column("run"),
    Column("rank"),
    Column("started", show=lambda seconds: time.strftime("%m-%d %H:%M", time.localtime(seconds))),
    Column("seconds", "took", lambda seconds: "-" if seconds is None else duration(seconds)),
    Column("status", says=True),
    Column("amp_dtype", "dtype", short_name),
    Column("last_step", "at step"),
    Column("errors"),
    Column("warnings"),
    Column("argv", "command", elastic=True),
    Column("healthy"),
    Column("verdict"),
    Column("cause"),
)
_TOLD = Column("told", "verdict", elastic=True, says=True)  # the cause, where there is one
_SHOWN = (*_RUN_COLUMNS[:6], _TOLD, _RUN_COLUMNS[7], _RUN_COLUMNS[10], _RUN_COLUMNS[6])  # in text; the last is the first to go


def runs_answer(found: RunList, db: str | None) -> Answer:
    newest = found.runs[-RUNS_SHOWN:]
    lines = [Line(f"{amount(len(found.runs), 'run')} in {amount(found.files, 'file')}")]
    lines += [Line(note, "warning") for note in found.notes]
    if len(newest) < len(found.runs):
        lines.append(Line(f"the newest {RUNS_SHOWN}; {len(found.runs) - RUNS_SHOWN} older ones are in csv and json"))
    return Answer(
        lines=lines,
        tables=[_run_table(newest, many_files=found.files > 1)],
        flat=Table(_RUN_COLUMNS, [list(vars(run).values()) for run in found.runs]),
        data={"runs": [vars(run) for run in found.runs], "notes": found.notes},
        next=_after_runs(found.runs, db),
    )


def verified_answer(found: Sequence[VerifiedRun]) -> Answer:
    damaged = [run for run in found if run.problem or run.lost]
    count = sum(run.run > 0 for run in found)
    whole = f"{amount(count, 'run')}: " + ("all whole" if not damaged else "not all whole")
    columns = (Column("file", elastic=True), Column("run"), Column("state"))
    rows = [(run.file, run.run or "-", _state(run)) for run in found]
    return Answer(
        lines=[Line(whole, "error" if damaged else "good")],
        tables=[Table(columns, rows, styles=["error" if run in damaged else "" for run in found])],
        data={"runs": [{**vars(run), "lost": {part: list(rows) for part, rows in run.lost.items()}} for run in found]},
        exit_code=int(bool(damaged)),
    )


def _state(run: VerifiedRun) -> str:
    lost = ", ".join(f"{lost} of {written} {words_of([part])}" for part, (lost, written) in run.lost.items())
    return run.problem or (f"{lost} lost or changed" if lost else "whole")


def _run_table(runs: Sequence[ListedRun], many_files: bool) -> Table:
    """Without the columns that would say the same in every row."""
    dull = {"rank"} if not any(run.rank for run in runs) else set()
    dull |= set() if many_files else {"file"}
    columns = tuple(column for column in _SHOWN if column.name not in dull)
    told = [run.cause or run.verdict.partition(":")[0] for run in runs]
    cells = [{**vars(run), "told": word, "file": store_folder(Path(run.file))} for run, word in zip(runs, told)]
    styles = ["error" if run.verdict.startswith("NOT HEALTHY") else "warning" if run.healthy is False else "" for run in runs]
    return Table(columns, [[cell[column.name] for column in columns] for cell in cells], styles=styles)


def store_folder(path: Path) -> str:
    """What to type after --db: the folder, where the file and its own folder have their usual names."""
    folder = path.parent if path.name == store_name(0) else path
    return str(folder.parent if folder.name == DEFAULT_FOLDER and folder.parent.name else folder)


def _after_runs(runs: Sequence[ListedRun], db: str | None) -> list[str]:
    flags = f" --db {shlex.quote(db)}" if db else ""
    out = [f"nanny summary{flags}"]
    if len(runs) > 1 and runs[-1].file == runs[-2].file:
        out.append(f"nanny compare {runs[-2].run} {runs[-1].run}{flags}")
    return out
