"""The tables of a store, as one commented SQL text; `docs/schema.md` is generated from it by `schema_page()`.

A change that an older reader would misread raises SCHEMA_VERSION. A store of the version before is read through a copy
(`older.py`); one of any other is refused with a sentence. A new run goes into a new file beside either.

SQLite does not notice a byte that changed on the disk. So every row carries a CRC-32 of its other columns, and `tally` says how
many rows there are: see `damage.py`.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import NamedTuple

APPLICATION_ID = 0x6E616E79  # "nany": tells our files from other SQLite databases, also to file(1)
SCHEMA_VERSION = 3
READ_THROUGH_A_COPY = 2

SCHEMA = """
-- One training process that was watched. A file may hold many runs, one after the other.
CREATE TABLE run (
    id INTEGER PRIMARY KEY,                  -- 1, 2, 3 ... in the order in which they were started
    started REAL NOT NULL,                   -- seconds since 1970, by the clock of the machine
    finished REAL,                           -- started + elapsed time; NULL: still running, or killed
    argv TEXT NOT NULL,                      -- JSON list: the command line
    torch TEXT NOT NULL,                     -- version of PyTorch
    world_size INTEGER NOT NULL,             -- processes that train together
    rank INTEGER NOT NULL,                   -- which of them wrote this
    amp_dtype TEXT NOT NULL,                 -- the low-precision format, empty if there was none
    status TEXT NOT NULL,                    -- running, finished, crashed, interrupted (Ctrl-C, kill)
    dropped INTEGER NOT NULL DEFAULT 0,      -- samples and scalar sets that did not fit into the queue or on the disk
    meta TEXT NOT NULL,                      -- JSON object: whatever else the run said about itself
    crc INTEGER NOT NULL                     -- of the other columns, in every table but layout; here as of JSON's list of them
);

-- A place that is measured: a module's output, a parameter, a gradient.
CREATE TABLE site (
    run INTEGER NOT NULL REFERENCES run(id),
    kind TEXT NOT NULL,                      -- output, output_grad, weight, grad, update, buffer
    position INTEGER NOT NULL,               -- 0, 1, 2 ... within the kind: its column in the samples of that kind
    name TEXT NOT NULL,                      -- module path or parameter name
    dtype TEXT NOT NULL,
    shape TEXT NOT NULL,                     -- JSON list of sizes
    crc INTEGER NOT NULL,
    PRIMARY KEY (run, kind, position)
) WITHOUT ROWID;

-- Which statistics a packed sample holds. A statistic that is zero at every site takes no space in the sample.
CREATE TABLE layout (
    id INTEGER PRIMARY KEY,
    rows TEXT NOT NULL,                      -- names of the packed statistics in order, separated by blanks
    zeros TEXT NOT NULL,                     -- names of the statistics that are 0 everywhere, so not packed
    UNIQUE (rows, zeros)
);

-- All sites of one kind at one step. The newest wins if a step is sampled twice.
CREATE TABLE sample (
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL REFERENCES run(id),
    kind TEXT NOT NULL,
    step INTEGER NOT NULL,
    n INTEGER NOT NULL,                      -- sites in this sample: positions 0 to n-1 of its kind
    layout INTEGER NOT NULL REFERENCES layout(id),
    crc INTEGER NOT NULL,                    -- of run, kind, step, n and the layout's texts
    data BLOB NOT NULL                       -- float32, little endian, row after row of layout.rows: n values, then their CRC
);
CREATE INDEX sample_step ON sample (run, kind, step, crc);

-- Exponent histograms of all sites of one kind at one step, where they were taken.
CREATE TABLE histogram (
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL REFERENCES run(id),
    kind TEXT NOT NULL,
    step INTEGER NOT NULL,
    n INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    data BLOB NOT NULL                       -- zlib of uint16, little endian: n rows of counts, see nanny.core.formats
);
CREATE INDEX histogram_step ON histogram (run, kind, step, crc);

-- Numbers of the whole run: loss, learning rate, gradient norm, loss scale, skipped. The newest wins, as above.
CREATE TABLE scalar (
    run INTEGER NOT NULL REFERENCES run(id),
    name TEXT NOT NULL,
    step INTEGER NOT NULL,
    value REAL,                              -- NULL is NaN (SQLite has none); Inf and -Inf are themselves
    crc INTEGER NOT NULL,
    PRIMARY KEY (run, name, step)
) WITHOUT ROWID;

-- Something wrong, in the order in which it was found.
CREATE TABLE finding (
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL REFERENCES run(id),
    step INTEGER,
    site TEXT NOT NULL,                      -- the place by name, empty for the whole run; not always in table site
    code TEXT NOT NULL,                      -- `nanny rule CODE` explains it
    severity INTEGER NOT NULL,               -- 1 info, 2 warning, 3 error
    value REAL,                              -- what was seen; the text NaN for a NaN, NULL for none
    limit_value REAL,                        -- what it was judged against, likewise
    message TEXT NOT NULL,
    hint TEXT NOT NULL,
    place TEXT NOT NULL,                     -- JSON object: rank, file, line, column, end_line, end_column, cell
    evidence TEXT NOT NULL,                  -- JSON object; non-finite numbers as the texts NaN, Infinity, -Infinity
    crc INTEGER NOT NULL
);

-- One step of which every operation was watched beside its FP32 twin.
CREATE TABLE examination (
    run INTEGER NOT NULL REFERENCES run(id),
    step INTEGER NOT NULL,
    data TEXT NOT NULL,                      -- JSON object: nanny.core.examination.Examination; non-finite numbers as texts
    crc INTEGER NOT NULL,
    PRIMARY KEY (run, step)
) WITHOUT ROWID;

