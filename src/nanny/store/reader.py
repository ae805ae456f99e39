"""Reading stores, also while training writes them. No torch; every function takes a connection from `connect()`.

    with reading(path) as db:
        run = pick_run(db, None)
        steps, norms = samples(db, run.id, "grad", "norm")

A site with `count` 0 was not measured at that step (its other statistics mean nothing; NaN where the sample is older than
the site). A NaN with a positive count was measured. There is at most one sample per kind and step, and one value per
scalar and step: the newest. Ranges are inclusive: `first=10, last=20` are the eleven steps from 10 to 20.
On a live run, ask for the sites after the samples (or for both in `one_moment`): then every column has its site.
Rows that are not as they were written are left out, and told at the end of `reading`.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..core.examination import Examination
from ..core.finding import Finding, NannyError
from ..core.step import Site
from . import older, schema
from .damage import (
    UNREADABLE,
    Damage,
    StoreConnection,
    damage_sentence,
    incomplete_tables,
    is_cut_short,
    note_damage,
    tallies,
    wal_is_damaged,
)
from .encode import dataclass_of, finding_of, from_json
from .lock import is_held, lock_path, locks_work, try_lock
from .packing import (
    histogram_crc,
    point_crcs,
    row_crc,
    sample_crc,
    scalar_crcs,
    stat,
    unpack_histograms,
    unpack_sample,
    unpack_stat,
)

BUSY_SECONDS = 5.0
_POINT_ROW = [("step", "i8"), ("value", "f8"), ("crc", "i8")]  # of a curve
MOST_LISTED = 10  # runs, where the one that was asked for is not there


@dataclass(frozen=True)
class RunRow:
    id: int
    started: float
    finished: float | None
    argv: tuple[str, ...]
    torch: str
    world_size: int
    rank: int
    amp_dtype: str
    status: str  # running, finished, crashed, interrupted, or what the run called it
    dropped: int
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class DumpRow:
    step: int
    site: str
    path: str
    sha256: str


def connect(path: str | Path) -> StoreConnection:
    """A read-only connection to a store, with the SQL function `stat()`; NannyError says why a file is none."""
    path = Path(path)
    if path.is_dir():
        raise NannyError(f"{path}: a folder; name the file in it, such as {path / 'metrics.db'}")
    if not path.exists():
        raise NannyError(f"{path}: no such file; name a metrics.db or its folder with --db PATH")
    try:
        db = _open_checked(path, "mode=ro")
    except sqlite3.OperationalError as error:
        is_busy = "locked" in str(error)
        if is_busy and locks_work(path.absolute().parent):
            raise NannyError(f"{path}: busy for more than {BUSY_SECONDS:g} s; try again") from error
        try:
            db = _open_checked(path, "mode=ro&nolock=1") if is_busy else _open_unusual(path)
        except (OSError, sqlite3.OperationalError) as again:
            advice = "copy its folder to a place you can write to, and name that with --db PATH"
            raise NannyError(f"{path}: cannot be read ({again}); {advice}") from again
    db.create_function("stat", 6, stat, deterministic=True)
    db.text_factory = _decode
    if _file_of(db) is not None and not is_held(lock_path(path)):
        db.damaged = {part for part, wrong in (("wal", wal_is_damaged(path)), ("end", is_cut_short(db, path))) if wrong}
    return db


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")  # what is damaged fails its CRC, not the whole query


@contextlib.contextmanager
def reading(path: str | Path, damage: Damage | None = None) -> Iterator[sqlite3.Connection]:
    """`connect()` and close. A store that turns out to be damaged on the way is a NannyError too; but if `damage` is given, and
    some of the store can be read, only the tables that are damaged are added there."""
    db = connect(path)
    verify = f"`nanny runs --verify --db {path}` says what can still be read"
    try:
        yield db
        if db.damaged and damage is None:
            raise NannyError(f"{damage_sentence(Path(path), db.damaged)}; {verify}, and `nanny summary` shows it")
        if db.damaged and damage is not None:
            damage.setdefault(Path(path), set()).update(db.damaged)
    except UNREADABLE as error:
        why = f"it is damaged, or was busy for more than {BUSY_SECONDS:g} s"
        raise NannyError(f"{path}: cannot be read to the end ({error}): {why}; {verify}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, NannyError) or not db.damaged:
            raise
        # what is left does not fit together, which no caller can foresee
        raise NannyError(f"{damage_sentence(Path(path), db.damaged)}, and the rest does not give an answer; {verify}") from error
    finally:
        db.close()


@contextlib.contextmanager
def one_moment(db: sqlite3.Connection) -> Iterator[None]:
    """All queries inside see the store as it was at the first of them, whatever training adds meanwhile.

    Keep it short on a live run: what the writer must keep for it grows its side file.
    """
    if db.in_transaction:
        yield
        return
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.rollback()


def _open_checked(path: Path, parameters: str) -> StoreConnection:
    address = f"{path.absolute().as_uri()}?{parameters}"
    db = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, factory=StoreConnection)
    db.damaged = set()
    try:
        refusal = schema.refusal(db, path)
        if refusal and refusal.is_of_before:
            return older.upgraded(db, path)
        if refusal:
            raise NannyError(f"{refusal.reason}; {refusal.remedy}")
    except BaseException:
        db.close()
        raise
    return db


def _open_unusual(path: Path) -> StoreConnection:
    """Two stores that `mode=ro` cannot open: one on a read-only disk, and one whose writer died in rollback mode."""
    if not any(side.exists() and side.stat().st_size for side in (_beside(path, "-wal"), _beside(path, "-journal"))):
        return _open_checked(path, "mode=ro&immutable=1")  # nobody writes it, so its file is all there is
    lock = try_lock(lock_path(path))
    if lock:  # the writer is dead, and what it left half written must be undone once before anyone can read
        try:
            _open_checked(path, "mode=rw").close()
        finally:
            lock.release(remove=False)  # the file stays: it tells that the run did not end by itself
    return _open_checked(path, "mode=ro")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def runs(db: sqlite3.Connection) -> list[RunRow]:
    """In the order in which they were started. One that died without a word is `interrupted`."""
    dead = _writer_is_dead(db)
    with one_moment(db):
        if incomplete_tables(db, 0):
            note_damage(db, "run")
        rows = _whole(db, "run", "ORDER BY id", ())
    out = []
    names = [column.name for column in fields(RunRow)]
    for row in rows:
        values = dict(zip(names, row))
        values["argv"] = tuple(from_json(values["argv"]))
        values["meta"] = from_json(values["meta"])
        if values["status"] == "running" and dead:
            values["status"] = "interrupted"
        out.append(RunRow(**values))
    return out


def pick_run(db: sqlite3.Connection, number: int | None) -> RunRow:
    """The run of that number, or the newest; what was written of it and is no longer there is noted as damage."""
    found = runs(db)
    if not found and is_damaged(db):
        raise NannyError("the store is damaged: no run in it can be read; restore the file from a copy, or record the run again")
    if not found:
        raise NannyError("the store holds no run yet; wait until training has begun")
    for run in [found[-1]] if number is None else found:
        if number in (None, run.id):
            with one_moment(db):
                for part in incomplete_tables(db, run.id):
                    note_damage(db, part)
            return run
    raise NannyError(f"there is no run {number}; `nanny runs` lists them: {_join_numbers([run.id for run in found])}")


def kinds(db: sqlite3.Connection, run: int) -> list[str]:
    """Kinds of site that the run has."""
    return [kind for (kind,) in db.execute("SELECT DISTINCT kind FROM site WHERE run = ? ORDER BY kind", (run,))]


def sites(db: sqlite3.Connection, run: int, kind: str) -> list[Site]:
    """In the order of their columns in the samples."""
    rows = _whole(db, "site", "WHERE run = ? AND kind = ? ORDER BY position", (run, kind))
    known = {position: Site(kind, name, dtype, tuple(json.loads(shape))) for _, _, position, name, dtype, shape in rows}
    written = tallies(db, run).get(("site", kind), (len(known), 0))[0]
    return [known.get(i, Site(kind, f"({kind} {i}: name lost)")) for i in range(max([written - 1, *known]) + 1)]


def scalar_names(db: sqlite3.Connection, run: int) -> list[str]:
    return _distinct(db, "scalar", "name", run)


def scalars(
    db: sqlite3.Connection,
    run: int,
    names: Iterable[str] | None = None,
    first: int | None = None,
    last: int | None = None,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """name -> (steps int64, values float64), steps ascending; names that were never recorded are left out."""
    out = {}
    between, bounds = _range(first, last)
    for name in scalar_names(db, run) if names is None else names:
        query = f"SELECT step, value, crc FROM scalar WHERE run = ? AND name = ?{between} ORDER BY step"
        try:
            points = np.fromiter(db.execute(query, (run, name, *bounds)), _POINT_ROW)
            whole = point_crcs(run, name, points["step"], points["value"]) == points["crc"]
            steps, values, there = points["step"][whole], points["value"][whole], len(points)
        except (TypeError, ValueError, OverflowError):  # a damaged column may hold anything
            rows = db.execute(query, (run, name, *bounds)).fetchall()
            kept = [row for row, crc in zip(rows, scalar_crcs(run, name, [row[:2] for row in rows])) if row[2] == crc]
            steps, values = np.array([row[0] for row in kept], np.int64), np.array([row[1] for row in kept], np.float64)
            there = len(rows)
        if len(steps) < there:
            note_damage(db, "scalar")
        if len(steps):
            out[name] = (steps, values)
    return out


def samples(
    db: sqlite3.Connection, run: int, kind: str, statistic: str, first: int | None = None, last: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(steps int64, float32 [steps, sites]) of one statistic."""
    steps, found = statistics_of(db, run, kind, [statistic], first, last)
    return steps, found[statistic]


