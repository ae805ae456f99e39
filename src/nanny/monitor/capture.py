"""One step while it runs: a StepRecord that is being filled (its loss over all backward passes, its gradients), and the tensors
of numbers that are not on the host yet."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, cast

import numpy as np
from torch import Tensor

from ..core.step import BadCall, QuietSteps, SiteTable, StepRecord, whole_norm
from ..diagnose.first_nonfinite import is_bad_from_outside
from ..measure.rows import HostLayout, JoinedRead, PendingRows, RowBuffer, measured_lines
from ..measure.transfer import PendingRead
from ..store.packing import BITS, REDUCTION, pack_bits
from ..watch.tensors import gradient_of, is_readable
from .trace import OutputCall, StepTrace, growths_of
from .updates import UpdateProbe

Sites = list[tuple[str, str, tuple[int, ...]]]  # name, dtype, shape
SiteColumns = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, ...], ...]]  # the same, column by column
Scale = Tensor | float | None  # a number where the host has it
_GRAD, _IS_LEAF = (getattr(Tensor, name).__get__ for name in ("grad", "is_leaf"))
STATS = ("count", "min", "max", "norm", "mean")


@dataclass
class Bits:
    """A checksum per tensor, and its group of replicas."""

    sums: PendingRead
    groups: list[int]

    def columns(self) -> dict[str, Any]:
        return pack_bits(self.sums.arrays()[0], self.groups)


@dataclass
class GradientRead:
    """Gradients read at one moment, all times `scale` if that is given."""

    sites: SiteColumns
    counts: np.ndarray | None = None  # elements of each
    read: PendingRead | JoinedRead | None = None  # [3, n]: sum of squares, min, max
    rows: RowBuffer | None = None  # on traced steps, with histograms
    scale: Scale = None
    bits: Bits | None = None  # of many processes, on traced steps
    reduction: PendingRead | None = None  # likewise: [n, len(REDUCTION)]
    bad: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # position -> NaN, +Inf, -Inf, where they could be counted

    def table(self) -> SiteTable:
        """Of one that was on the host at once."""
        assert self.read is not None
        squares, low, high = self.read.arrays()[0]
        rest = np.zeros((4, len(low)))
        for i, numbers in self.bad.items():
            rest[1:, i] = numbers
        names, dtypes, shapes = self.sites
        columns = (self.counts, low, high, np.sqrt(squares), *rest)
        return SiteTable(names, dict(zip((*STATS, "nan", "posinf", "neginf"), columns)), dtypes, None, shapes)


@dataclass(frozen=True)
class KnownGradients:
    """Gradients that were read together on the host, as they were: the next step's are most often alike."""

    ids: list[int]  # of the parameters
    absent: list[bool]  # those that had none
    sites: SiteColumns
    names: frozenset[str]
    layout: HostLayout

    def gradients_of(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """Those of now, if they are alike; nothing is asked one by one in Python."""
        if self.ids != list(map(id, parameters)) or not all(map(_IS_LEAF, parameters)):
            return None
        grads = list(map(_GRAD, parameters))
        if list(map(operator.is_, grads, repeat(None))) != self.absent:
            return None
        if True in self.absent:
            grads = [grad for grad in grads if grad is not None]
        return grads if self.layout.fits(grads) else None


@dataclass
class StepCapture:
    """A step while it runs. What the host knows is written into `record` at once; numbers on the device wait for `finished`."""

    record: StepRecord
    started: float
    trace: StepTrace | None = None
    weights: tuple[Sites, RowBuffer] | None = None
    buffers: tuple[Sites, RowBuffer] | None = None
    reads: list[GradientRead] = field(default_factory=list)
    read: frozenset[str] = frozenset()  # names
    provisional: bool = False  # the reads were taken without knowing whether an optimizer would come
    losses: list[Tensor | float] = field(default_factory=list)
    windows: list[int] = field(default_factory=lambda: [0])  # where in `losses` those begin whose gradients add up
    updated: bool = False  # an optimizer was asked to step, of these parameters or of copies
    ended: bool = False  # the user's block is over: a backward from now on is somebody else's, unless none has come yet
    backward_scaled: bool = False
    unscaled: set[int] = field(default_factory=set)
    divided: set[int] = field(default_factory=set)  # of these, whose gradients wait for their update
    added_to: set[int] = field(default_factory=set)  # of those, to whose gradients a later backward has added scaled ones
    never_scaled: set[int] = field(default_factory=set)  # to whose gradients a loss has added that no scaler had multiplied
    spoilt: dict[int, str] = field(default_factory=dict)  # gradients that were not finite as backward began, and not cleared
    packed: bool = False  # somebody packs saved tensors: checkpointing, offloading
    graph: Any = None  # of the last loss; its nodes outlive backward, what they saved does not
    scale: Scale = None
    scale_after: Scale = None
    found_inf: list[Tensor] = field(default_factory=list)
    ran: bool = False
    stepped_by: set[int] = field(default_factory=set)
    probes: list[UpdateProbe] = field(default_factory=list)
    weight_bits: Bits | None = None
    synced: bool = True  # the last backward pass was not one that a rank makes for itself (`no_sync`)
    was_synced: bool = False  # one of them was not
    receives: bool = False  # what the model is given comes from another process: it is a later stage of a pipeline
    local: tuple[tuple[str, ...], list[tuple[str, Tensor]]] | None = None  # what `LocalGradients` saw
    is_quiet: bool = False  # all is on the host, and nothing is different from the step before
    _pending: dict[str, Any] = field(default_factory=dict)

    @property
    def backwards(self) -> int:
        return self.record.backwards

    def facts(self) -> dict[str, Any]:
        """What the host knows of the step so far, but for what always changes."""
        return {**vars(self.record), "step": 0, "seconds": 0.0, "loss": 0.0, "lr": 0.0}

    def quiet_numbers(self) -> tuple[float, float] | None:
        """Loss and gradient norm of a step all of which is on the host and in which nothing happened; None of any other."""
        record = self.record
        if self._pending or not self.reads or self.reads[0].bad or record.examined or record.skipped:
            return None
        loss, read = record.loss, self.reads[0].read
        if loss is None or read is None or record.scale_after not in (None, record.scale):
            return None
        return loss, math.sqrt(read.squares if isinstance(read, JoinedRead) else read.arrays()[0][0].sum())

    def begin_window(self, over: Sequence[Tensor]) -> bool:
        """Gradients of what comes next are not added to those that were there. Were these scaled ones on unscaled ones?"""
        if self.losses and self.windows[-1] != len(self.losses):
            self.windows.append(len(self.losses))
        return self.forget_gradients(over)

    @property
    def has_waiting(self) -> bool:
        """Gradients of which it matters whether they are used or cleared."""
        return bool(self.divided or self.spoilt or self.never_scaled)

    def unscale(self, parameters: Sequence[Tensor]) -> None:
        self.note_stale(parameters)
        keys = {id(p) for p in parameters}
        self.record.unscaled_again |= bool(self.added_to & keys)
        self.added_to -= keys
        self.unscaled |= keys
        self.divided |= keys

    def begin_backward(self, owners: Mapping[int, Callable[[], Tensor | None]], suspects: Mapping[int, str]) -> None:
        """`suspects`: parameters whose gradients were not finite in the step before."""
        for key, name in suspects.items() if not self.backwards else ():
            p = owners[key]()
            if p is not None and _is_spoilt(p):
                self.spoilt[key] = name
        for key in self.divided if self.backward_scaled else ():  # what was unscaled and waits gets scaled gradients on top
            p = owners[key]() if key in owners else None
            if p is not None and gradient_of(p) is not None:
                self.added_to.add(key)
        for key in tuple(self.never_scaled):  # cleared by hand
            p = owners[key]() if key in owners else None
            if p is None or gradient_of(p) is None:
                self.never_scaled.discard(key)
        self.record.backwards += 1

    def note_stale(self, parameters: Sequence[Tensor]) -> None:
        """They are about to be used: gradients that were not finite before backward began, and not cleared since?"""
        if self.spoilt:
            held = [p for p in parameters if id(p) in self.spoilt and _is_spoilt(p)]
            self.record.stale += tuple(name for p in held if (name := self.spoilt[id(p)]) not in self.record.stale)

    def forget_gradients(self, parameters: Iterable[Tensor]) -> bool:
        """Their gradients are used or cleared. Whether some of them were a mixture of scaled and unscaled ones."""
        keys = {id(p) for p in parameters} if self.has_waiting else set()
        self.spoilt = {key: name for key, name in self.spoilt.items() if key not in keys}
        mixed = bool(self.added_to & keys)
        self.divided -= keys
        self.added_to -= keys
        self.never_scaled -= keys
        return mixed

    def _loss(self, losses: Sequence[float]) -> float | None:
        """What the gradients of an update are the gradients of: the sum over micro-batches, which are divided by their number
        beforehand. Of several updates, or without any, the average."""
        if not losses:
            return None
        if not self.updated:
            return sum(losses) / len(losses)
        windows = [losses[a:b] for a, b in zip(self.windows, [*self.windows[1:], len(losses)]) if a < b]
        return sum(map(sum, windows)) / len(windows)

    def start_reading(self) -> None:
        """Starts every copy to the host; nothing waits."""
        if self._is_on_host:
            self.record.loss = self._loss(cast(list[float], self.losses))
            self.record.scale, self.record.scale_after = cast(float | None, self.scale), cast(float | None, self.scale_after)
            return
        pending: dict[str, Any] = {
            "numbers": PendingRead([self.scale, self.scale_after, *(r.scale for r in self.reads), *self.losses, *self.found_inf]),
            "grads": [r.read or (r.rows.start_read() if r.rows is not None else None) for r in self.reads],
            "probes": [p.start_read() for p in self.probes],
            "bits": [
                *(b.sums for b in (self.weight_bits, *(r.bits for r in self.reads)) if b is not None),
                *(r.reduction for r in self.reads if r.reduction is not None),
            ],
            "local": PendingRead([total for _, total in self.local[1]] if self.local is not None else []),
        }
        for kind, measured in (("weights", self.weights), ("buffers", self.buffers)):
            pending[kind] = measured[1].start_read() if measured is not None else None
        pending["trace"] = self.trace.rows.start_read() if self.trace is not None else None
        self._pending = pending

    @property
    def _is_on_host(self) -> bool:
        """All of it: the step was not traced, nothing was probed, and gradients were read once, if at all, and unscaled."""
        if self.trace is not None or self.weights is not None or self.buffers is not None or isinstance(self.scale, Tensor):
            return False
        if self.found_inf or self.probes or self.local is not None or len(self.reads) > 1 or isinstance(self.scale_after, Tensor):
            return False
        if any(one.read is None or one.scale is not None or not one.read.is_on_host for one in self.reads):
            return False
        return all(type(loss) is float for loss in self.losses)

    def ready(self) -> bool:
        p = self._pending
        if not p:
            return True
        parts = [p["numbers"], *p["grads"], *p["probes"], *p["bits"], p["local"], p["weights"], p["buffers"], p["trace"]]
        return all(part is None or part.ready() for part in parts)

    def finish(self) -> StepRecord:
        """The record with everything that was on the device."""
        p, record, trace = self._pending, self.record, self.trace
        if not p:
            record.grads = self.reads[0].table() if self.reads else None
            return record
        record.scale, record.scale_after, *numbers = p["numbers"].numbers()
        scales, others = numbers[: len(self.reads)], numbers[len(self.reads) :]
        losses, found = others[: len(self.losses)], others[len(self.losses) :]
        record.loss = self._loss(losses)
        record.skipped = record.skipped or any(f > 0 for f in found)
        record.grads = self._gradients(scales)
        record.weights = _table(self.weights, p["weights"], self.weight_bits)
        record.buffers = _table(self.buffers, p["buffers"])
        record.updates = tuple(u for probe, read in zip(self.probes, p["probes"]) for u in probe.updates(read))
        if trace is not None:
            values, histograms = p["trace"].table()
            record.outputs, record.output_grads = _outputs(trace, values, histograms)
            record.bad_calls = (*trace.bad, *late_bad_calls(trace.calls, values, record.weights))
            record.growths = tuple(growths_of(trace.calls[: trace.first_pass], values))
            zeros = (*trace.zero_outputs, *late_zero_outputs(trace.calls, values, record.weights))
            record.zero_outputs = tuple(dict.fromkeys(zeros))
            record.called = frozenset(trace.called)
            record.amp_dtype = trace.amp[1] if trace.amp is not None else ""
        self._tell_ranks_apart(p["local"].numbers())
        return record

    def _tell_ranks_apart(self, sums: Sequence[float | None]) -> None:
        """Whose gradients were bad before they were reduced over all processes, and who was given bad numbers by another."""
        record = self.record
        if self.receives and is_bad_from_outside(record):
            record.from_others = True
            return
        if self.local is None or record.grads is None or not record.grads.bad:
            return
        known, late = self.local
        record.local_bad = (*known, *(name for (name, _), total in zip(late, sums) if not math.isfinite(total or 0.0)))
        own_loss = record.loss is None or math.isfinite(record.loss)
        record.from_others = own_loss and not record.local_bad and not record.bad_calls
        if record.from_others:
            record.singular = None

    def _gradients(self, scales: Sequence[float | None]) -> SiteTable | None:
        if not self.reads:
            return None
        columns: list[np.ndarray] = []
        histograms: list[np.ndarray] = []
        for one, pending, scale in zip(self.reads, self._pending["grads"], scales):
            divide = 1.0 if scale is None else scale
            if isinstance(pending, PendingRows):
                (count, low, high, squares, total), histogram = pending.table()
                if histogram is not None and divide == 1.0:
                    histograms.append(histogram)
            else:
                (squares, low, high), count, total = pending.arrays()[0], one.counts, None
            block = np.zeros((8, len(count)))
            block[0], block[1], block[2] = count, low, high
            np.sqrt(squares, out=block[3], casting="same_kind")
            if total is not None or divide != 1.0:
                block[4] = 0.0 if total is None else total
                with np.errstate(invalid="ignore"):
                    block[1:5] /= divide
                    block[4] /= block[0]
            for i, numbers in one.bad.items():
                block[5:, i] = numbers
            columns.append(block)
        whole = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
        complete = len(histograms) == len(self.reads)
        if len(self.reads) == 1:
            names, dtypes, shapes = self.reads[0].sites
        else:
            names, dtypes, shapes = (tuple(chain.from_iterable(parts)) for parts in zip(*(one.sites for one in self.reads)))
        bits = [one.bits.columns() for one in self.reads if one.bits is not None]
        compared = {name: np.concatenate([b[name] for b in bits]) for name in BITS} if len(bits) == len(self.reads) else {}
        reduced = [one.reduction.arrays()[0] for one in self.reads if one.reduction is not None]
        if len(reduced) == len(self.reads):
            compared |= dict(zip(REDUCTION, np.concatenate(reduced).T))
        return SiteTable(
            names,
            dict(zip((*STATS, "nan", "posinf", "neginf"), whole)) | compared,
            dtypes,
            np.concatenate(histograms) if complete else None,
            shapes,
        )


def _is_spoilt(parameter: Tensor) -> bool:
    grad = gradient_of(parameter)
    return grad is not None and is_readable(grad) and not bool(grad.isfinite().all())


def quiet_steps(captures: Sequence[StepCapture]) -> QuietSteps | None:
    """Steps in a row in which nothing happened, as columns; None if they do not go together."""
    reads = [capture.reads[0] for capture in captures]
    if any(one.sites is not reads[0].sites for one in reads):
        return None
    joined = [one.read for one in reads if isinstance(one.read, JoinedRead)]
    if len(joined) == len(reads):
        packed = measured_lines(joined)
    else:
        packed = np.stack([one.read.arrays()[0] for one in reads if one.read is not None])
    squares, low, high = packed.swapaxes(0, 1)
    rates = [capture.record.lr for capture in captures]
    if not (squares.min() > 0 and squares.max() < np.inf) or len({rate is None for rate in rates}) > 1:
        return None
    norms = np.sqrt(squares)
    return QuietSteps(
        captures[-1].finish(),
        [capture.record.step for capture in captures],
        np.array([capture.record.seconds for capture in captures]),
        np.array([capture.record.loss for capture in captures]),
        None if rates[0] is None else np.array(rates, dtype=np.float64),
        low,
        high,
        norms,
        np.array([whole_norm(row) for row in norms]),
    )


def _outputs(trace: StepTrace, values: Any, histograms: Any) -> tuple[SiteTable | None, SiteTable | None]:
    """One row per site: calls of the same module are put together (counts and squares add, the worst bound stands)."""
    forward: dict[str, tuple[str, tuple[int, ...], list[int]]] = {}
    backward: dict[str, tuple[str, tuple[int, ...], list[int]]] = {}
    for call in trace.calls:
        forward.setdefault(call.site, (call.dtype, call.shape, []))[2].append(call.output)
        if call.gradient:
            backward.setdefault(call.site, (call.gradient_dtype[0], call.shape, []))[2].append(call.gradient[0])
    return _combine(forward, values, histograms), _combine(backward, values, histograms)


def late_bad_calls(calls: Sequence[OutputCall], values: Any, weights: SiteTable | None) -> Iterator[BadCall]:
    """Calls whose output could not be looked at when it passed (an accelerator), judged from the rows on the host."""
    _, low, high, _, _ = values
    bad_weights = [] if weights is None else _bad_names(weights)
    for call in calls:
        if call.inputs is None or (np.isfinite(low[call.output]) and np.isfinite(high[call.output])):
            continue
        nan = bool(np.isnan(low[call.output]))
        inputs = list(call.inputs)
        sizes = np.maximum(np.abs(low[inputs]), np.abs(high[inputs]))
        yield BadCall(
            site=call.site,
            module=call.module,
            dtype=call.dtype,
            nan=int(nan),
            posinf=int(high[call.output] == np.inf),
            neginf=int(low[call.output] == -np.inf),
            count=int(values[0][call.output]),
            counted=False,
            inputs_clean=bool(np.all((low[inputs] == low[inputs]) & (high[inputs] < np.inf))),
            has_parameters=call.has_parameters,
            bad_parameters=tuple(n.rpartition(".")[2] for n in bad_weights if n.rpartition(".")[0] == call.site),
            input_absmax=float(np.max(sizes[np.isfinite(sizes)], initial=0.0)),
        )


def late_zero_outputs(calls: Sequence[OutputCall], values: Any, weights: SiteTable | None) -> Iterator[str]:
    _, low, high, _, _ = values
    zero_weights = set()
    if weights is not None:
        zero_weights = {n.rpartition(".")[0] for n, x in zip(weights.names, weights.columns["norm"]) if x == 0}
    for call in calls:
        if call.inputs is None or call.dtype != "float16" or call.site in zero_weights:
            continue
        if low[call.output] == 0 == high[call.output] and any(low[i] < 0 < high[i] for i in call.inputs):
            yield call.site


def _bad_names(table: SiteTable) -> list[str]:
    low, high = table.columns["min"], table.columns["max"]
    return [n for n, a, b in zip(table.names, low, high) if not (np.isfinite(a) and np.isfinite(b))]


def _combine(sites: dict[str, tuple[str, tuple[int, ...], list[int]]], values: Any, histograms: Any) -> SiteTable | None:
    if not sites:
        return None
    first = [rows[0] for _, _, rows in sites.values()]
    count, low, high, squares, total = values[:, first]
    with np.errstate(invalid="ignore", divide="ignore"):
        columns = np.stack([count, low, high, np.sqrt(squares), np.where(count > 0, total / count, 0.0)])
    counted = None if histograms is None else histograms[first]
    for i, (_, _, rows) in enumerate(sites.values()):
        if len(rows) == 1:
            continue
        count, low, high, squares, total = values[:, rows]
        n = count.sum()
        with np.errstate(invalid="ignore"):
            columns[:, i] = n, low.min(), high.max(), np.sqrt(squares.sum()), total.sum() / n if n else 0.0
        if counted is not None:
            counted[i] = histograms[rows].sum(axis=0)
    dtypes, shapes, _ = zip(*sites.values())
    return SiteTable(tuple(sites), dict(zip(STATS, columns)), dtypes, counted, shapes)


def _table(measured: tuple[Sites, RowBuffer] | None, pending: PendingRows | None, bits: Bits | None = None) -> SiteTable | None:
    if measured is None or pending is None or not measured[0]:
        return None
    (count, low, high, squares, total), histograms = pending.table()
    with np.errstate(invalid="ignore", divide="ignore"):
        columns = {
            "count": count,
            "min": low,
            "max": high,
            "norm": np.sqrt(squares),
            "mean": np.where(count > 0, total / count, 0.0),
        }
    if bits is not None:
        columns |= bits.columns()
    _, dtypes, shapes = zip(*measured[0])
    return SiteTable(names_of(measured[0]), columns, dtypes, histograms, shapes)


def names_of(sites: Sites) -> tuple[str, ...]:
    return tuple(name for name, _, _ in sites)
