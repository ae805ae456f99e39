"""One read-only SQL query on the store, with a cap on time and rows.

The tables are described in docs/schema.md; `measured` shows the packed samples as rows, and
stat(data, n, rows, zeros, 'norm', position) reads one value of a packed sample.

    nanny sql "SELECT step, norm FROM measured WHERE site = 'fc.weight' AND kind = 'grad' ORDER BY step"
"""

from __future__ import annotations

import re
import sqlite3
import time
from dataclasses import dataclass

from ..core.finding import NannyError
from ..store import reader
from ..store.damage import PARTS, Damage, lost_rows, note_damage, run_numbers
from ..store.files import find_stores

ROWS = 1000
SECONDS = 10.0
CHECK_EVERY = 10_000  # instructions of SQLite's machine between two looks at the clock
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "integrity_check", "quick_check"}
_PRAGMAS_TO_READ = {"user_version", "application_id"}  # with an argument they would write


@dataclass(frozen=True)
class SelectedRows:
    columns: list[str]
    rows: list[tuple[object, ...]]
    cut: bool  # there are more


def query(db: str | None, text: str, limit: int = ROWS, seconds: float = SECONDS, damage: Damage | None = None) -> SelectedRows:
    """What one SELECT finds in the first store that the path leads to; all rows of the tables that it reads are checked."""
    tables: set[str] = set()
    with reader.reading(find_stores(db)[0], damage) as connection, reader.one_moment(connection):
        names, rows = _select(connection, text, limit, seconds, tables)
        for run in run_numbers(connection) if tables else []:
            for part in lost_rows(connection, run, tables & {"run", *PARTS}):
                note_damage(connection, part)
    return SelectedRows(names, rows[:limit], len(rows) > limit)


def _select(
    db: sqlite3.Connection, query: str, limit: int, seconds: float, tables: set[str]
) -> tuple[list[str], list[tuple[object, ...]]]:
    """Names of the columns and at most `limit` + 1 rows; NannyError for what is not a read, too slow or wrong.

    The tables that are read are added to `tables`.
    """
    end = time.monotonic() + seconds

    def authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
        del database, trigger
        if action == sqlite3.SQLITE_READ and first:
            tables.add(first)
        reads = first in _PRAGMAS or (first in _PRAGMAS_TO_READ and not second)
        allowed = action in _ALLOWED or (action == sqlite3.SQLITE_PRAGMA and reads)
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    db.set_authorizer(authorize)
    db.set_progress_handler(lambda: int(time.monotonic() > end), CHECK_EVERY)
    try:
        found = db.execute(query)
        if found.description is None:
            raise NannyError("the query returns nothing; `nanny sql` takes one SELECT")
        names = [column[0] for column in found.description]
        return names, [tuple(map(_cell, row)) for row in found.fetchmany(limit + 1)]
    except sqlite3.Error as error:
        raise NannyError(_explanation(str(error), seconds)) from error
    except sqlite3.Warning as error:  # two statements in one
        raise NannyError("`nanny sql` takes one SELECT at a time") from error
    finally:
        db.set_authorizer(None)
        db.set_progress_handler(None, 0)


def _cell(value: object) -> object:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else value


def _explanation(error: str, seconds: float) -> str:
    if "interrupted" in error:
        return f"the query took longer than {seconds:g} s and was stopped; narrow it, or allow more with --timeout"
    if "not authorized" in error or "prohibited" in error:
        return "this is not a read of the store; `nanny sql` takes SELECT statements only"
    if "one statement at a time" in error:
        return "`nanny sql` takes one SELECT at a time"
    match = re.search(r"no such (table|column|function): (\S+)", error)
    if match:
        return f"there is no {match[1]} {match[2]} in the store; docs/schema.md lists what there is"
    return f"SQLite does not understand the query: {error}"
