"""Many ranks as one dataset of parquet files, on a disk or in an object store: `nanny export --format parquet`.

    run=3/rank=7/kind=findings/part.parquet     also: run, scalars, sites, moments, checksums, stats_grad, ...
    run=3/rank=7/kind=store/metrics.db          the rank's own file

What all ranks must be asked for (who was first, who differs) DuckDB answers from the tables, without opening the rank files. The
few ranks that matter are then opened as they were recorded, so every answer comes from the functions that answer for one file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ..core.finding import Finding, NannyError, Severity
from ..diagnose.verdict import first_culprit
from ..store import reader
from ..store.encode import from_json, to_json
from ..store.files import store_name
from .alerts import sort_by_step
from .ranks import moments
from .snapshot import copy_store
from .source import Source

MOST_APART = 8  # ranks that differ are opened, at most
ROWS_AT_ONCE = 50_000  # of a table, in memory
MEMORY = "700MB"  # that DuckDB may take; then it goes to the disk

_TEXT, _WHOLE, _REAL = "string", "int64", "float64"
RUN = {
    "id": _WHOLE, "started": _REAL, "finished": _REAL, "argv": _TEXT, "torch": _TEXT, "world_size": _WHOLE, "amp_dtype": _TEXT,
    "status": _TEXT, "dropped": _WHOLE, "meta": _TEXT, "first_step": _WHOLE, "last_step": _WHOLE,
    "verdict": _TEXT, "cause": _TEXT, "culprit": _TEXT, "bad_step": _WHOLE,
}  # fmt: skip
MOMENT = {"step": _WHOLE, "of": _WHOLE, "updates": _WHOLE, "replicas": _WHOLE}  # of which group: its first rank
MOMENTS = {**MOMENT, "sum": _WHOLE}  # of all parameters: alike on all ranks, no parameter has to be looked at
CHECKSUMS = {**MOMENT, "parameter": _TEXT, "sum": _WHOLE}


@dataclass(frozen=True)
class OpenDataset:
    """The ranks of a dataset that matter, as files on this disk, and what the others have found."""

    stores: Mapping[int, tuple[Path, int]]  # rank -> file, number of the run in it
    elsewhere: tuple[Finding, ...]  # of ranks that are not among them
    ranks: int  # in the dataset
    loss: tuple[np.ndarray, np.ndarray] | None = None  # if only the lowest rank was asked for: steps, average over all ranks


def is_dataset(path: str | None) -> TypeGuard[str]:
    """A URL, or a folder of `run=N` folders."""
    if path is None:
        return False
    return "://" in path or any(folder.is_dir() for folder in Path(path).glob("run=*"))


def part_path(number: int, rank: int | str, kind: str, file: str = "part.parquet") -> str:
    return f"run={number}/rank={rank}/kind={kind}/{file}"


class RemoteFolder:
    """A folder or a URL, by fsspec."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.fs, self.root = import_extra("fsspec.core").url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise NannyError(f"{url} cannot be opened: {error}") from error

    def numbers(self) -> list[int]:
        """Of its runs."""
        return self._numbers_in(self.root, "run=")

    def ranks(self, number: int) -> list[int]:
        return self._numbers_in(f"{self.root}/run={number}", "rank=")

    def _numbers_in(self, folder: str, key: str) -> list[int]:
        names = [path.rstrip("/").rpartition("/")[2] for path in self.paths_in(folder)]
        return sorted(int(name[len(key) :]) for name in names if name.startswith(key) and name[len(key) :].isdecimal())

    def paths_in(self, path: str) -> list[str]:
        try:
            return [str(name) for name in self.fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:  # the latter: an address that only whoever goes there takes apart
            raise NannyError(f"{self.url} cannot be read: {error}") from error

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        path = f"{self.root}/{name}"
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self.fs.open(path, "wb") as file:
            yield file

    def fetch(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.fs.get_file(f"{self.root}/{name}", str(target))
        except OSError as error:
            raise NannyError(f"{self.url}/{name} cannot be read: {error}; export that rank again") from error


class Tables:
    """The parquet tables of one run, asked by SQL."""

    def __init__(self, place: RemoteFolder, number: int) -> None:
        self._place, self._number = place, number
        self._errors = import_extra("duckdb").Error
        self._db = import_extra("duckdb").connect(config={"memory_limit": MEMORY, "preserve_insertion_order": "false"})
        self._root = place.root
        if "file" not in place.fs.protocol and place.fs.protocol != "file":
            self._db.register_filesystem(place.fs)
            self._root = place.fs.unstrip_protocol(place.root)

    def ask(self, select: str, kind: str, rest: str = "", *values: object) -> list[tuple[Any, ...]]:
        """`SELECT select FROM all ranks' tables of this kind rest`; nothing if no rank has one."""
        files = f"{self._root}/{part_path(self._number, '*', kind)}"
        try:
            query = f"SELECT {select} FROM read_parquet(?, hive_partitioning = true) {rest}"
            return list(self._db.execute(query, [files, *values]).fetchall())
        except self._errors as error:
            if "No files found" in str(error):
                return []
            raise NannyError(f"{self._place.url} cannot be read: {str(error).splitlines()[0]}; export it again") from error

    def close(self) -> None:
        self._db.close()


def write_rank(
    place: RemoteFolder, number: int, source: Any, verdict: Any, tables: Iterable[tuple[str, list[str], Any]]
) -> list[tuple[str, int]]:
    """The tables of one rank and its own file."""
    rank = source.run.rank
    written = []
    steps = reader.steps(source.db, source.run.id) or (None, None)
    cause = verdict.diagnosis
    told = (cause.cause, cause.culprit, cause.step) if cause else ("", "", verdict.first.step if verdict.first else None)
    run = source.run
    about = (run.id, run.started, run.finished, json.dumps(run.argv), run.torch, run.world_size, run.amp_dtype, run.status,
             run.dropped, to_json(run.meta), *steps, verdict.text, *told)  # fmt: skip
    own: list[tuple[str, Mapping[str, str], Iterator[tuple[Any, ...]]]] = [
        ("run", RUN, iter([about])),
        ("moments", MOMENTS, sums_of_moments(checksums(source))),
        ("checksums", CHECKSUMS, checksums(source)),
    ]
    own += [(name, {column: column_type(column) for column in columns}, rows) for name, columns, rows in tables]
    for kind, columns, rows in own:
        name = part_path(number, rank, kind)
        count = _write_table(place, name, columns, rows)
        written += [(name, count)] if count else []
    name = part_path(number, rank, "store", "metrics.db")
    with tempfile.TemporaryDirectory() as folder, place.writing(name) as file:
        copy = Path(folder) / "metrics.db"
        copy_store(source.path, copy)
        file.write(copy.read_bytes())
    return [*written, (name, 1)]


def _write_table(place: RemoteFolder, name: str, columns: Mapping[str, str], rows: Iterator[tuple[Any, ...]]) -> int:
    """The number of its rows; a table without any is not written."""
    arrow, parquet = import_extra("pyarrow"), import_extra("pyarrow.parquet")
    schema = arrow.schema([(column, getattr(arrow, kind)()) for column, kind in columns.items()])
    count = 0
    with contextlib.ExitStack() as stack:
        writer = None
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            if writer is None:
                file = stack.enter_context(place.writing(name))
                writer = stack.enter_context(parquet.ParquetWriter(file, schema))
            writer.write_table(arrow.table([list(values) for values in zip(*batch)], schema=schema))
            count += len(batch)
    return count


def checksums(source: Source) -> Iterator[tuple[Any, ...]]:
    """What tells replicas apart: a row per parameter that is to be compared, of each traced step."""
    groups = [min(ranks) for ranks in source.run.meta.get("replicas") or ()]
    for moment in moments(source):
        for name, (word, group) in moment.sums.items():
            if 0 < group <= len(groups):
                yield moment.step, moment.kind, moment.updates, groups[group - 1], name, int(np.uint64(word).view(np.int64))


def sums_of_moments(rows: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """One checksum of all that a rank shares with the same replicas at one moment, from those of its parameters."""
    from hashlib import blake2b  # 3 ms, and most runs have one rank

    for _, same_time in groupby(rows, lambda row: row[:3]):
        of_group: dict[tuple[int, ...], Any] = {}
        for *moment, name, word in same_time:
            of_group.setdefault(tuple(moment), blake2b(digest_size=8)).update(f"{name}\0{word}\0".encode())
        for at, digest in of_group.items():
            yield *at, int.from_bytes(digest.digest(), "little", signed=True)


@contextlib.contextmanager
def open_dataset(url: str, number: int | None, only_first: bool = False) -> Iterator[tuple[OpenDataset, int]]:
    """The ranks that matter: the lowest, the one that was first in trouble, and those that differ from the others."""
    place = RemoteFolder(url)
    known = place.numbers()
    if not known:
        raise NannyError(f"{url} holds no runs; write one with `nanny export --format parquet -o {url}`")
    if number is not None and number not in known:
        raise NannyError(f"{url} has no run {number}; it has {', '.join(map(str, known))}")
    number = known[-1] if number is None else number
    with contextlib.closing(Tables(place, number)) as tables, tempfile.TemporaryDirectory() as folder:
        ranks = place.ranks(number)
        found = [] if only_first else all_findings(tables)
        wanted = {min(ranks, default=0)}
        if not only_first:
            first = first_culprit(sort_by_step(found))
            wanted |= {*_ranks_that_differ(tables), *([] if first is None or first.rank is None else [first.rank])}
        stores = {}
        for rank, number_there in sorted(tables.ask("rank, id", "run", f"WHERE rank IN ({', '.join(map(str, wanted))})")):
            target = Path(folder) / str(rank) / store_name(rank)
            place.fetch(part_path(number, rank, "store", "metrics.db"), target)
            stores[rank] = (target, number_there)
        if not stores:
            raise NannyError(f"{url} has no ranks of run {number}; export it again")
        others = tuple(finding for finding in found if finding.rank not in stores)
        loss = tables.ask("step, avg(value)", "scalars", "WHERE name = 'loss' GROUP BY step ORDER BY step") if only_first else []
        average = (np.array([step for step, _ in loss]), np.array([value for _, value in loss], float)) if loss else None
        yield OpenDataset(stores, others, len(ranks), average), number


def all_findings(tables: Tables) -> list[Finding]:
    columns = 'rank, step, severity, code, site, value, "limit", message, hint, file, line, evidence'
    rows = tables.ask(columns, "findings", "ORDER BY rank, step NULLS FIRST")
    return [
        Finding(
            code, Severity[severity], message, hint, site, step, int(rank), file or "", line,
            value=value, limit=limit, evidence=from_json(evidence),
        )
        for rank, step, severity, code, site, value, limit, message, hint, file, line, evidence in rows
    ]  # fmt: skip


def _ranks_that_differ(tables: Tables) -> list[int]:
    """Ranks whose checksum is not that of most replicas, at the first step where there are such, and two that have it."""
    if not tables.ask("step", "moments", f"GROUP BY {', '.join(MOMENT)} HAVING min(sum) <> max(sum) LIMIT 1"):
        return []
    key = "step, of, updates, parameter, replicas"
    rest = f"GROUP BY {key} HAVING min(sum) <> max(sum) ORDER BY step, of LIMIT 1"
    for first in tables.ask(key, "checksums", rest):
        where = "WHERE step = ? AND of = ? AND updates = ? AND parameter = ? AND replicas = ? ORDER BY rank"
        sums = {int(rank): value for rank, value in tables.ask("rank, sum", "checksums", where, *first)}
        usual = Counter(sums.values()).most_common(1)[0][0]
        most = [rank for rank, value in sums.items() if value == usual]
        return [*most[:2], *[rank for rank, value in sums.items() if value != usual][:MOST_APART]]
    return []


def column_type(column: str) -> str:
    if column in ("step", "position", "seen_on", "line"):
        return _WHOLE
    text = ("name", "severity", "code", "site", "message", "hint", "evidence", "of", "dtype", "shape", "file")
    return _TEXT if column in text else _REAL


def import_extra(name: str, what: str = "a dataset of parquet files") -> Any:
    """A module of a package that is not always there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        extra = "fleet" if package == "duckdb" else "export"
        install = f"pip install 'precision-nanny[{extra}]'"
        raise NannyError(f"{what} needs the package {package}; install it with {install}") from error
