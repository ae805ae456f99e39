"""What was lost or changed in a store after it was written. SQLite would read on as if nothing had happened.

Every row has a CRC of its columns, which readers check as they go: a row that fails is left out and told. `tally` says how many
rows there must be, so that rows are missed too; it is compared whenever a run is picked. In the -wal file SQLite drops all that
comes after the first bad frame without a word, so its frames are counted.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from .packing import histogram_crc, row_crc, sample_crc, scalar_crcs, unpack_sample

# Tables with a row per record: what their rows are counted by, and what orders them.
PARTS = {
    "site": ("kind", "position"),
    "sample": ("kind", "step"),
    "histogram": ("kind", "step"),
    "scalar": ("name", "step"),
    "finding": ("", "id"),
    "examination": ("", "step"),
    "fact": ("name", ""),
    "dump": ("", "id"),
}
_WORDS = {
    "run": "runs", "site": "layer names", "sample": "samples", "histogram": "histograms", "scalar": "points of curves",
    "finding": "findings", "examination": "examined steps", "fact": "facts", "dump": "dumps", "tally": "row counts",
    "end": "last pages", "wal": "last seconds",
}  # fmt: skip


UNREADABLE = (sqlite3.DatabaseError, MemoryError, UnicodeDecodeError, OverflowError)  # what SQLite and Python say of garbage
Damage = dict[Path, set[str]]  # store -> tables


class Tally(NamedTuple):
    rows: int = 0
    total: int = 0  # of their crc and of what orders them
    newest: float = -float("inf")

    def plus(self, crc: int, order: int) -> Tally:
        return Tally(self.rows + 1, self.total + crc + order, max(self.newest, order))

    def minus(self, crc: int, order: int) -> Tally:
        return Tally(self.rows - 1, self.total - crc - order, self.newest)


def write_tally(db: sqlite3.Connection, key: tuple[int, str, str], tally: Tally) -> None:
    row = (*key, tally.rows, tally.total)
    db.execute("INSERT OR REPLACE INTO tally VALUES (?, ?, ?, ?, ?, ?)", (*row, row_crc(*row)))


class StoreConnection(sqlite3.Connection):
    """What `reader.connect` gives; it remembers in which tables something was wrong."""

    damaged: set[str]


def note_damage(db: sqlite3.Connection, part: str) -> None:
    cast(StoreConnection, db).damaged.add(part)


def words_of(parts: Collection[str]) -> str:
    words = [word for part, word in _WORDS.items() if part in parts]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def damage_sentence(path: Path, parts: Collection[str]) -> str:
    return f"{path} is damaged: some of its {words_of(parts)} were lost or changed after they were written"


def incomplete_tables(db: sqlite3.Connection, run: int) -> set[str]:
    """Tables that do not hold the rows of a run that were written to them; run 0 is the list of runs."""
    told = tallies(db, run)
    out = {part for part, _ in told if part not in (PARTS if run else ["run"])}
    for part in PARTS if run else ["run"]:
        try:
            found = {(part, name): sums for name, sums in _sums(db, run, part).items() if sums[0]}
        except UNREADABLE:
            found = {}
        if found != {key: sums for key, sums in told.items() if key[0] == part and sums[0]}:
            out.add(part)
    return out


def tallies(db: sqlite3.Connection, run: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Rows and total of each table and name; a row of `tally` that is itself damaged stands under `tally`."""
    out = {}
    for part, name, rows, total, crc in db.execute("SELECT part, name, rows, total, crc FROM tally WHERE run = ?", (run,)):
        whole = crc == row_crc(run, part, name, rows, total)
        out[(part, name) if whole else ("tally", "")] = (rows, total) if whole else (1, 0)
    return out


def _sums(db: sqlite3.Connection, run: int, part: str) -> dict[str, tuple[int, int]]:
    if part == "run":
        return {"": db.execute("SELECT count(*), ifnull(sum(crc + id), 0) FROM run").fetchone()}
    named, ordered = PARTS[part]
    query = f"SELECT {named or repr('')}, count(*), sum(crc + {ordered or 0}) FROM {part} WHERE run = ? GROUP BY 1"
    return {name: (rows, total) for name, rows, total in db.execute(query, (run,))}


def run_numbers(db: sqlite3.Connection) -> list[int]:
    """The runs that a store has, or has had."""
    found: set[int] = set()
    for table in ("run", "tally"):
        with contextlib.suppress(*UNREADABLE):
            found |= {run for (run,) in db.execute(f"SELECT {'id' if table == 'run' else 'run'} FROM {table}") if run}
    return sorted(found)


