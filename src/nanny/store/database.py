"""The one writing connection of a store. It lives in the frame of the writer thread and is never shared.

A forked child inherits no running writer thread, so it has no way to reach the connection, not even to close it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..core.step import RunInfo, Sample, Site
from . import schema
from .damage import PARTS, Tally, damage_sentence, incomplete_tables, wal_is_damaged, write_tally
from .encode import clean_text, from_json, to_json
from .files import network_file_system, store_name
from .lock import HeldLock, LockUnsupported, holder, lock_path, try_lock
from .packing import histogram_crc, pack_histograms, pack_sample, row_crc, scalar_crcs

BUSY_SECONDS = 5.0
JOURNAL_BYTES = 64 << 20  # a journal that grew beyond this while a reader held it back is cut again

# What the run table keeps in columns of their own, and how.
RUN_COLUMNS: dict[str, Callable[[Any], Any]] = {"torch": clean_text, "world_size": int, "rank": int, "amp_dtype": clean_text}

_in_sqlite = threading.Lock()


@dataclass
class WritingStore:
    """An open store with one run in it that is being written."""

    db: sqlite3.Connection
    path: Path
    lock: HeldLock | None
    network: str  # type of the network file system, empty on a local disk
    notes: tuple[str, ...]  # what the user should know about the choice of the file
    row: dict[str, Any] = field(default_factory=dict)  # of the run
    begun: float = field(default_factory=time.monotonic)
    layouts: dict[tuple[str, str], int] = field(default_factory=dict)
    tallies: dict[tuple[int, str, str], Tally] = field(default_factory=dict)  # run, table, kind or name of scalar
    ids: dict[str, int] = field(default_factory=dict)  # last used, of findings and dumps
    files: dict[Path, os.stat_result] = field(default_factory=dict)  # the store and its journal, as this process left them
    is_spoilt: bool = False  # somebody else has written into the file

    @property
    def run(self) -> int:
        return int(self.row["id"])

    def begin_run(self, info: RunInfo) -> None:
        """Adds the run's row. Runs still marked as running are dead: their writer no longer holds the lock."""
        with self.transaction():
            self.db.row_factory = sqlite3.Row
            before = [dict(row) for row in self.db.execute("SELECT * FROM run ORDER BY id")]
            self.db.row_factory = None
            self.tallies[0, "run", ""] = Tally(len(before), sum(row["crc"] + row["id"] for row in before))
            for row in before:
                if row["status"] == "running":
                    self._put_run({**row, "status": "interrupted"})
            for table in ("finding", "dump"):
                (self.ids[table],) = self.db.execute(f"SELECT ifnull(max(id), 0) FROM {table}").fetchone()
            self._put_run(
                {
                    "id": before[-1]["id"] + 1 if before else 1,
                    "started": float(info.started),
                    "finished": None,
                    "argv": to_json(info.argv),
                    "torch": clean_text(info.torch),
                    "world_size": int(info.world_size),
                    "rank": int(info.rank),
                    "amp_dtype": clean_text(info.amp_dtype),
                    "status": "running",
                    "dropped": 0,
                    "meta": to_json(info.meta),
                }
            )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        before = dict(self.tallies), dict(self.row), dict(self.ids)
        with _in_sqlite:
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                for key, tally in self.tallies.items():
                    if tally != before[0].get(key):
                        write_tally(self.db, key, tally)
                self.db.execute("COMMIT")
                self.remember_files()
            except BaseException:
                self.layouts.clear()  # layouts of this transaction are gone with it
                self.tallies, self.row, self.ids = before
                if self.db.in_transaction:  # a full disk ends the transaction by itself
                    self.db.execute("ROLLBACK")
                raise

    def remember_files(self) -> None:
        wal = self.path.with_name(self.path.name + "-wal")
        self.files = {path: os.stat(path) for path in (self.path, wal) if path.exists()}

    def why_lost(self) -> str:
        """Why what is written would be lost: SQLite goes on with a file that nobody can open any more. Empty if it is not."""
        for path, left in self.files.items():
            try:
                now = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return f"{path} was deleted or moved"
            except OSError:  # no right to look: SQLite will say what it cannot do
                continue
            if not os.path.samestat(now, left):
                return f"{path} was replaced by another file"
            if (now.st_size, now.st_mtime_ns) != (left.st_size, left.st_mtime_ns) and not self._is_still_ours():
                self.is_spoilt = True
                return f"{path} was overwritten"
        return ""

    def _is_still_ours(self) -> bool:
        """Whether a file that somebody else has written to holds this run and is whole; `touch` and a checkpoint do no harm."""
        try:
            with contextlib.closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as db:
                there = db.execute("SELECT * FROM run WHERE id = ?", (self.run,)).fetchone() == tuple(self.row.values())
                return bool(there and db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        except sqlite3.OperationalError as error:
            return "locked" in str(error)  # by whoever is busy with it: asked again at the next look
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            return False

    def abandon(self) -> None:
        """Lets go of a file that is lost. One that was moved gets all that was written, one that was overwritten nothing more."""
        with _in_sqlite, contextlib.ExitStack() as stack, contextlib.suppress(sqlite3.Error):
            if self.is_spoilt:  # who closes last folds the journal into the file, unless he may only read
                last = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)
                stack.callback(last.close)
                stack.callback(self.db.close)
                last.execute("SELECT count(*) FROM sqlite_master").fetchone()
            else:
                stack.callback(self.db.close)
                self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for path, left in self.files.items():  # a journal of ours must not be taken for that of the file that is there now
            with contextlib.suppress(OSError):
                if path != self.path and os.path.samestat(os.stat(path), left):
                    path.unlink()
                    path.with_name(self.path.name + "-shm").unlink(missing_ok=True)
        if self.lock:
            self.lock.release()
            self.lock = None

    def put_sites(self, kind: str, first: int, sites: Sequence[Site]) -> None:
        kind = clean_text(kind)
        for position, site in enumerate(sites, first):
            row = (self.run, kind, position, clean_text(site.name), clean_text(site.dtype), to_json(site.shape))
            self._put("site", kind, position, row)

    def put_samples(self, samples: Sequence[Sample]) -> None:
        """Of one kind."""
        found = []
        for sample in samples:
            rows, zeros, crc, data = pack_sample(sample, self.run)
            key = (self.run, sample.kind, int(sample.step), sample.sites)
            found.append((None, *key, self._layout(rows, zeros), crc, data))
            if sample.histograms:
                packed = pack_histograms(sample.histograms)
                crc = histogram_crc(*key, packed)
                self._put("histogram", sample.kind, int(sample.step), (None, *key, crc, packed), crc)
        self._put_all("sample", samples[0].kind, [row[3] for row in found], [row[6] for row in found], found)

    def put_scalars(self, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        for name, points in curves.items():
            crcs = scalar_crcs(self.run, name, points)
            found = [(self.run, name, step, value, crc) for (step, value), crc in zip(points, crcs)]
            self._put_all("scalar", name, [step for step, _ in points], crcs, found)

    def _put_all(self, table: str, name: str, order: list[int], crcs: list[int], rows: list[tuple[Any, ...]]) -> None:
        """Rows one behind the other, as they mostly are, in one go."""
        tally = self.tallies.get((self.run, table, name), Tally())
        if all(a < b for a, b in pairwise([tally.newest, *order])):
            self.db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
            total = sum(order) + sum(crcs)
            self.tallies[self.run, table, name] = Tally(tally.rows + len(rows), tally.total + total, order[-1])
        else:
            for at, crc, row in zip(order, crcs, rows):
                self._put(table, name, at, row, crc)

    def put_next(self, table: str, row: tuple[Any, ...]) -> None:
        """Into a table whose rows are numbered: findings, dumps."""
        self.ids[table] += 1
        self._put(table, "", self.ids[table], (self.ids[table], self.run, *row))

    def put_examination(self, step: int, data: str) -> None:
        self._put("examination", "", step, (self.run, step, data))

    def put_fact(self, name: str, value: str) -> None:
        self._put("fact", name, 0, (self.run, name, value))

    def put_meta(self, values: dict[str, Any]) -> None:
        """Values with a column of their own go there; the rest joins the JSON of `meta`."""
        columns = {name: value for name, value in values.items() if name in RUN_COLUMNS}
        rest = {name: value for name, value in values.items() if name not in RUN_COLUMNS}
        self._put_run({**self.row, **columns, "meta": to_json(from_json(self.row["meta"]) | rest)})

    def put_dropped(self, dropped: int) -> None:
        self._put_run({**self.row, "dropped": dropped})

    def finish(self, status: str) -> None:
        """The run's last row; the time comes from a clock that never runs backwards."""
        finished = self.row["started"] + time.monotonic() - self.begun
        with self.transaction():
            self._put_run({**self.row, "finished": finished, "status": clean_text(status)})

    def _put(self, table: str, name: str, order: int, row: tuple[Any, ...], crc: int | None = None) -> None:
        """One row, counted; in its place is what stood there before. Without a `crc` the row gets its own at the end."""
        tally = self.tallies.get((self.run, table, name), Tally())
        if order <= tally.newest:
            tally = self._take_out(table, name, order, tally)
        if crc is None:
            crc = row_crc(*row)
            row = (*row, crc)
        self.db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        self.tallies[self.run, table, name] = tally.plus(crc, order)

    def _take_out(self, table: str, name: str, order: int, tally: Tally) -> Tally:
        named, ordered = PARTS[table]
        there = [(column, value) for column, value in ((named, name), (ordered, order)) if column]
        where = "".join(f" AND {column} = ?" for column, _ in there)
        key = (self.run, *(value for _, value in there))
        old = self.db.execute(f"SELECT crc FROM {table} WHERE run = ?{where}", key).fetchone()
        if old is None:
            return tally
        self.db.execute(f"DELETE FROM {table} WHERE run = ?{where}", key)
        return tally.minus(old[0], order)

    def _put_run(self, row: dict[str, Any]) -> None:
        old = row.pop("crc", None)
        crc = row_crc(*row.values())
        self.row = {**row, "crc": crc}
        tally = self.tallies[0, "run", ""]
        tally = tally if old is None else tally.minus(old, row["id"])
        self.tallies[0, "run", ""] = tally.plus(crc, row["id"])
        self.db.execute(f"INSERT OR REPLACE INTO run VALUES ({', '.join('?' * len(self.row))})", tuple(self.row.values()))

    def close(self) -> None:
        """Folds the side files into the store and removes them, unless a reader is busy with them."""
        with _in_sqlite:
            with contextlib.suppress(sqlite3.Error):
                self.db.execute("PRAGMA busy_timeout = 200")
                self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self.db.execute("PRAGMA journal_mode = DELETE")
            self.db.close()
        if self.lock:
            self.lock.release()

    def _layout(self, rows: str, zeros: str) -> int:
        if (rows, zeros) not in self.layouts:
            self.db.execute("INSERT OR IGNORE INTO layout (rows, zeros) VALUES (?, ?)", (rows, zeros))
            found = self.db.execute("SELECT id FROM layout WHERE rows = ? AND zeros = ?", (rows, zeros)).fetchone()
            self.layouts[rows, zeros] = found[0]
        return self.layouts[rows, zeros]


# A child forked while the writer thread is inside SQLite would inherit SQLite's own mutexes locked for ever, and hang when
# it opens a database of its own (a data set in a loader's worker). So a fork waits for the end of the transaction, if that
# comes soon.
_FORK_SECONDS = 1.0
_fork_waited: list[bool] = []


def _before_fork() -> None:
    _fork_waited.append(_in_sqlite.acquire(timeout=_FORK_SECONDS))


def _after_fork() -> None:
    if _fork_waited.pop():
        _in_sqlite.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def open_for_writing(folder: Path, info: RunInfo, after: Path | None = None) -> WritingStore:
    """The first store of the rank in this folder that no live process writes and that this version can add to.

    `after` is one that this run has lost: then the store is a new file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network = network_file_system(folder)
    reasons: list[str] = []
    number = 0
    while True:
        number += 1
        path = folder / store_name(info.rank, number)
        if after is not None and path.exists():
            continue
        left_behind = lock_path(path).exists()  # it tells that the last run did not end by itself
        try:
            lock = try_lock(lock_path(path))
        except LockUnsupported:
            return _open_unlocked(folder, info, network)
        if lock is None:
            reasons.append(f"{path} is being written by {holder(lock_path(path))}")
            continue
        try:
            db, reason = _connect(path, network)
            if not reason:
                notes = tuple(f"{reason}; this run is recorded in {path}" for reason in reasons[-1:])
                store = WritingStore(db, path, lock, network, notes)
                try:
                    store.begin_run(info)
                    return store
                except sqlite3.DatabaseError as error:
                    if isinstance(error, sqlite3.OperationalError):  # full or locked: says nothing about the file
                        raise
                    reason = f"{path} is damaged ({error})"
        except BaseException:
            lock.release(remove=not left_behind)
            raise
        db.close()
        lock.release(remove=not left_behind)
        reasons.append(reason)


def _open_unlocked(folder: Path, info: RunInfo, network: str) -> WritingStore:
    """Without locks the only file that surely nobody else writes is one that we have just made."""
    number = 1
    while True:
        path = folder / store_name(info.rank, number)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            break
        except FileExistsError:
            number += 1
    db, _ = _connect(path, network, locks=False)
    store = WritingStore(db, path, None, network, ())
    store.begin_run(info)
    return store


def _connect(path: Path, network: str, *, locks: bool = True) -> tuple[sqlite3.Connection, str]:
    """The connection, and why the file cannot be added to."""
    with _in_sqlite:
        wal_lost = wal_is_damaged(path)  # asked first: whoever opens the file to write folds the -wal file in and removes it
        address = f"{path.absolute().as_uri()}?mode={'ro' if wal_lost else 'rwc'}{'' if locks else '&nolock=1'}"
        db = sqlite3.connect(address, uri=True, isolation_level=None, timeout=BUSY_SECONDS)
        try:
            refusal = schema.refusal(db, path)
            if refusal and not refusal.is_empty:
                return db, refusal.reason
            if not refusal and (wal_lost or incomplete_tables(db, 0)):
                return db, damage_sentence(path, {"wal" if wal_lost else "run"})
            with contextlib.suppress(sqlite3.OperationalError):  # a busy reader may forbid the change; any mode is safe
                db.execute(f"PRAGMA journal_mode = {'WAL' if locks and not network else 'TRUNCATE'}")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
            if refusal:
                schema.create(db)
        except BaseException:
            db.close()
            raise
        return db, ""
