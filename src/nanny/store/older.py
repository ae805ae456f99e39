"""A store of the schema before this one (nanny 0.1), as one of this: a copy in memory, the file stays as it is.

Schema 2 had no checksums: what changed in such a file since it was written cannot be told.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.finding import NannyError
from . import schema
from .damage import PARTS, UNREADABLE, StoreConnection, Tally, write_tally
from .packing import histogram_crc, row_crc, sample_crc, scalar_crcs, with_crcs

Row = tuple[Any, ...]


def upgraded(old: sqlite3.Connection, path: Path) -> StoreConnection:
    """`old` is closed."""
    db = sqlite3.connect(":memory:", isolation_level=None, factory=StoreConnection)
    db.damaged = set()
    schema.create(db)
    try:
        db.execute("BEGIN")
        db.executemany("INSERT INTO layout VALUES (?, ?, ?)", old.execute("SELECT id, rows, zeros FROM layout"))
        for part in ("run", *PARTS):
            _copy(old, db, part)
        db.execute("COMMIT")
    except (*UNREADABLE, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        db.close()
        raise NannyError(f"{path} is of an older nanny, and damaged ({error}); restore the file from a copy") from error
    finally:
        old.close()
    return db


def _copy(old: sqlite3.Connection, db: sqlite3.Connection, part: str) -> None:
    named, ordered = ("", "id") if part == "run" else PARTS[part]
    names = [row[1] for row in db.execute(f"PRAGMA table_info({part})")]
    tallies: dict[tuple[int, str, str], Tally] = {}
    for row in _rows(old, part):
        db.execute(f"INSERT INTO {part} VALUES ({', '.join('?' * len(row))})", row)
        values = dict(zip(names, row))
        key = (0 if part == "run" else values["run"], part, values[named] if named else "")
        tallies[key] = tallies.get(key, Tally()).plus(values["crc"], values[ordered] if ordered else 0)
    for key, tally in tallies.items():
        write_tally(db, key, tally)


def _rows(old: sqlite3.Connection, part: str) -> Iterator[Row]:
    """As this schema has them."""
    if part == "sample":
        query = "SELECT s.id, run, kind, step, n, layout, data, rows, zeros FROM sample s JOIN layout ON layout.id = s.layout"
        for number, run, kind, step, n, layout, data, rows, zeros in old.execute(query):
            crc = sample_crc(run, kind, step, n, rows, zeros)
            yield number, run, kind, step, n, layout, crc, with_crcs(data, n, rows.split(), crc)
    elif part == "histogram":
        for number, run, kind, step, n, data in old.execute("SELECT id, run, kind, step, n, data FROM histogram"):
            yield number, run, kind, step, n, histogram_crc(run, kind, step, n, data), data
    elif part == "scalar":
        for run, name, step, value in old.execute("SELECT run, name, step, value FROM scalar"):
            yield run, name, step, value, *scalar_crcs(run, name, [(step, value)])
    else:
        for row in old.execute(f"SELECT * FROM {part}"):
            yield *row, row_crc(*row)