def file_damage(db: sqlite3.Connection) -> str:
    """What is wrong with a file whatever its rows are; empty if nothing is."""
    try:
        (said,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    except UNREADABLE as error:
        said = str(error)
    parts = cast(StoreConnection, db).damaged
    problems = [f"its {words_of(parts)} are lost"] if parts else []
    return "; ".join([*problems, *([] if said == "ok" else [f"SQLite says: {' '.join(said.split())}"])])


def lost_rows(db: sqlite3.Connection, run: int, parts: Collection[str] = ("run", *PARTS)) -> dict[str, tuple[int, int]]:
    """Of each table how many rows of a run are lost or changed, and how many there were; reads all of them."""
    out = {}
    written = {part: int(part == "run") for part in parts}
    missed = set()
    with contextlib.suppress(*UNREADABLE):
        missed = incomplete_tables(db, run)
        for (part, _), (rows, _) in tallies(db, run).items():
            if part in written or part not in PARTS:
                written[part] = written.get(part, 0) + rows
    for part, count in written.items():
        whole = 0
        with contextlib.suppress(*UNREADABLE):
            for is_whole in _whole_rows(db, run, part):
                whole += is_whole
        if whole != count or part in missed:
            out[part] = (max(count - whole, 1), count)
    return out


def _whole_rows(db: sqlite3.Connection, run: int, part: str) -> Iterator[bool]:
    for row in db.execute(f"SELECT * FROM {part} WHERE {'id' if part == 'run' else 'run'} = ?", (run,)):
        if part == "sample":
            yield _sample_is_whole(db, row)
        elif part == "histogram":
            _, _, kind, step, n, crc, data = row
            yield crc == histogram_crc(run, kind, step, n, data)
        elif part == "scalar":
            _, name, step, value, crc = row
            yield crc in scalar_crcs(run, name, [(step, value)])
        else:
            yield row_crc(*row[:-1]) == row[-1]


def _sample_is_whole(db: sqlite3.Connection, row: tuple[Any, ...]) -> bool:
    _, run, kind, step, n, layout, crc, data = row
    for rows, zeros in db.execute("SELECT rows, zeros FROM layout WHERE id = ?", (layout,)):
        if crc == sample_crc(run, kind, step, n, rows, zeros):
            return unpack_sample(data, n, rows, zeros, crc) is not None
    return False


# The -wal file: 32 bytes of header, then frames of 24 bytes of header and a page. Numbers are big endian.
_WAL_HEADER, _FRAME_HEADER = 32, 24
_LAST_FRAME = 16  # where the -shm file has the number of frames that SQLite has taken


def is_cut_short(db: sqlite3.Connection, store: Path) -> bool:
    """SQLite reads what is missing of a page as zeros, unless it has it from the -wal file, as where a quota ended what was to be
    folded in. Not for a store that is being written."""
    (page,), (count,) = (db.execute(f"PRAGMA {what}").fetchone() for what in ("page_size", "page_count"))
    whole, rest = divmod(store.stat().st_size, page)
    return bool(rest) and not {*range(whole + 1, max(count, whole + 1) + 1)} <= _pages_in_wal(store, page)


def _pages_in_wal(store: Path, page: int) -> set[int]:
    """The pages that SQLite takes from there; it has looked at the file already."""
    wal, shm = _beside(store)
    if not (wal.exists() and shm.exists()):
        return set()
    with open(wal, "rb") as file:
        starts = (_WAL_HEADER + frame * (_FRAME_HEADER + page) for frame in range(_taken(shm)))
        return {int.from_bytes(file.read(4), "big") for start in starts if file.seek(start)}


def _beside(store: Path) -> tuple[Path, Path]:
    return store.with_name(f"{store.name}-wal"), store.with_name(f"{store.name}-shm")


def _taken(shm: Path) -> int:
    return int(struct.unpack_from("=I", shm.read_bytes()[:64], _LAST_FRAME)[0])


def wal_is_damaged(store: Path) -> bool:
    """Whether a dead writer's -wal file holds transactions that SQLite does not read. Not for a store that is being written."""
    wal, shm = _beside(store)
    if not wal.exists() or wal.stat().st_size < _WAL_HEADER:
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)) as db:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # SQLite looks at the file now
            (page,) = db.execute("PRAGMA page_size").fetchone()
            if not shm.exists():
                return False
            taken = _taken(shm)
    except sqlite3.Error:
        return False  # whoever opens it next says why
    return any(_lost_frames(wal, page, taken))


_ROUNDS = 1 << 20  # how often one -wal file may have been begun anew


def _lost_frames(wal: Path, page: int, taken: int) -> Iterator[bool]:
    with open(wal, "rb") as file:
        head = file.read(_WAL_HEADER)
        yield _wal_checksum(head[:24]) != struct.unpack(">II", head[24:])
        salts = struct.unpack(">II", head[16:24])  # the first counts the rounds, the second is drawn for each
        count = (os.fstat(file.fileno()).st_size - _WAL_HEADER) // (_FRAME_HEADER + page)
        for frame in range(taken, count):
            file.seek(_WAL_HEADER + frame * (_FRAME_HEADER + page))
            _, ends_transaction, first, second = struct.unpack(">IIII", file.read(16))
            is_unfinished = (first, second) == salts and not ends_transaction
            is_of_an_earlier_round = 0 < (salts[0] - first) % 2**32 < _ROUNDS and second != salts[1]
            yield not is_unfinished and not is_of_an_earlier_round


def _wal_checksum(data: bytes) -> tuple[int, int]:
    """SQLite's own, of the header: words in the byte order that the magic number names."""
    words = struct.unpack(f"{'>' if data[3] & 1 else '<'}{len(data) // 4}I", data)
    a = b = 0
    for first, second in zip(words[::2], words[1::2]):
        a = (a + first + b) & 0xFFFFFFFF
        b = (b + second + a) & 0xFFFFFFFF
    return a, b
