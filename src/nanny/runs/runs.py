"""The runs in a file or folder, newest last."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from ..core.finding import NannyError, Severity
from ..core.numbers import counted, duration
from ..show.tables import Answer, Column, Line, Table
from ..store import reader
from ..store.files import DEFAULT_FOLDER, store_name, stores_below
from .alerts import severity_counts

SHOWN = 40
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_COLUMNS = (
    Column("file", elastic=True),
    Column("run"),
    Column("rank"),
    Column("started", show=lambda seconds: time.strftime("%m-%d %H:%M", time.localtime(seconds))),
    Column("seconds", "took", lambda seconds: "-" if seconds is None else duration(seconds)),
    Column("status"),
    Column("amp_dtype", "dtype", lambda name: _SHORT.get(name, name)),
    Column("last_step", "at step"),
    Column("errors"),
    Column("warnings"),
    Column("argv", "command", elastic=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # --db, --run and --format are enough


def answer(args: argparse.Namespace) -> Answer:
    rows, notes = [], []
    stores = _all_stores(args.db)
    for path in stores:
        try:
            rows += _rows(path)
        except NannyError as error:
            if len(stores) == 1:
                raise
            notes.append(str(error))
    rows.sort(key=lambda row: (row[3], row[2]))
    if args.run is not None:
        rows = [row for row in rows if row[1] == args.run]
    errors = _COLUMNS.index(next(column for column in _COLUMNS if column.name == "errors"))
    styles = ["error" if row[errors] else "warning" if row[errors + 1] else "" for row in rows]
    newest = rows[-SHOWN:]
    lines = [Line(f"{counted(len(rows), 'run')} in {counted(len(stores), 'file')}"), *(Line(note, "warning") for note in notes)]
    if len(newest) < len(rows):
        lines.append(Line(f"the newest {SHOWN}; {len(rows) - SHOWN} older ones are in csv and json"))
    names = [column.name for column in _COLUMNS]
    return Answer(
        lines=lines,
        tables=[_shown(newest, styles[-SHOWN:], many_files=len(stores) > 1)],
        flat=Table(_COLUMNS, rows),
        data={"runs": [dict(zip(names, row)) for row in rows], "notes": notes},
        next=_next(rows, args.db),
    )


def _all_stores(db: str | None) -> list[Path]:
    """A file stands for itself, a folder for all that lies below it."""
    nearest = reader.find_stores(db)
    folder = Path(db if db is not None else DEFAULT_FOLDER)
    return nearest if folder.is_file() else list(dict.fromkeys([*nearest, *stores_below(folder)]))


def _rows(path: Path) -> list[list[object]]:
    out: list[list[object]] = []
    with reader.reading(path) as db:
        for run in reader.runs(db):
            ends = reader.steps(db, run.id)
            counts = severity_counts(reader.findings(db, run.id, severity=Severity.WARNING))
            took = None if run.finished is None else run.finished - run.started
            out.append([
                str(path), run.id, run.rank, run.started, took, run.status, run.amp_dtype or "-", ends[1] if ends else None,
                counts["error"], counts["warning"], shlex.join(run.argv),
            ])  # fmt: skip
    return out


def _shown(rows: Sequence[Sequence[object]], styles: Sequence[str], many_files: bool) -> Table:
    """Without the columns that would say the same in every row."""
    dull = {"rank"} if not any(row[2] for row in rows) else set()
    dull |= set() if many_files else {"file"}
    rows = [[_place(Path(str(row[0]))), *row[1:]] for row in rows]
    keep = [i for i, column in enumerate(_COLUMNS) if column.name not in dull]
    return Table(tuple(_COLUMNS[i] for i in keep), [[row[i] for i in keep] for row in rows], styles=styles)


def _place(path: Path) -> str:
    """What to type after --db: the folder, where the file and its own folder have their usual names."""
    folder = path.parent if path.name == store_name(0) else path
    return str(folder.parent if folder.name == DEFAULT_FOLDER and folder.parent.name else folder)


def _next(rows: Sequence[Sequence[object]], db: str | None) -> list[str]:
    flags = f" --db {shlex.quote(db)}" if db else ""
    out = [f"nanny summary{flags}"]
    if len(rows) > 1 and rows[-1][0] == rows[-2][0]:
        out.append(f"nanny compare {rows[-2][1]} {rows[-1][1]}{flags}")
    return out
