"""A portable copy of a run's files, also while training writes them.

OUT is a file, or a folder that takes all ranks. The copy is one plain file without side files: mail
it, open it anywhere.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from ..core.finding import NannyError
from ..store import reader
from ..store.files import find_stores

PAGES = 1024  # copied at a time: the writer gets its turn in between


def copy_stores(db: str | None, out: Path, replace: bool = False) -> list[Path]:
    """Copies every rank's file and returns the copies."""
    stores = find_stores(db)
    to_folder = out.is_dir() or out.suffix == "" or len(stores) > 1
    if to_folder and out.is_file():
        raise NannyError(f"{out} is a file, and there are {len(stores)} files to copy; name a folder")
    targets = [out / store.name if to_folder else out for store in stores]
    for store, target in zip(stores, targets):
        if target.exists() and not replace:
            raise NannyError(f"{target} exists; name another, or replace it with --force")
        if target.exists() and target.samefile(store):
            raise NannyError(f"{target} is the store itself; name another file")
    for store, target in zip(stores, targets):
        copy_store(store, target)
    return targets


def copy_store(store: Path, target: Path) -> None:
    """Copies under another name first, so that a broken copy never bears the good name."""
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        with reader.reading(store) as source:
            _back_up(source, part)
        os.replace(part, target)
    except OSError as error:
        raise NannyError(f"cannot write {target}: {error.strerror or error}; name another place") from error
    finally:
        if target.parent.is_dir():
            part.unlink(missing_ok=True)


def _back_up(source: sqlite3.Connection, part: Path) -> None:
    out = sqlite3.connect(part, isolation_level=None)
    try:
        with reader.one_moment(source):
            source.execute("SELECT 1 FROM run").fetchone()  # here the moment begins
            source.backup(out, pages=PAGES)
        out.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise NannyError(f"cannot write {part}: {error}; name another place") from error
    finally:
        out.close()
