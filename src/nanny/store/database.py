"""The one writing connection of a store. It lives in the frame of the writer thread and is never shared.

A forked child inherits no running writer thread, so it has no way to reach the connection, not even to close it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.step import RunInfo, Sample, Site
from . import schema
from .encode import FINDING_COLUMNS, clean_text, from_json, to_json
from .files import network_file_system, store_name
from .lock import HeldLock, LockUnsupported, holder, lock_path, try_lock
from .packing import pack_histograms, pack_sample

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
    run: int = 0
    started: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    layouts: dict[tuple[str, str], int] = field(default_factory=dict)

    def begin_run(self, info: RunInfo) -> None:
        """Adds the run's row. Runs still marked as running are dead: their writer no longer holds the lock."""
        self.started = float(info.started)
        insert = """INSERT INTO run (started, argv, torch, world_size, rank, amp_dtype, status, meta)
                    VALUES (?, ?, ?, ?, ?, ?, 'running', ?)"""
        row = (
            self.started,
            to_json(info.argv),
            clean_text(info.torch),
            int(info.world_size),
            int(info.rank),
            clean_text(info.amp_dtype),
            to_json(info.meta),
        )
        with self.transaction():
            self.db.execute("UPDATE run SET status = 'interrupted' WHERE status = 'running'")
            self.run = int(self.db.execute(insert, row).lastrowid or 0)

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        return _transaction(self)

    def put_sites(self, kind: str, first: int, sites: Sequence[Site]) -> None:
        rows = [
            (self.run, clean_text(kind), first + i, clean_text(site.name), clean_text(site.dtype), to_json(site.shape))
            for i, site in enumerate(sites)
        ]
        self.db.executemany("INSERT OR REPLACE INTO site VALUES (?, ?, ?, ?, ?, ?)", rows)

    def put_sample(self, sample: Sample) -> None:
        rows, zeros, data = pack_sample(sample)
        key = (self.run, sample.kind, int(sample.step), sample.sites)
        self.db.execute(
            "INSERT OR REPLACE INTO sample (run, kind, step, n, layout, data) VALUES (?, ?, ?, ?, ?, ?)",
            (*key, self._layout(rows, zeros), data),
        )
        if sample.histograms:
            self.db.execute(
                "INSERT OR REPLACE INTO histogram (run, kind, step, n, data) VALUES (?, ?, ?, ?, ?)",
                (*key, pack_histograms(sample.histograms)),
            )

    def put_scalars(self, rows: Iterable[tuple[str, int, float]]) -> None:
        self.db.executemany("INSERT OR REPLACE INTO scalar VALUES (?, ?, ?, ?)", [(self.run, *row) for row in rows])

    def put_finding(self, row: tuple[Any, ...]) -> None:
        marks = ", ".join("?" * (1 + len(row)))
        self.db.execute(f"INSERT INTO finding (run, {FINDING_COLUMNS}) VALUES ({marks})", (self.run, *row))

    def put_examination(self, step: int, data: str) -> None:
        self.db.execute("INSERT OR REPLACE INTO examination VALUES (?, ?, ?)", (self.run, step, data))

    def put_fact(self, name: str, value: str) -> None:
        self.db.execute("INSERT OR REPLACE INTO fact VALUES (?, ?, ?)", (self.run, name, value))

    def put_dump(self, row: tuple[int, str, str, str]) -> None:
        self.db.execute("INSERT INTO dump (run, step, site, path, sha256) VALUES (?, ?, ?, ?, ?)", (self.run, *row))

    def put_meta(self, values: dict[str, Any]) -> None:
        """Values with a column of their own go there; the rest joins the JSON of `meta`."""
        for name in RUN_COLUMNS:
            if name in values:
                self.db.execute(f"UPDATE run SET {name} = ? WHERE id = ?", (values[name], self.run))
        rest = {name: value for name, value in values.items() if name not in RUN_COLUMNS}
        if rest:
            (text,) = self.db.execute("SELECT meta FROM run WHERE id = ?", (self.run,)).fetchone()
            self.db.execute("UPDATE run SET meta = ? WHERE id = ?", (to_json(from_json(text) | rest), self.run))

    def put_dropped(self, dropped: int) -> None:
        self.db.execute("UPDATE run SET dropped = ? WHERE id = ?", (dropped, self.run))

    def finish(self, status: str) -> None:
        """The run's last row; the time comes from a clock that never runs backwards."""
        finished = self.started + time.monotonic() - self.begun
        with self.transaction():
            row = (finished, clean_text(status), self.run)
            self.db.execute("UPDATE run SET finished = ?, status = ? WHERE id = ?", row)

    def close(self) -> None:
        """Folds the side files into the store and removes them, unless a reader is busy with them."""
        with _in_sqlite:
            with contextlib.suppress(sqlite3.OperationalError):
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


@contextlib.contextmanager
def _transaction(store: WritingStore) -> Iterator[None]:
    with _in_sqlite:
        store.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            store.db.execute("COMMIT")
        except BaseException:
            store.layouts.clear()  # layouts of this transaction are gone with it
            if store.db.in_transaction:  # a full disk ends the transaction by itself
                store.db.execute("ROLLBACK")
            raise


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


def open_for_writing(folder: Path, info: RunInfo) -> WritingStore:
    """The first store of the rank in this folder that no live process writes and that this version can add to."""
    folder.mkdir(parents=True, exist_ok=True)
    network = network_file_system(folder)
    reasons: list[str] = []
    number = 0
    while True:
        number += 1
        path = folder / store_name(info.rank, number)
        try:
            lock = try_lock(lock_path(path))
        except LockUnsupported:
            return _open_unlocked(folder, info, network)
        if lock is None:
            reasons.append(f"{path} is being written by {holder(lock_path(path))}")
            continue
        try:
            db, refusal = _connect(path, network)
            if refusal is None:
                notes = tuple(f"{reason}; this run is recorded in {path}" for reason in reasons[-1:])
                store = WritingStore(db, path, lock, network, notes)
                store.begin_run(info)
                return store
        except BaseException:
            lock.release()
            raise
        db.close()
        lock.release()
        reasons.append(refusal.reason)


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
    db, _ = _connect(path, network)
    store = WritingStore(db, path, None, network, ())
    store.begin_run(info)
    return store


def _connect(path: Path, network: str) -> tuple[sqlite3.Connection, schema.Refusal | None]:
    """The connection, and why the file cannot be added to."""
    with _in_sqlite:
        db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_SECONDS)
        try:
            refusal = schema.refusal(db, path)
            if refusal and not refusal.is_empty:
                return db, refusal
            with contextlib.suppress(sqlite3.OperationalError):  # a busy reader may forbid the change; any mode is safe
                db.execute(f"PRAGMA journal_mode = {'TRUNCATE' if network else 'WAL'}")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
            if refusal:
                schema.create(db)
        except BaseException:
            db.close()
            raise
        return db, None
