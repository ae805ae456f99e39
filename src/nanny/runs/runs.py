"""The runs in a file or folder, newest last.

--verify reads all of them and says of each whether it is still what was written.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.finding import NannyError, severity_counts
from ..store import reader
from ..store.damage import Damage, file_damage, lost_rows, run_numbers
from ..store.files import DEFAULT_FOLDER, find_stores, stores_below
from .alerts import findings_of, job_verdict
from .source import Source, seconds_of


@dataclass(frozen=True)
class ListedRun:
    file: str
    run: int
    rank: int
    started: float
    seconds: float | None
    status: str
    amp_dtype: str
    last_step: int | None
    errors: int
    warnings: int
    argv: str
    healthy: bool | None = None  # this process by itself, once it is judged
    verdict: str = ""
    cause: str = ""


@dataclass(frozen=True)
class RunList:
    runs: list[ListedRun]  # the newest last
    files: int
    notes: list[str]  # on files that cannot be read


@dataclass(frozen=True)
class VerifiedRun:
    file: str
    run: int  # 0: the file as a whole
    lost: dict[str, tuple[int, int]]  # of a table: rows that are lost or changed, and rows that were written
    problem: str = ""


def list_runs(db: str | None, number: int | None = None, damage: Damage | None = None) -> RunList:
    """All runs of a file or of what lies below a folder, or only those of one number."""
    rows: list[ListedRun] = []
    notes = []
    stores = _all_stores(db)
    for path in stores:
        try:
            rows += _runs_in(path, damage)
        except NannyError as error:
            if len(stores) == 1:
                raise
            notes.append(str(error))
    rows.sort(key=lambda row: (row.started, row.rank))
    return RunList([row for row in rows if number is None or row.run == number], len(stores), notes)


def judged(rows: Sequence[ListedRun], damage: Damage | None = None) -> list[ListedRun]:
    """The same with their verdicts: a cause may be proved where nothing was found on the way."""
    out = []
    for row in rows:
        with reader.reading(Path(row.file), damage) as db, reader.one_moment(db):
            source = Source(Path(row.file), db, reader.pick_run(db, row.run))
            told = job_verdict([source], findings_of(source))
        cause = "" if told.diagnosis is None else told.diagnosis.cause
        out.append(replace(row, healthy=told.healthy, verdict=told.text, cause=cause))
    return out


def _all_stores(db: str | None) -> list[Path]:
    """A file stands for itself, a folder for all that lies below it."""
    nearest = find_stores(db)
    folder = Path(db if db is not None else DEFAULT_FOLDER)
    return nearest if folder.is_file() else list(dict.fromkeys([*nearest, *stores_below(folder)]))


def verify_runs(db: str | None, number: int | None = None) -> list[VerifiedRun]:
    """Reads every row of every run; a file comes before its runs if something is wrong with it."""
    out: list[VerifiedRun] = []
    for path in _all_stores(db):
        try:
            with reader.reading(path, {}) as connection, reader.one_moment(connection):
                problem = file_damage(connection)
                out += [VerifiedRun(str(path), 0, {}, problem)] if problem else []
                runs = run_numbers(connection)
                out += [VerifiedRun(str(path), run, lost_rows(connection, run)) for run in runs if number in (None, run)]
        except NannyError as error:
            out.append(VerifiedRun(str(path), 0, {}, str(error)))
    return out


def _runs_in(path: Path, damage: Damage | None) -> list[ListedRun]:
    out = []
    with reader.reading(path, damage) as db, reader.one_moment(db):
        for run in [reader.pick_run(db, row.id) for row in reader.runs(db)]:
            ends = reader.steps(db, run.id)
            counts = severity_counts(reader.findings(db, run.id))
            out.append(
                ListedRun(
                    file=str(path),
                    run=run.id,
                    rank=run.rank,
                    started=run.started,
                    seconds=seconds_of(run),
                    status=run.status,
                    amp_dtype=run.amp_dtype or "-",
                    last_step=ends[1] if ends else None,
                    errors=counts["error"],
                    warnings=counts["warning"],
                    argv=shlex.join(run.argv),
                )
            )
    return out
