"""The runs below a folder, as the front page of `nanny ui` lists them: one entry for each job, newest first, with its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.finding import NannyError, severity_counts
from ..diagnose.verdict import Verdict
from ..runs.opening import open_job
from ..runs.summary import RankState, summarize
from ..show.spark import sparkline
from ..store import reader
from ..store.files import is_store_name, stores_below

LOSS_WIDTH = 16
StoredRun = tuple[Path, int]  # store, number of the run in it


@dataclass(frozen=True)
class Rank:
    """One process of a job, with the findings that it has on record itself."""

    store: Path
    run: reader.RunRow
    errors: int
    warnings: int

    @property
    def place(self) -> StoredRun:
        return self.store, self.run.id


@dataclass(frozen=True)
class Job:
    """A training run: its first process, which stands for it, and the verdict on all of them together."""

    ranks: tuple[Rank, ...]
    verdict: Verdict
    last_step: int | None = None
    loss: str = ""  # as a line of blocks

    @property
    def first(self) -> Rank:
        return self.ranks[0]

    @property
    def is_over(self) -> bool:
        return all(rank.run.status != "running" for rank in self.ranks)


def store_at(top: Path, key: str) -> Path | None:
    """The store of this key, without looking through the folder; None for anything that the list would not show."""
    if top.is_file():
        return top if key == top.name else None
    store = top / key
    inside = ".." not in Path(key).parts and store.parent.resolve().is_relative_to(top.resolve())
    return store if inside and is_store_name(store.name) and store.is_file() else None


def places_of_job(store: Path, run: int) -> list[StoredRun]:
    """The run itself and the other ranks of its job, if it is the one that stands for them in its folder."""
    try:
        with open_job(str(store.parent), run) as (sources, _):
            if sources[0].path == store:
                return [(source.path, source.run.id) for source in sources]
    except NannyError:  # another file of the folder cannot be read
        pass
    return [(store, run)]


def jobs_below(top: Path, known: dict[StoredRun, Job]) -> tuple[list[Job], list[str]]:
    """Jobs, newest first, and notes on files that cannot be read. `known` keeps those that can no longer change."""
    rows: dict[StoredRun, reader.RunRow] = {}
    notes = []
    for store in [top] if top.is_file() else stores_below(top):
        try:
            with reader.reading(store) as db:
                rows |= {(store, run.id): run for run in reader.runs(db)}
        except NannyError as error:
            notes.append(str(error))
    jobs = []
    taken: set[StoredRun] = set()
    for place in sorted(rows, key=lambda place: rows[place].rank):
        if place in taken:
            continue
        alone = rows[place].world_size == 1 or top.is_file()
        members = [p for p in ([place] if alone else places_of_job(*place)) if p in rows and p not in taken]
        taken.update(members)
        job = known.get(place) or _job(members, rows)
        if job.is_over:
            known[place] = job
        jobs.append(job)
    return sorted(jobs, key=lambda job: -job.first.run.started), notes


def _job(places: Sequence[StoredRun], rows: dict[StoredRun, reader.RunRow]) -> Job:
    store, number = places[0]
    try:
        with open_job(str(store.parent if len(places) > 1 else store), number) as (sources, _):
            summary = summarize(sources)
    except NannyError as error:
        ranks = tuple(Rank(store, rows[store, run], 0, 0) for store, run in places)
        return Job(ranks, Verdict(None, "NO VERDICT", str(error)))
    ranks = tuple(rank for state in summary.ranks if (rank := _rank(state)).place in places)
    steps = summary.lead.steps
    loss = summary.lead.curves.get("loss")
    drawn = "" if loss is None else sparkline(loss[1].tolist(), LOSS_WIDTH, log=_spans_orders(loss[1]))
    return Job(ranks, summary.verdict, steps[1] if steps else None, drawn)


def _spans_orders(values: np.ndarray) -> bool:
    known = values[np.isfinite(values) & (values > 0)]
    return len(known) > 0 and float(known.max() / known.min()) > 100


def _rank(state: RankState) -> Rank:
    counts = severity_counts(state.findings)
    return Rank(state.source.path, state.source.run, counts["error"], counts["warning"])
