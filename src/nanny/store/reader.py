"""Reading stores, also while training writes them. No torch; every function takes a connection from `connect()`.

    with reading(path) as db:
        run = pick_run(db, None)
        steps, norms = samples(db, run.id, "grad", "norm")

A site with `count` 0 was not measured at that step (its other statistics mean nothing; NaN where the sample is older than
the site). A NaN with a positive count was measured. There is at most one sample per kind and step, and one value per
scalar and step: the newest. Ranges are inclusive: `first=10, last=20` are the eleven steps from 10 to 20.
On a live run, ask for the sites after the samples (or for both in `one_moment`): then every column has its site.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..core.examination import Examination
from ..core.finding import Finding, NannyError, Severity
from ..core.step import Site
from . import schema
from .encode import FINDING_COLUMNS, dataclass_of, finding_of, from_json
from .lock import is_held, lock_path, try_lock
from .packing import stat, unpack_histograms, unpack_sample

BUSY_SECONDS = 5.0


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
    meta: Mapping[str, Any]
    dropped: int


@dataclass(frozen=True)
class DumpRow:
    step: int
    site: str
    path: str
    sha256: str


def connect(path: str | Path) -> sqlite3.Connection:
    """A read-only connection to a store, with the SQL function `stat()`; NannyError says why a file is none."""
    path = Path(path)
    if path.is_dir():
        raise NannyError(f"{path}: a folder; name the file in it, such as {path / 'metrics.db'}")
    if not path.exists():
        raise NannyError(f"{path}: no such file; name a metrics.db or its folder with --db PATH")
    try:
        db = _open_checked(path, "mode=ro")
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise NannyError(f"{path}: busy for more than {BUSY_SECONDS:g} s; try again") from error
        try:
            db = _open_unusual(path)
        except (OSError, sqlite3.OperationalError) as again:
            advice = "copy its folder to a place you can write to, and name that with --db PATH"
            raise NannyError(f"{path}: cannot be read ({again}); {advice}") from again
    db.create_function("stat", 6, stat, deterministic=True)
    return db


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[sqlite3.Connection]:
    """`connect()` and close; a store that turns out to be damaged on the way is a NannyError too."""
    db = connect(path)
    try:
        yield db
    except sqlite3.DatabaseError as error:
        why = f"it is damaged, or was busy for more than {BUSY_SECONDS:g} s"
        raise NannyError(f"{path}: cannot be read to the end ({error}): {why}") from error
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


def _open_checked(path: Path, parameters: str) -> sqlite3.Connection:
    address = f"{path.absolute().as_uri()}?{parameters}"
    db = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        refusal = schema.refusal(db, path)
        if refusal:
            raise NannyError(f"{refusal.reason}; {refusal.remedy}")
    except BaseException:
        db.close()
        raise
    return db


def _open_unusual(path: Path) -> sqlite3.Connection:
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
    names = [column.name for column in fields(RunRow)]
    out = []
    for row in db.execute(f"SELECT {', '.join(names)} FROM run ORDER BY id"):
        values = dict(zip(names, row))
        values["argv"] = tuple(from_json(values["argv"]))
        values["meta"] = from_json(values["meta"])
        if values["status"] == "running" and dead:
            values["status"] = "interrupted"
        out.append(RunRow(**values))
    return out


def pick_run(db: sqlite3.Connection, number: int | None) -> RunRow:
    """The run of that number, or the newest."""
    found = runs(db)
    if not found:
        raise NannyError("the store holds no run yet; wait until training has begun")
    if number is None:
        return found[-1]
    for run in found:
        if run.id == number:
            return run
    raise NannyError(f"there is no run {number}; `nanny runs` lists them: {_listed([run.id for run in found])}")


def kinds(db: sqlite3.Connection, run: int) -> list[str]:
    """Kinds of site that the run has."""
    return [kind for (kind,) in db.execute("SELECT DISTINCT kind FROM site WHERE run = ? ORDER BY kind", (run,))]


def sites(db: sqlite3.Connection, run: int, kind: str) -> list[Site]:
    """In the order of their columns in the samples."""
    rows = db.execute("SELECT name, dtype, shape FROM site WHERE run = ? AND kind = ? ORDER BY position", (run, kind))
    return [Site(kind, name, dtype, tuple(json.loads(shape))) for name, dtype, shape in rows]


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
        rows = db.execute(
            f"SELECT step, value FROM scalar WHERE run = ? AND name = ?{between} ORDER BY step", (run, name, *bounds)
        ).fetchall()
        if rows:
            values = np.array([math.nan if value is None else value for _, value in rows], np.float64)
            out[name] = (np.array([step for step, _ in rows], np.int64), values)
    return out


def samples(
    db: sqlite3.Connection, run: int, kind: str, statistic: str, first: int | None = None, last: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(steps int64, float32 [steps, sites]) of one statistic."""
    between, bounds = _range(first, last)
    with one_moment(db):
        layouts = {i: (rows.split(), zeros.split()) for i, rows, zeros in db.execute("SELECT id, rows, zeros FROM layout")}
        row_of = {i: rows.index(statistic) for i, (rows, _) in layouts.items() if statistic in rows}
        cases = " ".join(f"WHEN {i} THEN {row}" for i, row in row_of.items()) or "WHEN -1 THEN NULL"
        found = db.execute(
            f"""SELECT step, n, layout, substr(data, 1 + 4 * n * CASE layout {cases} END, 4 * n)
                FROM sample WHERE run = ? AND kind = ?{between} ORDER BY step""",
            (run, kind, *bounds),
        ).fetchall()
    taken = np.array([step for step, *_ in found], np.int64)
    width = max((n for _, n, _, _ in found), default=0)
    matrix = np.full((len(found), width), 0.0 if statistic == "count" else np.nan, np.float32)
    for index, (_, n, layout, data) in enumerate(found):
        if data is not None:
            matrix[index, :n] = np.frombuffer(data, "<f4")
        elif statistic in layouts[layout][1]:
            matrix[index, :n] = 0.0
    return taken, matrix


