"""Step records into the store: site numbers, packed samples, scalars. The monitor speaks in steps, the writer in rows."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..core.formats import ABOVE_BIN, BELOW_BIN, FINITE_BINS, HISTOGRAM_BINS, LAST_BIN
from ..core.step import (
    GRADIENT_STATS,
    SAMPLE_STATS,
    UPDATE_STATS,
    QuietSteps,
    RunInfo,
    Sample,
    Site,
    SiteTable,
    StepRecord,
    Update,
)
from ..store.packing import BITS, REDUCTION
from ..store.writer import RunWriter
from ..watch.ranks import has_group

EVERY_STEP_UNTIL = 10_000  # gradients of each step are kept this long, then of every tenth and around every error
THIN = 10
RING = 50


def run_info(trace_interval: int) -> RunInfo:
    """This process, as it introduces itself to the store."""
    together = has_group()
    return RunInfo(
        started=time.time(),
        argv=tuple(sys.argv),
        torch=torch.__version__,
        world_size=dist.get_world_size() if together else int(os.environ.get("WORLD_SIZE", "1") or 1),
        rank=dist.get_rank() if together else int(os.environ.get("RANK", "0") or 0),
        meta={"trace_interval": trace_interval, "threads": torch.get_num_threads(), "cuda": torch.cuda.is_available()},
    )


class RunRecording:
    """One run being recorded: its steps here, all else by the `writer` itself."""

    def __init__(self, folder: Path, info: RunInfo, on_warning: Callable[[str], None] | None = None) -> None:
        self.writer = RunWriter(folder, info, on_warning=on_warning)
        self._positions: dict[str, dict[str, int]] = {}
        self._last: dict[str, tuple[tuple[str, ...], Any]] = {}
        self._ring: deque[Sample] = deque(maxlen=RING)
        self._rank = info.rank
        self._held: Any = None  # what was said last of who holds which parameters
        self._amp = ""
        self.failed_with = ""

    def set_replicas(self, groups: Sequence[Sequence[int]], shards: Mapping[str, int]) -> None:
        """Ranks that hold the same parameters (the numbers of groups in the checksums count from 1), and parameters of which
        this rank has a part, with how many have the same part."""
        known = (tuple(groups), tuple(shards.items()))
        if known != self._held:
            self._held = known
            self.writer.set_meta(replicas=[list(ranks) for ranks in groups], shards=dict(shards))

    def add_step(self, step: StepRecord, scalars: Mapping[str, float], urgent: bool) -> None:
        self.writer.add_scalars(step.step, scalars)
        if step.amp_dtype and step.amp_dtype != self._amp:
            self._amp = step.amp_dtype
            self.writer.set_meta(amp_dtype=self._amp)
        if step.grads is not None:
            self._add_gradients(step, urgent)
        output_grads = None if step.output_grads is None else unscale(step.output_grads, step.scale)
        for kind, table in (
            ("output", step.outputs),
            ("output_grad", output_grads),
            ("weight", step.weights),
            ("buffer", step.buffers),
        ):
            if table is not None:
                self.writer.add_samples([self._sample(kind, step.step, table, SAMPLE_STATS + _of_ranks(table))])
        if step.updates and not step.skipped:
            self.writer.add_samples([self._sample("update", step.step, update_table(step.updates), UPDATE_STATS)])

    def add_quiet(self, quiet: QuietSteps, columns: Mapping[str, np.ndarray]) -> None:
        self.writer.add_curves(quiet.steps, columns)
        grads = quiet.last.grads
        assert grads is not None
        at = self._places("grad", grads)
        data = np.zeros((len(quiet), len(GRADIENT_STATS), len(self._positions["grad"])), dtype="<f4")
        with np.errstate(over="ignore"):
            for row, numbers in enumerate((grads.columns["count"], quiet.norms, quiet.low, quiet.high)):
                data[:, row, at] = numbers
        samples = [Sample("grad", step, GRADIENT_STATS, one.tobytes()) for step, one in zip(quiet.steps, data)]
        self.writer.add_samples([one for one in samples if _is_kept(one.step)])
        self._ring.extend(one for one in samples if not _is_kept(one.step))

    def _add_gradients(self, step: StepRecord, urgent: bool) -> None:
        assert step.grads is not None
        sample = self._sample("grad", step.step, step.grads, GRADIENT_STATS + _of_ranks(step.grads))
        if urgent:
            self.writer.add_samples(self._ring)
            self._ring.clear()
        if urgent or step.traced or _is_kept(step.step):
            self.writer.add_samples([sample])
        else:
            self._ring.append(sample)

    def _sample(self, kind: str, step: int, table: SiteTable, stats: tuple[str, ...]) -> Sample:
        at = self._places(kind, table)
        known = self._positions[kind]
        with np.errstate(over="ignore"):
            if isinstance(at, slice) and all(stat in table.columns for stat in stats):
                data = np.array([table.columns[stat] for stat in stats], dtype="<f4")
            else:
                data = np.zeros((len(stats), len(known)), dtype="<f4")
                for row, stat in enumerate(stats):
                    if stat in table.columns:
                        data[row, at] = table.columns[stat]
        histograms = b""
        if table.histograms is not None:
            packed = np.zeros((len(known), HISTOGRAM_BINS), dtype="<u2")
            packed[at] = np.minimum(table.histograms, 65535)
            histograms = packed.tobytes()
        return Sample(kind, step, stats, data.tobytes(), histograms)

    def _places(self, kind: str, table: SiteTable) -> Any:
        """The columns of these sites, most often those of the last time."""
        names, at = self._last.get(kind, ((), None))
        if names != table.names or at is None:
            known = self._positions.setdefault(kind, {})
            new = [i for i, name in enumerate(table.names) if name not in known]
            for i in new:
                known[table.names[i]] = len(known)
            if new:
                self.writer.add_sites([Site(kind, table.names[i], table.dtypes[i], table.shapes[i]) for i in new])
            at = np.array([known[name] for name in table.names], dtype=np.int64)
            if len(at) == len(known) and (at == np.arange(len(at))).all():
                at = slice(None)
            self._last[kind] = table.names, at
        return at

    def close(self, status: str, **meta: Any) -> None:
        if self.failed_with:
            meta["exception"] = self.failed_with
        try:
            self.writer.set_meta(**meta)
        finally:
            self.writer.close(status)


def _is_kept(step: int) -> bool:
    return step < EVERY_STEP_UNTIL or step % THIN == 0


def _of_ranks(table: SiteTable) -> tuple[str, ...]:
    """What is there for whoever compares the files of all ranks."""
    return tuple(name for name in (*BITS, *REDUCTION) if name in table.columns)


def update_table(updates: Sequence[Update]) -> SiteTable:
    """What a probed optimizer step did; a parameter whose learning rate is 0 was not meant to move, so nothing was measured."""
    rows = list({update.name: update for update in updates}.values())
    columns = {stat: np.array([getattr(update, stat) for update in rows], np.float64) for stat in UPDATE_STATS}
    columns["count"] *= [bool(update.lr) for update in rows]
    return SiteTable(tuple(u.name for u in rows), columns, tuple(u.dtype for u in rows), shapes=((),) * len(rows))


def unscale(table: SiteTable, scale: float | None) -> SiteTable:
    """Gradients that arrived multiplied by the loss scale, as they would be without: a run with a GradScaler compares with one
    that has none. A histogram moves by whole bins, so its scale must be a power of two (GradScaler's is)."""
    if not scale or scale == 1 or not math.isfinite(scale):
        return table
    columns = {name: column if name in _COUNTS else np.asarray(column) / scale for name, column in table.columns.items()}
    bits = math.frexp(scale)[1] - 1
    histograms = table.histograms if table.histograms is None or 2.0**bits != scale else _shift(table.histograms, -bits)
    return replace(table, columns=columns, histograms=histograms)


_COUNTS = ("count", "nan", "posinf", "neginf")


def _shift(histograms: np.ndarray, bits: int) -> np.ndarray:
    """The finite bins moved by `bits` binary orders; what leaves the range gathers in the bins below and above."""
    out = histograms.copy()
    out[:, list(FINITE_BINS)] = 0
    for index in FINITE_BINS:
        target = min(max(index + bits, BELOW_BIN), LAST_BIN) if index != ABOVE_BIN else ABOVE_BIN
        out[:, target] += histograms[:, index]
    return out
