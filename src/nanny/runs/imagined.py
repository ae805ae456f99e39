"""A recorded run imagined in another format: what is read from the store, and the verdict on the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.finding import NannyError, Severity
from ..core.formats import BF16, Format, format_of
from ..core.limits import Limits
from ..store import reader
from .alerts import matches
from .fates import BACKWARD, FORWARD, Fate, Recorded, examine
from .lossscale import ScalePath, scale_path
from .source import Source


@dataclass(frozen=True)
class Imagined:
    """`survives` is None if the run would survive with losses."""

    target: Format
    survives: bool | None
    reasons: list[list[Fate]]  # tensors that share a kind and a fate; the deadly ones first
    fates: list[Fate]  # worst first
    path: ScalePath | None  # loss scales; None where none is needed
    needed_bits: int | None  # the smallest loss scale at which no gradient loses what counts
    too_many_skips: bool
    own_scale: bool  # each tensor was given its own scale
    spared: int  # outputs that autocast left in FP32
    stride: int  # 4: every fourth traced step was looked at


def imagine(source: Source, target: Format, fixed_bits: int | None, limits: Limits, glob: str | None = None) -> Imagined:
    """Reads the run and judges every recorded tensor of it in `target`."""
    there = reader.kinds(source.db, source.run.id)
    recorded = {kind: _recorded(source, kind) for kind in (*FORWARD, *BACKWARD) if kind in there}
    own_scale = target.bits == 8 and fixed_bits is None
    path = None
    if not own_scale and (target != BF16 or fixed_bits is not None):
        path = scale_path(_gradient_peaks(source, recorded), target, limits, fixed_bits)
    fates: list[Fate] = []
    spared, stride = 0, 1
    for kind, record in recorded.items():
        histograms = reader.histograms(source.db, source.run.id, kind)
        found, every = examine(record, histograms, target, path if kind in BACKWARD else None, limits, own_scale)
        stride = max(stride, every)
        stay = {site.name for site, stays in zip(record.sites, _stays_fp32(source, record)) if stays}
        spared += len(stay) if kind == "output" else 0
        fates += [fate for fate in found if fate.site not in stay and (glob is None or matches(fate.site, glob))]
    if not fates:
        raise NannyError(_nothing_to_judge(source, recorded, glob))
    fates.sort(key=_badness)
    needed = [f.needs_bits for f in fates if f.needs_bits is not None and f.severity is not Severity.ERROR]
    skips = path is not None and path.skip_rate > limits.skip_rate_error
    deadly, losses = judge(fates, limits)
    return Imagined(
        target=target,
        survives=False if deadly or skips else None if losses else True,
        reasons=deadly + losses,
        fates=fates,
        path=path if path is not None and len(path.steps) else None,
        needed_bits=max(needed, default=None),
        too_many_skips=skips,
        own_scale=own_scale,
        spared=spared,
        stride=stride,
    )


def judge(fates: Sequence[Fate], limits: Limits) -> tuple[list[list[Fate]], list[list[Fate]]]:
    """The groups of tensors that end the run, and those that it would survive with losses."""
    deadly: list[list[Fate]] = []
    losses: list[list[Fate]] = []
    for kind in (*FORWARD, *BACKWARD):
        members = [fate for fate in fates if fate.kind == kind]
        groups: dict[tuple[Severity, str], list[Fate]] = {}
        for fate in members:
            if fate.severity is not None:
                groups.setdefault((fate.severity, fate.why), []).append(fate)
        for (severity, _), group in groups.items():
            kills = severity == Severity.ERROR and _kills(kind, group, members, limits)
            (deadly if kills else losses).append(group)
    return deadly, losses


def _stays_fp32(source: Source, record: Recorded) -> list[bool]:
    """Which tensors autocast would leave in FP32: those it did in a run under autocast, and losses (one element)."""
    if record.kind not in ("output", "output_grad"):
        return [False] * len(record.sites)
    low = is_low(source)
    return [n == 1 or (low and site.dtype == "float32") for site, n in zip(record.sites, record.elements.tolist())]


def is_low(source: Source) -> bool:
    """Whether the run itself was recorded under autocast to a narrow format."""
    return bool(source.run.amp_dtype) and format_of(source.run.amp_dtype).bits < 32


def _kills(kind: str, group: Sequence[Fate], members: Sequence[Fate], limits: Limits) -> bool:
    """Overflow ends a run. What flushes does only if it still does at the end: branches that start at zero grow out of it.

    A lost parameter gradient stops only its own parameter, so it takes some of them; a weight too small for the format does
    little anyway, and what little it does is judged at the output.
    """
    if group[0].why == "overflows":
        return True
    lost = [fate for fate in group if fate.flushed_energy_at_end >= limits.flush_energy_error]
    if kind == "grad":
        return sum(f.elements for f in lost) >= limits.lost_gradient_share * sum(f.elements for f in members) > 0
    return kind != "weight" and bool(lost)


def _recorded(source: Source, kind: str) -> Recorded:
    db, run = source.db, source.run.id
    sites = reader.sites(db, run, kind)
    steps, low = reader.samples(db, run, kind, "min")
    _, high = reader.samples(db, run, kind, "max")
    _, count = reader.samples(db, run, kind, "count")
    size = np.maximum(np.abs(low), np.abs(high)).astype(np.float64)
    peaks = np.full((len(steps), len(sites)), np.nan)
    peaks[:, : size.shape[1]] = np.where(np.isfinite(size) & (count > 0), size, np.nan)
    elements = np.zeros(len(sites), np.int64)
    elements[: count.shape[1]] = count.max(axis=0, initial=0)
    return Recorded(kind, sites, steps, peaks, elements)


def _gradient_peaks(source: Source, recorded: dict[str, Recorded]) -> dict[int, float]:
    """The largest gradient at each step, of parameters and outputs; those that autocast keeps in FP32 limit no scale."""
    out: dict[int, float] = {}
    for kind in BACKWARD:
        if kind not in recorded:
            continue
        record = recorded[kind]
        judged = record.peaks[:, [not stays for stays in _stays_fp32(source, record)]]
        tops = np.where(np.isfinite(judged), judged, 0.0).max(axis=1, initial=0.0)
        for step, top in zip(record.steps.tolist(), tops.tolist()):
            out[step] = max(out.get(step, 0.0), top)
    return out


def _badness(fate: Fate) -> tuple[float, ...]:
    order = {"overflows": 0, "becomes zero": 1, "loses energy": 2, "close to overflow": 3, "loses digits": 4}
    size = fate.peak if fate.kind in FORWARD else fate.flushed_energy
    return (-(fate.severity or 0), order.get(fate.why, 5), -size, -fate.flushed, -fate.peak)


def _nothing_to_judge(source: Source, recorded: dict[str, Recorded], glob: str | None) -> str:
    has_some = any(True for kind in recorded for _ in reader.histograms(source.db, source.run.id, kind))
    if glob is not None and has_some:
        return f"no layer matches {glob!r}; `{source.command('stats')}` lists them"
    return f"run {source.run.id} has no histograms: none of its steps was traced in full; record it with a smaller trace_interval"
