"""Writing a run: training hands over records and goes on; one thread owns the file.

    writer = RunWriter("nanny_logs", RunInfo(started=time.time()))
    writer.add_sites([Site("grad", "fc.weight", "float32", (8, 8))])
    writer.add_sample(Sample("grad", 0, ("count", "norm"), struct.pack("<2f", 64, 0.5)))
    writer.add_finding(finding)          # on disk when this returns
    writer.close()

Promises: no call raises because of the disk; none but `add_finding(s)`, `flush` and `close` waits, and those wait for a
bounded time. Samples and scalars are written about once a second, and dropped (counted in `dropped`) when `queue_bytes`
of them are waiting. Findings are never dropped while the disk works: they overtake the queue and are committed at once.
If the disk fails, `failed` says why, the user is warned once, and the queue is kept and tried again. If the file is deleted,
moved or overwritten, the user is warned once and the run goes on in a new file beside it. In a forked child
every call does nothing. `on_warning` is called in the thread that calls the writer, never in the writer's own.
"""

from __future__ import annotations

import atexit
import sqlite3
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache, partial
from os import getpid  # that of now: programs replace it
from pathlib import Path
from typing import Any

from ..core.examination import Examination
from ..core.finding import Finding, warn
from ..core.step import RunInfo, Sample, Site
from ..core.threads import start_thread
from .database import RUN_COLUMNS, WritingStore, open_for_writing
from .encode import clean_text, finding_row, to_json
from .files import store_name

QUEUE_BYTES = 64 << 20
BATCH_SECONDS = 1.0
BATCH_BYTES = 4 << 20  # of one transaction
NETWORK_BATCH_SECONDS, NETWORK_BATCH_BYTES = 10.0, 32 << 20  # each transaction waits for the server
OPEN_SECONDS = 15.0
ACKNOWLEDGE_SECONDS = 1.0
RETRY_SECONDS = 5.0
URGENT_KEPT = 10_000  # findings and the like, while the disk refuses them, and for a new file if this one is lost
MOST_LOST = 100  # files of one run
_ROW_BYTES = 100  # what a scalar weighs in the queue

Write = Callable[[WritingStore], None]
_clean_name = lru_cache(maxsize=256)(clean_text)  # of the same few scalars at every step


def status_at_exit() -> str:
    """How the interpreter came to its end: finished, crashed, or interrupted by Ctrl-C."""
    uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_type", None)  # at a prompt it may be long past
    return status_of(uncaught)


def status_of(error: type[BaseException] | None) -> str:
    return "finished" if error is None else "interrupted" if issubclass(error, KeyboardInterrupt) else "crashed"


