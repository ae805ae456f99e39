"""A run as csv, parquet or tensorboard files.

csv and parquet: scalars, findings, sites, and one table of statistics for each kind of site; parquet is a
dataset of all ranks (run=N/rank=N/kind=...), in a folder or behind a URL such as s3://bucket/runs, which
summary, alerts, diagnose and compare take as --db.
tensorboard: the scalars, the largest and the total of each kind, and the findings as text.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.finding import NannyError
from ..core.plain_json import to_text
from ..core.terminal import progress
from ..store import reader
from . import dataset
from .alerts import findings_of, job_verdict, repeats
from .source import Source
from .stats import stats_of

Rows = Iterator[tuple[Any, ...]]


def export_run(source: Source, folder: Path, form: str) -> list[tuple[str, int]]:
    """Writes the files and returns them with their numbers of rows."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {"csv": to_csv, "tensorboard": to_tensorboard}[form](source, folder)
    except OSError as error:
        raise NannyError(f"cannot write into {folder}: {error.strerror or error}; name another folder with -o") from error


def export_job(sources: Sequence[Source], url: str, number: int | None = None) -> list[tuple[str, int]]:
    """All ranks of a job into a dataset, as its run of this number (its own, unless told)."""
    number = sources[0].run.id if number is None else number
    written: list[tuple[str, int]] = []
    try:
        place = dataset.RemoteFolder(url)
        for source in sources:
            progress(f"rank {source.run.rank}")
            verdict = job_verdict([source], findings_of(source))
            written += dataset.write_rank(place, number, source, verdict, tables(source, in_dataset=True))
    except OSError as error:
        raise NannyError(f"cannot write into {url}: {error.strerror or error}; name another place with -o") from error
    return written


def tables(source: Source, in_dataset: bool = False) -> Iterator[tuple[str, list[str], Rows]]:
    """Name, columns and rows of each table, rows one at a time: a long run does not fit into memory.

    In a dataset, `rank` and `kind` are said by the folder.
    """
    db, run = source.db, source.run.id
    yield "scalars", ["name", "step", "value"], _scalar_rows(source)
    names = ["step", "severity", "code", "site", "value", "limit", "message", "hint", "times", "evidence", "file", "line"]
    names.insert(8, "seen_on" if in_dataset else "rank")
    yield "findings", names, _finding_rows(source)
    kinds = reader.kinds(db, run)
    sites = [(kind, i, site) for kind in kinds for i, site in enumerate(reader.sites(db, run, kind))]
    described = ((kind, i, site.name, site.dtype, to_text(site.shape, None)) for kind, i, site in sites)
    yield "sites", ["of" if in_dataset else "kind", "position", "name", "dtype", "shape"], described
    for kind in kinds:
        stats = stats_of(source, kind)
        if stats:
            yield f"stats_{kind}", ["step", "site", *stats], _sample_rows(source, kind, stats)


def to_csv(source: Source, folder: Path) -> list[tuple[str, int]]:
    written = []
    for name, columns, rows in tables(source):
        path = folder / f"{name}.csv"
        count = 0
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            for row in rows:
                writer.writerow(["" if value is None else value for value in row])
                count += 1
                if count % 1000 == 0:
                    progress(f"{path}: {count}")
        written.append((str(path), count))
    return written


def to_tensorboard(source: Source, folder: Path) -> list[tuple[str, int]]:
    """Event files by the tensorboard package itself: torch's writer would import torch."""
    names = ("summary_pb2", "event_pb2", "tensor_pb2", "types_pb2")
    found = [dataset.import_extra(f"tensorboard.compat.proto.{name}", "--format tensorboard") for name in names]
    proto, events, tensors, types = found
    files = dataset.import_extra("tensorboard.summary.writer.event_file_writer", "--format tensorboard")
    writer = files.EventFileWriter(str(folder), filename_suffix=f".nanny{source.run.id}")
    clock = _clock(source)
    count = 0
    for tag, step, value in _tensorboard_scalars(source):
        summary = proto.Summary(value=[proto.Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(events.Event(wall_time=clock(step), step=step, summary=summary))
        count += 1
    text = proto.SummaryMetadata(plugin_data=proto.SummaryMetadata.PluginData(plugin_name="text"))
    for finding in reader.findings(source.db, source.run.id):
        body = f"**{finding.severity.name} {finding.code}** {finding.site}: {finding.message}\n\n{finding.hint}".encode()
        tensor = tensors.TensorProto(dtype=types.DT_STRING, string_val=[body], tensor_shape={"dim": [{"size": 1}]})
        value = proto.Summary.Value(tag=f"findings/{finding.code}", metadata=text, tensor=tensor)
        step = finding.step or 0
        writer.add_event(events.Event(wall_time=clock(step), step=step, summary=proto.Summary(value=[value])))
        count += 1
    writer.close()
    return [(str(path), count) for path in sorted(folder.glob(f"*.nanny{source.run.id}"))]


def _scalar_rows(source: Source) -> Rows:
    for name in reader.scalar_names(source.db, source.run.id):
        for steps, values in reader.scalars(source.db, source.run.id, [name]).values():
            yield from ((name, step, value) for step, value in zip(steps.tolist(), values.tolist()))


def _finding_rows(source: Source) -> Rows:
    for f in findings_of(source):
        about = (f.step, f.severity.name, f.code, f.site, f.value, f.limit, f.message, f.hint, f.rank, repeats(f))
        yield *about, to_text(f.evidence, None), f.file, f.line


def _sample_rows(source: Source, kind: str, stats: Sequence[str]) -> Rows:
    """Only what was measured; a statistic that a step does not have is empty."""
    names = [site.name for site in source.sites(kind)]
    for step in reader.sample_steps(source.db, source.run.id, kind).tolist():
        sample = reader.sample_at(source.db, source.run.id, kind, step)
        if sample is None:  # damaged
            continue
        columns = [sample[stat].tolist() if stat in sample else [None] * len(sample["count"]) for stat in stats]
        for i in np.flatnonzero(sample["count"] > 0).tolist():
            yield step, names[i], *(column[i] for column in columns)


def _tensorboard_scalars(source: Source) -> Iterator[tuple[str, int, float]]:
    for name, step, value in _scalar_rows(source):
        yield f"nanny/{name}", step, value
    for kind in reader.kinds(source.db, source.run.id):
        steps, of = reader.statistics_of(source.db, source.run.id, kind, ("count", "norm", "min", "max"))
        count, norm, low, high = of.values()
        # A NaN stays a NaN; only what was not measured counts as nothing.
        squares = np.where(count > 0, norm.astype(np.float64) ** 2, 0.0).sum(axis=1)
        peaks = np.where(count > 0, np.maximum(np.abs(low), np.abs(high)), 0.0).max(axis=1, initial=0.0)
        for step, total, peak in zip(steps.tolist(), np.sqrt(squares).tolist(), peaks.tolist()):
            yield f"nanny/{kind}/total_norm", step, total
            yield f"nanny/{kind}/largest", step, peak


def _clock(source: Source) -> Any:
    """Time of a step: the start plus the durations on record up to it."""
    found = reader.scalars(source.db, source.run.id, ["step_ms"]).get("step_ms")
    if found is None:
        return lambda step: source.run.started
    steps, spent = found[0], np.cumsum(np.nan_to_num(found[1])) / 1000
    return lambda step: source.run.started + float(spent[max(int(np.searchsorted(steps, step, side="right")) - 1, 0)])
