"""What earlier runs found, by content: a file is checked again when it, one that it imports, or nanny itself has changed.

SQLite and JSON in the user's cache folder, nothing that runs when it is read. A cache that cannot be opened, read or
written is no cache: everything is checked, and nobody is told.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from ..core.finding import Finding, Link, Severity

T = TypeVar("T")
KEPT_DAYS = 30
_TABLE = "CREATE TABLE IF NOT EXISTS checked (key BLOB PRIMARY KEY, needs TEXT, findings TEXT, used INTEGER) WITHOUT ROWID"
Imports = dict[tuple[str, int], str | None]  # what a file imports, with how many dots -> the file that this means


@dataclass(frozen=True)
class Checked:
    """The findings of one file, and the texts that were read for them, its own among them: path -> digest.

    `settings` is what it asked of settings files, (name or nothing, the file that asks) -> digest of what there was to read.
    """

    findings: list[Finding]
    read: dict[str, str]
    settings: dict[tuple[str, str], str] = field(default_factory=dict)


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Cache:
    """`get` and `put` rows by key; only the process that opened it writes."""

    def __init__(self, path: str):
        self._rows: dict[bytes, tuple[str, str]] = {}
        self._used: list[bytes] = []
        self._db: sqlite3.Connection | None = None
        with suppress(OSError, sqlite3.Error):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            self._db = _open(path)

    def _get(self, key: bytes, read: Callable[[Any, Any], T]) -> T | None:
        try:
            row = self._db.execute("SELECT needs, findings FROM checked WHERE key = ?", (key,)).fetchone() if self._db else None
            found = read(json.loads(row[0]), json.loads(row[1])) if row is not None else None
        except (sqlite3.Error, ValueError, TypeError, KeyError, AttributeError):  # of another hand, or broken
            return None
        if found is not None:
            self._used.append(key)
        return found

    def get(self, key: bytes) -> Checked | None:
        return self._get(key, _checked)

    def put(self, key: bytes, checked: Checked) -> None:
        with suppress(ValueError, TypeError):  # evidence that is no JSON
            found = json.dumps([finding.to_json() for finding in checked.findings])
            needs = [sorted(checked.read.items()), [[*asked, state] for asked, state in sorted(checked.settings.items())]]
            self._rows[key] = json.dumps(needs), found

    def imports(self, key: bytes) -> Imports | None:
        return self._get(key, lambda asked, _: {(str(name), int(level)): found for name, level, found in asked})

    def put_imports(self, key: bytes, asked: Imports) -> None:
        """Those that were looked up at any time: what was found from this file may rest on each of them."""
        known = self.imports(key) or {}
        self._rows[key] = json.dumps([[*name, found] for name, found in {**known, **asked}.items()]), "[]"

    def close(self) -> None:
        if self._db is None:
            return
        today = int(time.time() // 86_400)
        with suppress(sqlite3.Error), self._db:
            rows = [(key, *row, today) for key, row in self._rows.items()]
            self._db.executemany("INSERT OR REPLACE INTO checked VALUES (?, ?, ?, ?)", rows)
            self._db.executemany(
                "UPDATE checked SET used = ? WHERE key = ? AND used < ?", [(today, k, today) for k in self._used]
            )
            self._db.execute("DELETE FROM checked WHERE used < ?", (today - KEPT_DAYS,))
        self._db.close()
        self._db = None


def user_cache() -> Cache | None:
    """The one in the user's cache folder; None for a user without a home."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Cache(os.path.join(home, "nanny", "check.sqlite")) if os.path.isabs(home) else None


def _open(path: str) -> sqlite3.Connection:
    """The table in the file; one that is no database is begun anew."""
    for _ in range(2):
        db = sqlite3.connect(path, timeout=1)
        try:
            db.execute(_TABLE)
            db.execute("SELECT key, needs, findings, used FROM checked LIMIT 1")
            return db
        except sqlite3.OperationalError:  # in use, or not ours to write
            db.close()
            raise
        except sqlite3.DatabaseError:
            db.close()
            os.unlink(path)
    raise sqlite3.DatabaseError(path)


def _checked(needs: Any, found: Any) -> Checked:
    read, settings = needs
    asked = {(str(name), str(importer)): str(state) for name, importer, state in settings}
    return Checked([_finding(item) for item in found], {str(a): str(b) for a, b in read}, asked)


def _finding(item: dict[str, Any]) -> Finding:
    chain = tuple(Link(**link) for link in item.pop("chain", ()))
    return Finding(**{**item, "severity": Severity[item["severity"]], "chain": chain})


@cache
def nanny_itself() -> str:
    """Changes with the checker: its version, its files, and the Python that parses for it."""
    import nanny

    stamps = []
    for room in ("check", "core"):
        for folder, _, names in os.walk(os.path.join(os.path.dirname(nanny.__file__), room)):
            stats = [(name, os.stat(os.path.join(folder, name))) for name in names if name.endswith(".py")]
            stamps += [(folder, name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]
    return repr((nanny.__version__, sys.version, sorted(stamps)))


class Keys:
    """The keys of one project under one configuration."""

    def __init__(self, project: Iterable[str], *configuration: object):
        self._start = hashlib.blake2b(repr((nanny_itself(), sorted(project), configuration)).encode(), digest_size=16).digest()

    def of(self, path: str, digest: str, what: str = "findings") -> bytes:
        return hashlib.blake2b(f"{what}\0{path}\0{digest}".encode(), key=self._start, digest_size=16).digest()


def shared_by_size(sizes: Sequence[int], parts: int, smallest: int, largest: int) -> list[slice]:
    """Neighbours in batches of about the same number of bytes."""
    wanted = min(max(sum(sizes) // parts, smallest), largest)
    out, start, taken = [], 0, 0
    for at, size in enumerate(sizes):
        taken += size
        if taken >= wanted:
            out.append(slice(start, at + 1))
            start, taken = at + 1, 0
    return out + ([slice(start, len(sizes))] if start < len(sizes) else [])