-- What a diagnosis asks for beside the numbers of each step; written again as the run goes on.
CREATE TABLE fact (
    run INTEGER NOT NULL REFERENCES run(id),
    name TEXT NOT NULL,                      -- facts: how the loop treats loss, gradients, scaler and optimizer
    value TEXT NOT NULL,                     -- JSON
    crc INTEGER NOT NULL,
    PRIMARY KEY (run, name)
) WITHOUT ROWID;

-- A tensor or an operation that was written to disk for replay.
CREATE TABLE dump (
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL REFERENCES run(id),
    step INTEGER NOT NULL,
    site TEXT NOT NULL,
    path TEXT NOT NULL,                      -- as it was given, relative to the folder of this file or absolute
    sha256 TEXT NOT NULL,
    crc INTEGER NOT NULL
);

-- How many rows of each kind were written, so that lost ones are missed.
CREATE TABLE tally (
    run INTEGER NOT NULL,                    -- 0: of the whole file
    part TEXT NOT NULL,                      -- name of the table
    name TEXT NOT NULL,                      -- kind of site or name of scalar, where the table has one
    rows INTEGER NOT NULL,
    total INTEGER NOT NULL,                  -- sum of their crc and of what orders them: position, step or id
    crc INTEGER NOT NULL,
    PRIMARY KEY (run, part, name)
) WITHOUT ROWID;

-- The samples unpacked, one row per site and step. Needs the function stat(), so ask with `nanny sql`.
CREATE VIEW measured AS
SELECT sample.run, sample.kind, sample.step, site.name AS site, site.dtype,
    stat(data, n, rows, zeros, 'count', position) AS count,    -- elements seen; 0: not measured at this step
    stat(data, n, rows, zeros, 'norm', position) AS norm,      -- NULL is NaN or not taken, here and below
    stat(data, n, rows, zeros, 'min', position) AS min,
    stat(data, n, rows, zeros, 'max', position) AS max,
    stat(data, n, rows, zeros, 'mean', position) AS mean,
    stat(data, n, rows, zeros, 'nan', position) AS nan,
    stat(data, n, rows, zeros, 'posinf', position) AS posinf,
    stat(data, n, rows, zeros, 'neginf', position) AS neginf
FROM sample JOIN layout ON layout.id = sample.layout
JOIN site ON site.run = sample.run AND site.kind = sample.kind AND site.position < sample.n;
"""


def create(db: sqlite3.Connection) -> None:
    """Makes an empty database a store, in one transaction: a reader sees all of it or nothing."""
    marks = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
    db.executescript(f"BEGIN IMMEDIATE; {marks} {SCHEMA} COMMIT;")


class Refusal(NamedTuple):
    """Why a file is not a store that this version reads, and what the user can do."""

    reason: str
    remedy: str
    is_empty: bool = False
    is_of_before: bool = False  # a copy of it can be read


def refusal(db: sqlite3.Connection, path: Path) -> Refusal | None:
    other = "name another file with --db PATH"
    try:
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError:
        raise  # locked or unreadable: says nothing about what the file is
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # Python fails to read SQLite's words on a damaged schema
        return Refusal(f"{path} is damaged, or no store of nanny ({error})", other)
    if not tables and not application:
        return Refusal(f"{path} holds nothing yet", f"wait until the run has begun, or {other}", is_empty=True)
    if application != APPLICATION_ID:
        return Refusal(f"{path} is an SQLite file, but no store of nanny", other)
    versions = f"schema {version}, this one reads {SCHEMA_VERSION}"
    if version < SCHEMA_VERSION:
        again = "read it with that version, or record the run again"
        return Refusal(f"{path} was written by an older nanny ({versions})", again, is_of_before=version == READ_THROUGH_A_COPY)
    if version > SCHEMA_VERSION:
        upgrade = "type `pip install --upgrade precision-nanny`"
        return Refusal(f"{path} was written by a newer nanny ({versions})", upgrade)
    return None


_COMMENT_LINE = re.compile(r"-- (.*)")
_CREATE = re.compile(r"CREATE (TABLE|VIEW) (\w+)")
_TABLE_COLUMN = re.compile(r"    ([a-z_0-9]+) ([A-Z]+)\b[^-]*(?:-- (.*))?")
_VIEW_COLUMN = re.compile(r"    .* AS (\w+),? *(?:-- (.*))?")


def schema_page() -> str:
    """`docs/schema.md`: what each table and column means, then the SQL itself."""
    out = [
        "# The store",
        "",
        "<!-- Generated from src/nanny/store/schema.py by `make docs`; edit the comments there. -->",
        "",
        f"One SQLite file per process, schema version {SCHEMA_VERSION} (`PRAGMA user_version`), "
        f"`PRAGMA application_id` {APPLICATION_ID:#x}.",
        'Ask it with `nanny sql "SELECT ..."`, or with any SQLite client (the packed samples then stay packed).',
    ]
    comment = ""
    is_view = False
    for line in SCHEMA.splitlines():
        if match := _COMMENT_LINE.match(line):
            comment = match[1]
        elif match := _CREATE.match(line):
            is_view = match[1] == "VIEW"
            out += ["", f"## {match[2]}" + (" (view)" if is_view else ""), "", comment, ""]
            heads = ("column", "meaning") if is_view else ("column", "type", "meaning")
            out += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        elif is_view and line.startswith("SELECT "):
            out += ["| run, kind, step, site, dtype | of the sample and its site |"]
        elif is_view and (match := _VIEW_COLUMN.match(line)):
            out.append(f"| {match[1]} | {match[2] or ''} |")
        elif not is_view and (match := _TABLE_COLUMN.match(line)):
            out.append(f"| {match[1]} | {match[2]} | {match[3] or ''} |")
    return "\n".join([*out, "", "## The SQL", "", "```sql", SCHEMA.strip(), "```", ""])