def statistics_of(
    db: sqlite3.Connection, run: int, kind: str, wanted: Collection[str], first: int | None = None, last: int | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(steps int64, statistic -> float32 [steps, sites]): every sample is read once, whatever is wanted of it."""
    between, bounds = _range(first, last)
    query = f"SELECT step, n, layout, crc, data FROM sample WHERE run = ? AND kind = ?{between} ORDER BY step"
    steps, read = [], []
    with one_moment(db):
        layouts = {i: (str(rows), str(zeros)) for i, rows, zeros in db.execute("SELECT id, rows, zeros FROM layout")}
        names = {i: (rows.split(), [name for name in zeros.split() if name in wanted]) for i, (rows, zeros) in layouts.items()}
        places = {i: [(name, rows.index(name)) for name in wanted if name in rows] for i, (rows, _) in names.items()}
        for step, n, layout, crc, data in db.execute(query, (run, kind, *bounds)):
            if crc != sample_crc(run, kind, step, n, *layouts.get(layout, ("", ""))):
                note_damage(db, "sample")
                continue
            found = [(name, unpack_stat(data, row, n, name, crc)) for name, row in places[layout]]
            steps.append(step)
            read.append((n, layout, found))
    shape = len(steps), max((n for n, _, _ in read), default=0)
    out = {name: np.full(shape, 0.0 if name == "count" else np.nan, np.float32) for name in wanted}
    for index, (n, layout, found) in enumerate(read):
        for name in names[layout][1]:
            out[name][index, :n] = 0.0
        for name, values in found:
            if values is None:
                note_damage(db, "sample")
            else:
                out[name][index, :n] = values
    return np.array(steps, np.int64), out


def sample_steps(db: sqlite3.Connection, run: int, kind: str) -> np.ndarray:
    """Steps at which this kind was sampled, ascending."""
    return _steps_in(db, "sample", run, kind)


def sample_at(db: sqlite3.Connection, run: int, kind: str, step: int) -> dict[str, np.ndarray] | None:
    """statistic -> float32 per site, or None if this kind was not sampled at this step."""
    row = db.execute(
        """SELECT n, rows, zeros, crc, data FROM sample LEFT JOIN layout ON layout.id = sample.layout
           WHERE run = ? AND kind = ? AND step = ?""",
        (run, kind, step),
    ).fetchone()
    if row is None:
        return None
    n, rows, zeros, crc, data = row
    found = unpack_sample(data, n, rows, zeros, crc) if crc == sample_crc(run, kind, step, n, rows, zeros) else None
    if found is None:
        note_damage(db, "sample")
    return found


def histograms(
    db: sqlite3.Connection, run: int, kind: str, first: int | None = None, last: int | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """(step, uint16 [sites, HISTOGRAM_BINS]), steps ascending, one at a time."""
    between, bounds = _range(first, last)
    query = f"SELECT step, n, crc, data FROM histogram WHERE run = ? AND kind = ?{between} ORDER BY step"
    for step, n, crc, data in db.execute(query, (run, kind, *bounds)):
        if crc == histogram_crc(run, kind, step, n, data):
            yield step, unpack_histograms(data, n)
        else:
            note_damage(db, "histogram")


def histogram_steps(db: sqlite3.Connection, run: int, kind: str) -> np.ndarray:
    """Steps at which histograms of this kind were taken, ascending."""
    return _steps_in(db, "histogram", run, kind)


def _steps_in(db: sqlite3.Connection, table: str, run: int, kind: str) -> np.ndarray:
    rows = db.execute(f"SELECT step FROM {table} WHERE run = ? AND kind = ? ORDER BY step", (run, kind)).fetchall()
    return np.array([step for (step,) in rows], np.int64)


def findings(db: sqlite3.Connection, run: int) -> list[Finding]:
    """In the order in which they were found."""
    return [finding_of(row[2:]) for row in _whole(db, "finding", "WHERE run = ? ORDER BY id", (run,))]


def _whole(db: sqlite3.Connection, part: str, where: str, values: tuple[int | str, ...]) -> list[tuple[Any, ...]]:
    """The rows of a table as they were written, without their CRC; filters on other columns than keys come after the check."""
    out = []
    for *columns, crc in db.execute(f"SELECT * FROM {part} {where}", values):
        if row_crc(*columns) == crc:
            out.append(tuple(columns))
        else:
            note_damage(db, part)
    return out


def dumps(db: sqlite3.Connection, run: int) -> list[DumpRow]:
    return [DumpRow(*row[2:]) for row in _whole(db, "dump", "WHERE run = ? ORDER BY id", (run,))]


def examinations(db: sqlite3.Connection, run: int) -> list[Examination]:
    """The examined steps, in order."""
    rows = _whole(db, "examination", "WHERE run = ? ORDER BY step", (run,))
    return [dataclass_of(Examination, from_json(data)) for _, _, data in rows]


def facts(db: sqlite3.Connection, run: int) -> dict[str, Any]:
    """name -> value, as last written."""
    return {name: from_json(value) for _, name, value in _whole(db, "fact", "WHERE run = ?", (run,))}


def steps(db: sqlite3.Connection, run: int) -> tuple[int, int] | None:
    """First and last step that left anything in the run."""
    places = [("scalar", "run = ? AND name = ?", (run, name)) for name in scalar_names(db, run)]
    places += [("sample", "run = ? AND kind = ?", (run, kind)) for kind in _distinct(db, "sample", "kind", run)]
    known = [finding.step for finding in findings(db, run) if finding.step is not None]
    for table, where, values in places:
        for end in ("min", "max"):  # one at a time: then SQLite jumps to it through the index
            (step,) = db.execute(f"SELECT {end}(step) FROM {table} WHERE {where}", values).fetchone()
            known += [] if step is None else [step]
    return (min(known), max(known)) if known else None


def _distinct(db: sqlite3.Connection, table: str, column: str, run: int) -> list[str]:
    """Jumps through the index from value to value; SELECT DISTINCT would read the millions of rows between them."""
    found: list[str] = []
    query = f"SELECT min({column}) FROM {table} WHERE run = ? AND {column} > ?"
    while (value := db.execute(query, (run, found[-1] if found else "")).fetchone()[0]) is not None:
        found.append(value)
    return found


def _range(first: int | None, last: int | None) -> tuple[str, list[int]]:
    given = [(sql, step) for sql, step in ((" AND step >= ?", first), (" AND step <= ?", last)) if step is not None]
    return "".join(sql for sql, _ in given), [step for _, step in given]


def is_damaged(db: sqlite3.Connection) -> bool:
    """Whether something that was written is known to be lost."""
    return bool(cast(StoreConnection, db).damaged)


def _writer_is_dead(db: sqlite3.Connection) -> bool:
    """True only where the lock file is there and nobody holds it; a copy without one is taken at its word."""
    file = _file_of(db)
    return file is not None and lock_path(file).exists() and not is_held(lock_path(file))


def _file_of(db: sqlite3.Connection) -> Path | None:
    """None: a copy of an older store, in memory."""
    name = db.execute("PRAGMA database_list").fetchone()[2]
    return Path(name) if name else None


def _join_numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[-MOST_LISTED:]))
    return shown if len(numbers) <= MOST_LISTED else f"..., {shown}"
