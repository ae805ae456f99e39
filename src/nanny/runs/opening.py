"""Opens the run that a question is about, or all ranks of its job: a store of its own, or a dataset of many ranks.

Every question of this room takes an open run, so all answers given inside one `open_run` or `open_job` are of one moment,
whatever training adds meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..core.finding import NannyError
from ..store.damage import Damage
from ..store.files import find_stores
from ..store.reader import RunRow, one_moment, pick_run, reading, runs
from .dataset import is_dataset, open_dataset
from .source import MOST_DIGITS, Source

SLOW_START = 600.0  # seconds that ranks of one job may start apart


@contextlib.contextmanager
def open_run(db_path: str | None, number: int | None, *, live: bool = False, damage: Damage | None = None) -> Iterator[Source]:
    """The run of this number, or the newest, in the first store that the path leads to; `live` sees what is added later.

    A damaged store is an error, unless `damage` is given to note it in: then what can be read is.
    """
    _check_number(number)
    if is_dataset(db_path):
        with _open_ranks(db_path, number, only_first=True) as sources:
            yield sources[0]
        return
    path = find_stores(db_path)[0]
    with reading(path, damage) as db, contextlib.nullcontext() if live else one_moment(db):
        yield Source(path, db, pick_run(db, number), _flags(db_path, number))


def _check_number(number: int | None) -> None:
    if number is not None and abs(number) >= 10**MOST_DIGITS:
        raise NannyError("there is no run of a number with so many digits; `nanny runs` lists the runs")


@contextlib.contextmanager
def open_named(
    text: str, db_path: str | None, beside: Sequence[Source] = (), damage: Damage | None = None
) -> Iterator[list[Source]]:
    """`3` is a run of the store at hand; anything else is a path, with `:3` after it or not. With the other ranks of its job.

    `beside` are the open ranks of a run of the stores at hand: then `3` is read through their connections, of their moment.
    """
    path, colon, number = text.rpartition(":")
    for digits in (text, number):
        if digits.isdecimal():
            _check_number(int(digits[: MOST_DIGITS + 1]))
    if text.isdecimal() and beside:
        lead = Source(beside[0].path, beside[0].db, pick_run(beside[0].db, int(text)), _flags(db_path, int(text)))
        yield [lead, *(one for other in beside[1:] if (one := _of_same_job(lead, other.path, other.db)) is not None)]
        return
    if text.isdecimal():
        target: tuple[str | None, int | None] = (db_path, int(text))
    elif colon and number.isdecimal() and path:
        target = (path, int(number))
    else:
        target = (text, None)
    with open_compared(*target, damage=damage) as sources:
        yield sources


@contextlib.contextmanager
def open_compared(db_path: str | None, number: int | None, damage: Damage | None = None) -> Iterator[list[Source]]:
    """The ranks of a run, to be compared with those of another; of a dataset the lowest, with the loss of all."""
    if is_dataset(db_path):
        _check_number(number)
        with _open_ranks(db_path, number, only_first=True) as sources:
            yield sources
        return
    with open_job(db_path, number, damage) as (sources, _):
        yield sources


@contextlib.contextmanager
def open_job(db_path: str | None, number: int | None, damage: Damage | None = None) -> Iterator[tuple[list[Source], list[str]]]:
    """The run as above, then the runs of the other ranks that trained with it; and notes on ranks that cannot be read.

    Ranks write a file each. Runs in them belong together if they are of the same size of job, were alive at the same time (give
    or take a slow start) and no other run of the first store started closer.
    """
    _check_number(number)
    if is_dataset(db_path):
        with _open_ranks(db_path, number) as sources:
            yield sources, []
        return
    first, *others = find_stores(db_path)
    with contextlib.ExitStack() as stack:
        db = _enter(stack, first, damage)
        run = pick_run(db, number)
        sources = [Source(first, db, run, _flags(db_path, number))]
        notes = []
        if run.world_size > 1 and db_path is not None and Path(db_path).is_file():
            beside = [path for path in find_stores(first.parent) if not path.samefile(first)]
            if run.rank == 0:
                others = beside  # the file that a run names stands for all of its ranks
            elif beside:
                notes.append(
                    f"this is rank {run.rank} of {run.world_size} alone; all of them: --db {shlex.quote(str(first.parent))}"
                )
        for path in others if run.world_size > 1 else []:
            try:
                member = _of_same_job(sources[0], path, _enter(stack, path, damage))
            except NannyError as error:
                notes.append(str(error))
                continue
            if member is not None and member.run.rank not in {source.run.rank for source in sources}:
                sources.append(member)
        yield sources, notes


@contextlib.contextmanager
def _open_ranks(url: str, number: int | None, only_first: bool = False) -> Iterator[list[Source]]:
    with open_dataset(url, number, only_first) as (opened, found), contextlib.ExitStack() as stack:
        sources = []
        for path, run in opened.stores.values():
            db = _enter(stack, path, None)
            sources.append(Source(path, db, pick_run(db, run), _flags(url, found), url))
        sources[0] = replace(sources[0], elsewhere=opened.elsewhere, ranks_in_dataset=opened.ranks, loss_of_all=opened.loss)
        yield sources


def _enter(stack: contextlib.ExitStack, path: Path, damage: Damage | None) -> sqlite3.Connection:
    db = stack.enter_context(reading(path, damage))
    stack.enter_context(one_moment(db))
    return db


def _of_same_job(lead: Source, path: Path, other: sqlite3.Connection) -> Source | None:
    starts = [row.started for row in runs(lead.db)]
    members = [row for row in runs(other) if _together(lead.run, row) and _nearest(starts, row.started) == lead.run.started]
    if not members:
        return None
    member = pick_run(other, members[-1].id)
    return Source(path, other, member, f" --db {shlex.quote(str(path))} --run {member.id}")


def _together(run: RunRow, other: RunRow) -> bool:
    same_job = other.world_size == run.world_size and other.rank != run.rank
    return same_job and other.started <= _end(run) + SLOW_START and run.started <= _end(other) + SLOW_START


def _nearest(starts: list[float], start: float) -> float:
    return min(starts, key=lambda other: abs(other - start))


def _end(run: RunRow) -> float:
    return math.inf if run.finished is None else run.finished


def _flags(db_path: str | None, number: int | None) -> str:
    return (f" --db {shlex.quote(db_path)}" if db_path else "") + (f" --run {number}" if number else "")
