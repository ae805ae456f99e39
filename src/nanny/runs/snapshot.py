"""A portable copy of a run's files, also while training writes them.

OUT is a file, or a folder that takes all ranks. The copy is one plain file without side files: mail
it, open it anywhere.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
from pathlib import Path

from ..core.finding import NannyError
from ..show.tables import Answer, Line
from ..store import reader

PAGES = 1024  # copied at a time: the writer gets its turn in between


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="file or folder to write")
    parser.add_argument("--force", action="store_true", help="replace what is there")


def answer(args: argparse.Namespace) -> Answer:
    if args.run is not None:
        raise NannyError("a snapshot holds all runs of the file; leave --run out")
    stores = reader.find_stores(args.db)
    to_folder = args.out.is_dir() or args.out.suffix == "" or len(stores) > 1
    if to_folder and args.out.is_file():
        raise NannyError(f"{args.out} is a file, and there are {len(stores)} files to copy; name a folder")
    targets = [args.out / store.name if to_folder else args.out for store in stores]
    for store, target in zip(stores, targets):
        if target.exists() and not args.force:
            raise NannyError(f"{target} exists; name another, or replace it with --force")
        if target.exists() and target.samefile(store):
            raise NannyError(f"{target} is the store itself; name another file")
    for store, target in zip(stores, targets):
        copy(store, target)
    sizes = [target.stat().st_size for target in targets]
    return Answer(
        lines=[Line(f"{target} ({size / 1e6:.1f} MB)") for target, size in zip(targets, sizes)],
        data={"files": [{"path": str(target), "bytes": size} for target, size in zip(targets, sizes)]},
        next=[f"nanny summary --db {args.out}"],
    )


def copy(store: Path, target: Path) -> None:
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
        source.execute("BEGIN")  # one state of the store, however long the copy takes
        source.execute("SELECT 1 FROM run").fetchone()
        source.backup(out, pages=PAGES)
        out.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise NannyError(f"cannot write {part}: {error}; name another place") from error
    finally:
        out.close()
