"""One read-only SQL query on the store, with a cap on time and rows.

The tables are described in docs/schema.md; `measured` shows the packed samples as rows, and
stat(data, n, rows, zeros, 'norm', position) reads one value of a packed sample.

    nanny sql "SELECT step, norm FROM measured WHERE site = 'fc.weight' AND kind = 'grad' ORDER BY step"
"""

from __future__ import annotations

import argparse
import re
import sqlite3
import time

from ..core.finding import NannyError
from ..show.tables import Answer, Column, Line, Table
from ..store import reader
from .source import positive

ROWS = 1000
SECONDS = 10.0
CHECK_EVERY = 10_000  # instructions of SQLite's machine between two looks at the clock
_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_PRAGMAS_ON_TABLES = {"table_info", "table_xinfo", "table_list", "index_list", "index_info"}
_PRAGMAS_TO_READ = {"user_version", "application_id"}  # with an argument they would write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", metavar="SELECT", help="one SELECT statement")
    parser.add_argument("--limit", type=positive, default=ROWS, metavar="N", help=f"at most N rows (default: {ROWS})")
    parser.add_argument("--timeout", type=float, default=SECONDS, metavar="S", help=f"seconds (default: {SECONDS:g})")


def answer(args: argparse.Namespace) -> Answer:
    if args.run is not None:
        raise NannyError(f"a query says itself which run it means; write WHERE run = {args.run} instead of --run {args.run}")
    path = reader.find_stores(args.db)[0]
    with reader.reading(path) as db:
        names, rows = ask(db, args.query, args.limit, args.timeout)
    cut = len(rows) > args.limit
    rows = rows[: args.limit]
    table = Table(tuple(Column(name, elastic=True) for name in names), rows)
    lines = [Line(f"only the first {args.limit} rows; --limit N shows more", "warning")] if cut else []
    if not rows:
        lines.append(Line("no rows"))
    data = {"columns": names, "rows": [list(row) for row in rows], "cut": cut}
    return Answer(lines=lines, tables=[table], data=data)


def ask(db: sqlite3.Connection, query: str, limit: int, seconds: float) -> tuple[list[str], list[tuple[object, ...]]]:
    """Names of the columns and at most `limit` + 1 rows; NannyError for what is not a read, too slow or wrong."""
    end = time.monotonic() + seconds
    db.set_authorizer(_authorize)
    db.set_progress_handler(lambda: int(time.monotonic() > end), CHECK_EVERY)
    try:
        found = db.execute(query)
        if found.description is None:
            raise NannyError("the query returns nothing; `nanny sql` takes one SELECT")
        names = [column[0] for column in found.description]
        return names, [tuple(map(_shown, row)) for row in found.fetchmany(limit + 1)]
    except sqlite3.Error as error:
        raise NannyError(_explained(str(error), seconds)) from error
    except sqlite3.Warning as error:  # two statements in one
        raise NannyError("`nanny sql` takes one SELECT at a time") from error
    finally:
        db.set_authorizer(None)
        db.set_progress_handler(None, 0)


def _authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    del database, trigger
    reads = first in _PRAGMAS_ON_TABLES or (first in _PRAGMAS_TO_READ and not second)
    allowed = action in _ALLOWED or (action == sqlite3.SQLITE_PRAGMA and reads)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _shown(value: object) -> object:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else value


def _explained(error: str, seconds: float) -> str:
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
