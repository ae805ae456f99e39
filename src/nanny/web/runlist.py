"""The runs below a folder, as the front page of `nanny ui` lists them: one entry for each job, newest first, with its verdict."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..queries.source import open_job
from ..query import ask
from ..records import NannyError
from ..store import reader
from ..store.files import rank_of, stores_below


@dataclass(frozen=True)
class Entry:
    """A run of one process; `ranks` are those of the other processes that trained with it."""

    key: str  # the store's path as seen from the top folder: what addresses use
    store: Path
    run: reader.RunRow
    verdict: str = ""
    healthy: bool | None = None
    last_step: int | None = None
    culprit: dict[str, Any] | None = None
    ranks: tuple[Entry, ...] = ()

    @property
    def command(self) -> str:
        return shlex.join(self.run.argv)


def stores_of(top: Path) -> dict[str, Path]:
    """Key -> store, for a file or everything below a folder."""
    if top.is_file():
        return {top.name: top}
    return {store.relative_to(top).as_posix(): store for store in stores_below(top)}


def source_path(store: Path, run: int) -> Path:
    """What to open for a run: the folder where it brings the other ranks along, else the file alone."""
    try:
        with open_job(str(store.parent), run) as (sources, _):
            return store.parent if sources[0].path == store else store
    except NannyError:
        return store


def list_runs(top: Path, known: dict[tuple[Path, int], Entry]) -> tuple[list[Entry], list[str]]:
    """Jobs, the newest first, and notes on files that cannot be read. `known` keeps what can no longer change."""
    entries, notes = [], []
    for key, store in stores_of(top).items():
        try:
            with reader.reading(store) as db:
                runs = reader.runs(db)
        except NannyError as error:
            notes.append(str(error))
            continue
        for run in runs:
            entries.append(known.get((store, run.id)) or Entry(key, store, run))
    jobs = [_judged(job, known) for job in _jobs(entries)]
    return sorted(jobs, key=lambda entry: -entry.run.started), notes


def _jobs(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Ranks under the first of them: as `queries.source` sees them, those of a folder that were alive together."""
    taken: set[tuple[Path, int]] = set()
    by_place = {(entry.store, entry.run.id): entry for entry in entries}
    for entry in sorted(entries, key=lambda e: (e.run.rank, rank_of(e.store))):
        place = (entry.store, entry.run.id)
        if place in taken:
            continue
        taken.add(place)
        others: list[Entry] = []
        if entry.run.world_size > 1 and not entry.ranks:
            others = [by_place[other] for other in _same_job(entry) if other in by_place and other not in taken]
            taken |= {(other.store, other.run.id) for other in others}
        elif entry.ranks:
            taken |= {(other.store, other.run.id) for other in entry.ranks}
        yield replace(entry, ranks=tuple(others)) if others else entry


def _same_job(entry: Entry) -> list[tuple[Path, int]]:
    try:
        with open_job(str(entry.store.parent), entry.run.id) as (sources, _):
            if sources[0].path != entry.store:
                return []
            return [(source.path, source.run.id) for source in sources[1:]]
    except NannyError:
        return []


def _judged(entry: Entry, known: dict[tuple[Path, int], Entry]) -> Entry:
    if entry.verdict:
        return entry
    ranks = tuple(_judged(other, known) for other in entry.ranks)
    path = entry.store.parent if entry.ranks else entry.store
    try:
        answer, _ = ask(["summary", "--db", str(path), "--run", str(entry.run.id)])
    except NannyError as error:
        return replace(entry, verdict=str(error), ranks=ranks)
    data = answer.data
    steps = data["steps"]
    judged = replace(
        entry, verdict=data["verdict"], healthy=data["healthy"], culprit=data["culprit"], last_step=steps["last"] if steps else None,
        ranks=ranks,
    )  # fmt: skip
    if all(member.run.status != "running" for member in (judged, *ranks)):
        known[(entry.store, entry.run.id)] = judged
    return judged