class RunWriter:
    """The store of one run of this process, open until `close()` or the end of the interpreter."""

    def __init__(
        self,
        folder: str | Path,
        info: RunInfo,
        *,
        queue_bytes: int = QUEUE_BYTES,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        self.path = Path(folder) / store_name(info.rank)
        self.run = 0
        self.dropped = 0
        self.failed: str | None = None
        self.cpu_seconds = 0.0  # of the writer thread
        self._pid = getpid()
        self._on_warning = on_warning or _warn
        self._warnings: list[str] = []
        self._warned_of_failure = False
        self._positions: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._urgent: deque[Write] = deque()
        self._kept: list[Write] = []  # names of the sites, findings: what a new file needs if this one is lost
        self._lost = 0  # files
        self._urgent_in = self._urgent_done = 0
        self._bulk: deque[tuple[int, Write]] = deque()
        self._bulk_bytes = self._bulk_in = self._bulk_done = 0
        self._queue_bytes = queue_bytes
        self._flush_to = 0  # bulk up to this count is wanted now
        self._patient = True  # whether to wait for a finding's commit
        self._status: str | None = None  # set: closing
        self._store: WritingStore | None = None  # of the thread
        self._opened = threading.Event()
        self._thread = start_thread("nanny-store", self._work, Path(folder), info)
        self._opened.wait(OPEN_SECONDS)
        _open_writers.add(self)
        self._tell()

    def add_sites(self, sites: Sequence[Site]) -> None:
        """Appends to the sites of each kind: the position within the kind is the column in every later sample."""
        by_kind: dict[str, list[Site]] = {}
        for site in sites:
            by_kind.setdefault(site.kind, []).append(site)
        for kind, members in by_kind.items():
            first = self._positions[kind]
            self._positions[kind] += len(members)
            self._enqueue_urgent([partial(WritingStore.put_sites, kind=kind, first=first, sites=tuple(members))])

    def add_sample(self, sample: Sample) -> None:
        self.add_samples([sample])

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Of one kind. A second sample of the same kind and step replaces the first."""
        found = [sample for sample in samples if sample.sites]
        if found:
            size = sum(len(sample.data) + len(sample.histograms) for sample in found)
            self._enqueue_bulk(size, partial(WritingStore.put_samples, samples=found))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.add_curves([step], {name: [value] for name, value in values.items()})

    def add_curves(self, steps: Sequence[int], curves: Mapping[str, Iterable[float]]) -> None:
        """Scalars of several steps, which all have each of them."""
        points = {_clean_name(name): list(zip(map(int, steps), map(float, values))) for name, values in curves.items()}
        if points:
            self._enqueue_bulk(_ROW_BYTES * len(steps) * len(points), partial(WritingStore.put_scalars, curves=points))

    def add_finding(self, finding: Finding) -> None:
        """Returns when the finding survives the death of this process, or after a second."""
        self.add_findings([finding])

    def add_findings(self, findings: Iterable[Finding]) -> None:
        """Like `add_finding`, with one wait for all of them."""
        rows = [finding_row(finding) for finding in findings]
        self._enqueue_urgent([partial(WritingStore.put_next, table="finding", row=row) for row in rows], wait=True)

    def add_dump(self, step: int, site: str, path: str, sha256: str) -> None:
        row = (int(step), clean_text(site), clean_text(path), sha256)
        self._enqueue_urgent([partial(WritingStore.put_next, table="dump", row=row)])

    def add_examination(self, examination: Examination) -> None:
        data = to_json(asdict(examination))
        self._enqueue_urgent([partial(WritingStore.put_examination, step=int(examination.step), data=data)])

    def set_fact(self, name: str, value: Any) -> None:
        """The newest value wins. It waits with the samples, and is on disk a second later."""
        text = to_json(value)
        self._enqueue_bulk(len(text), partial(WritingStore.put_fact, name=name, value=text))

    def set_meta(self, **values: Any) -> None:
        """`amp_dtype`, `torch`, `world_size` and `rank` have columns of their own; the rest joins the run's `meta`."""
        known = {name: convert(values[name]) for name, convert in RUN_COLUMNS.items() if name in values}
        self._enqueue_urgent([partial(WritingStore.put_meta, values=values | known)])

    def flush(self, timeout: float = 10.0) -> bool:
        """Whether everything handed over before this call is on disk."""
        if self._is_forked():
            return False
        with self._changed:
            urgent, bulk = self._urgent_in, self._bulk_in
            self._flush_to = bulk
            self._changed.notify_all()
            self._changed.wait_for(lambda: (self._urgent_done >= urgent and self._bulk_done >= bulk) or self._is_stuck(), timeout)
            done = self._urgent_done >= urgent and self._bulk_done >= bulk and self.failed is None
        self._tell()
        return done

    def close(self, status: str = "finished", timeout: float = 10.0) -> None:
        """Writes what waits, marks the run with `status` and leaves one file. Later calls do nothing."""
        if self._is_forked():
            return
        with self._changed:
            if self._status is None:
                self._status = status
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive() and not self.failed:
            self.failed = f"{self.path} did not take the last records within {timeout:g} s"
        _open_writers.discard(self)
        self._tell()

    def _is_forked(self) -> bool:
        return getpid() != self._pid

    def _is_stuck(self) -> bool:
        return self.failed is not None or not self._thread.is_alive()

    def _enqueue_urgent(self, writes: Sequence[Write], *, wait: bool = False) -> None:
        if self._is_forked() or not writes:
            return
        with self._changed:
            full = self.failed is not None and len(self._urgent) > URGENT_KEPT
            if full or self._status is not None or not self._thread.is_alive():
                self.dropped += len(writes)
                return
            self._urgent.extend(writes)
            self._urgent_in += len(writes)
            ticket = self._urgent_in
            self._changed.notify_all()
            if wait and self._patient and not self.failed:
                # After one wait in vain nobody waits again until the thread has caught up.
                self._patient = self._changed.wait_for(
                    lambda: self._urgent_done >= ticket or self._is_stuck(), ACKNOWLEDGE_SECONDS
                )
        self._tell()

    def _enqueue_bulk(self, size: int, write: Write) -> None:
        if self._is_forked():
            return
        with self._changed:
            if self._bulk_bytes + size > self._queue_bytes or self._status is not None or not self._thread.is_alive():
                self.dropped += 1
                full = True
            else:
                self._bulk.append((size, write))
                self._bulk_bytes += size
                self._bulk_in += 1
                full = self._bulk_bytes > self._queue_bytes // 2
            if full:
                self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        if not self._warnings:
            return
        with self._changed:
            messages = list(self._warnings)
            self._warnings.clear()
        for message in messages:
            self._on_warning(message)

    # What follows runs in the writer thread.

    def _work(self, folder: Path, info: RunInfo) -> None:
        try:
            self._store = open_for_writing(folder, info)
            self.path, self.run = self._store.path, self._store.run
            self._warnings.extend(self._store.notes)
            self._opened.set()
            self._serve(self._store, folder, info).close()
        except Exception as error:  # noqa: BLE001  the thread's boundary: whatever happens here, training goes on
            if self._store is not None:
                with suppress(Exception):
                    self._store.close()
            if self.run:
                self._fail(f"nothing more is recorded in {self.path}: {_why(error)}; training goes on")
            else:
                advice = "training goes on unrecorded; choose a folder that can be written"
                self._fail(f"cannot open a store in {folder}: {_why(error)}; {advice}")
        with self._changed:
            self.dropped += len(self._bulk) + len(self._urgent)
            self._bulk.clear()
            self._urgent.clear()
            self.cpu_seconds = time.thread_time()
            self._changed.notify_all()
        self._opened.set()

    def _serve(self, store: WritingStore, folder: Path, info: RunInfo) -> WritingStore:
        interval = NETWORK_BATCH_SECONDS if store.network else BATCH_SECONDS
        due = time.monotonic() + interval
        dropped = 0
        lost = ""
        while True:
            with self._changed:
                self._changed.wait_for(self._is_wanted, max(0.0, due - time.monotonic()))
                closing = self._status is not None
                bulk_wanted = closing or time.monotonic() >= due or self._is_bulk_wanted()
            try:
                lost = lost or store.why_lost()
                if lost:
                    store, lost = self._begin_anew(store, folder, info, lost), ""
                self._write_urgent(store)
                while bulk_wanted and self._bulk:
                    self._write_bulk(store)
                    self._write_urgent(store)
                if self.dropped != dropped:
                    dropped = self.dropped
                    with store.transaction():
                        store.put_dropped(dropped)
                if closing:
                    store.finish(self._status or "finished")
            except sqlite3.DatabaseError as error:
                if type(error) is sqlite3.DatabaseError and self._lost < MOST_LOST:  # "malformed": the file was spoilt
                    lost, store.is_spoilt = f"{store.path} was damaged ({error})", True
                    continue
                if not isinstance(error, sqlite3.OperationalError):
                    raise
                # full, locked, unplugged: may pass
                what = "kept in memory and tried again" if not closing else "lost"
                self._fail(f"cannot write to {store.path}: {_why(error)}; what is measured is {what}, training goes on")
                with self._changed:
                    self._changed.wait_for(lambda: self._status is not None, RETRY_SECONDS)
            self.cpu_seconds = time.thread_time()
            if closing:
                return store
            if bulk_wanted:
                due = time.monotonic() + interval

    def _begin_anew(self, lost: WritingStore, folder: Path, info: RunInfo, reason: str) -> WritingStore:
        lost.abandon()
        try:
            store = open_for_writing(folder, info, after=lost.path)
        except OSError as error:
            raise sqlite3.OperationalError(f"{reason}, and no other can be made: {_why(error)}") from error
        with store.transaction():
            for write in self._kept:
                write(store)
        self._store, self.path, self.run = store, store.path, store.run
        self._lost += 1
        if self._lost == 1:
            self._warnings.append(f"{reason} while the run was being recorded; from here on it is recorded in {store.path}")
        return store

    def _is_wanted(self) -> bool:
        return bool(self._urgent) or self._status is not None or self._is_bulk_wanted()

    def _is_bulk_wanted(self) -> bool:
        return self._bulk_bytes > self._queue_bytes // 2 or self._flush_to > self._bulk_done

    def _write_urgent(self, store: WritingStore) -> None:
        with self._changed:
            writes = list(self._urgent)
        if not writes:
            return
        with store.transaction():
            for write in writes:
                write(store)
        with self._changed:
            for _ in writes:
                self._urgent.popleft()
            self._urgent_done += len(writes)
            small = [w for w in writes if getattr(w, "func", None) is not WritingStore.put_examination]
            self._kept += small[: URGENT_KEPT - len(self._kept)]
            self._succeed()

    def _write_bulk(self, store: WritingStore) -> None:
        """One transaction of what waited longest; it ends early when a finding comes."""
        limit = NETWORK_BATCH_BYTES if store.network else BATCH_BYTES
        size = count = 0
        with self._changed:
            batch = list(self._bulk)
        with store.transaction():
            for weight, write in batch:
                write(store)
                size += weight
                count += 1
                if size >= limit or self._urgent:
                    break
        with self._changed:
            for _ in range(count):
                self._bulk.popleft()
            self._bulk_bytes -= size
            self._bulk_done += count
            self._succeed()

    def _succeed(self) -> None:
        self.failed = None
        self._patient = True
        self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self.failed = reason
            if not self._warned_of_failure:
                self._warned_of_failure = True
                self._warnings.append(reason)
            self._changed.notify_all()


_open_writers: set[RunWriter] = set()


@atexit.register  # once: Python keeps a place for each function that is registered, also when it is taken back
def _close_at_exit() -> None:
    for writer in list(_open_writers):
        writer.close(status_at_exit())


def _why(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, (OSError, sqlite3.Error)) else f"{type(error).__name__}: {text}"


def _warn(message: str) -> None:
    warn(f"nanny: {message}", stacklevel=4)