def sample_steps(db: sqlite3.Connection, run: int, kind: str) -> np.ndarray:
    """Steps at which this kind was sampled, ascending."""
    rows = db.execute("SELECT step FROM sample WHERE run = ? AND kind = ? ORDER BY step", (run, kind)).fetchall()
    return np.array([step for (step,) in rows], np.int64)


def sample_at(db: sqlite3.Connection, run: int, kind: str, step: int) -> dict[str, np.ndarray] | None:
    """statistic -> float32 per site, or None if this kind was not sampled at this step."""
    row = db.execute(
        """SELECT data, n, rows, zeros FROM sample JOIN layout ON layout.id = sample.layout
           WHERE run = ? AND kind = ? AND step = ?""",
        (run, kind, step),
    ).fetchone()
    return unpack_sample(*row) if row else None


def histograms(
    db: sqlite3.Connection, run: int, kind: str, first: int | None = None, last: int | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """(step, uint16 [sites, HISTOGRAM_BINS]), steps ascending, one at a time."""
    between, bounds = _range(first, last)
    query = f"SELECT step, n, data FROM histogram WHERE run = ? AND kind = ?{between} ORDER BY step"
    for step, n, data in db.execute(query, (run, kind, *bounds)):
        yield step, unpack_histograms(data, n)


def histogram_steps(db: sqlite3.Connection, run: int, kind: str) -> np.ndarray:
    """Steps at which histograms of this kind were taken, ascending."""
    rows = db.execute("SELECT step FROM histogram WHERE run = ? AND kind = ? ORDER BY step", (run, kind)).fetchall()
    return np.array([step for (step,) in rows], np.int64)


def findings(
    db: sqlite3.Connection,
    run: int,
    *,
    severity: Severity | None = None,
    code: str | None = None,
    first: int | None = None,
    last: int | None = None,
    site_glob: str | None = None,
    limit: int | None = None,
) -> list[Finding]:
    """In the order in which they were found; `severity` and above. A range of steps leaves out those without a step."""
    between, bounds = _range(first, last)
    where = f"run = ?{between}"
    values: list[int | str] = [run, *bounds]
    for condition, value in (
        ("severity >= ?", None if severity is None else int(severity)),
        ("code = ?", code),
        ("site GLOB ?", site_glob),
    ):
        if value is not None:
            where += f" AND {condition}"
            values.append(value)
    query = f"SELECT {FINDING_COLUMNS} FROM finding WHERE {where} ORDER BY id LIMIT ?"
    return [finding_of(row) for row in db.execute(query, (*values, -1 if limit is None else limit))]


def dumps(db: sqlite3.Connection, run: int) -> list[DumpRow]:
    rows = db.execute("SELECT step, site, path, sha256 FROM dump WHERE run = ? ORDER BY id", (run,))
    return [DumpRow(*row) for row in rows]


def examinations(db: sqlite3.Connection, run: int) -> list[Examination]:
    """The examined steps, in order."""
    rows = db.execute("SELECT data FROM examination WHERE run = ? ORDER BY step", (run,))
    return [dataclass_of(Examination, from_json(data)) for (data,) in rows]


def facts(db: sqlite3.Connection, run: int) -> dict[str, Any]:
    """name -> value, as last written."""
    return {name: from_json(value) for name, value in db.execute("SELECT name, value FROM fact WHERE run = ?", (run,))}


def steps(db: sqlite3.Connection, run: int) -> tuple[int, int] | None:
    """First and last step that left anything in the run."""
    places: list[tuple[str, str, tuple[int | str, ...]]] = [("finding", "run = ?", (run,))]
    places += [("scalar", "run = ? AND name = ?", (run, name)) for name in scalar_names(db, run)]
    places += [("sample", "run = ? AND kind = ?", (run, kind)) for kind in _distinct(db, "sample", "kind", run)]
    known = []
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


def _writer_is_dead(db: sqlite3.Connection) -> bool:
    """True only where the lock file is there and nobody holds it; a copy without one is taken at its word."""
    lock = lock_path(Path(db.execute("PRAGMA database_list").fetchone()[2]))
    return lock.exists() and not is_held(lock)


def _listed(numbers: Sequence[int], most: int = 10) -> str:
    shown = ", ".join(map(str, numbers[-most:]))
    return shown if len(numbers) <= most else f"..., {shown}"
