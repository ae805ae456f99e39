"""Would this run have survived in FP16, BF16 or FP8? Answered from the exponent histograms on
record, without running anything.

Outputs and weights are judged as they are: no loss scale reaches the forward pass. Gradients are
judged under the best dynamic loss scale there is (or --scale S, held fixed), by the energy they
lose. FP8 is judged with a scale for each tensor, as its recipes have; --scale 1 judges it without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.finding import NannyError, Severity
from ..core.formats import BF16, Format
from ..core.limits import Limits
from ..core.step import Site
from ..diagnose.records import Diagnosis
from ..diagnose.verdict import Verdict, first_broken_step
from ..store import reader
from .alerts import findings_of, job_verdict, matches
from .histograms import NOTHING, exponent_below, flush_exponent, highest_exponent, overflows, shares
from .source import Source, keeps_low_weights, own_format

FORWARD = ("output", "weight")
BACKWARD = ("output_grad", "grad")
MOST_STEPS = 400
LASTING = 0.75  # quantile over the steps: a loss that holds for a quarter of them is more than an accident
GROWTH_INTERVAL = 2000  # torch.amp.GradScaler's defaults
START_BITS = 16


@dataclass(frozen=True)
class RecordedKind:
    """What a run holds on one kind: `peaks` is the largest magnitude, NaN where a site was not measured or not finite."""

    kind: str
    sites: Sequence[Site]
    steps: np.ndarray
    peaks: np.ndarray  # [steps, sites]
    elements: np.ndarray  # [sites]


@dataclass(frozen=True)
class Outcome:
    """One site over all steps on record. Shares are means over the steps, of its non-zero values; energy is the lasting level."""

    kind: str
    site: str
    elements: int
    steps: tuple[int, ...]
    peak: float  # largest finite magnitude, as it was recorded
    peak_step: int
    overflow_steps: int
    first_overflow: int | None
    flushed: float
    subnormal: float
    saturated: float
    flushed_energy: float
    flushed_energy_at_end: float  # median over the last quarter of the steps
    subnormal_energy: float
    headroom_bits: float  # between the peak, scaled, and the format's end
    needs_bits: int | None  # the smallest loss scale; None: any will do
    history: tuple[float, ...]  # per step: the scaled magnitude as a share of the format's range, or the share of energy lost
    severity: Severity | None = None
    why: str = ""


@dataclass(frozen=True)
class ScalePath:
    """The loss scale at each step, a power of two given in bits, and the steps that it would have made overflow."""

    steps: np.ndarray
    limit_bits: np.ndarray  # the largest scale that overflows nothing at this step
    bits: np.ndarray
    fixed: bool  # the user named it; otherwise a dynamic scaler that starts at the best value

    @property
    def skipped(self) -> np.ndarray:
        return self.bits > self.limit_bits

    @property
    def skip_rate(self) -> float:
        return float(self.skipped.mean()) if len(self.steps) else 0.0

    @property
    def best_bits(self) -> int:
        return int(self.bits[0]) if len(self.bits) else 0

    def at(self, step: int) -> int:
        """The scale in force at a step; between the steps on record, that of the last one before."""
        if not len(self.steps):
            return 0
        return int(self.bits[max(int(np.searchsorted(self.steps, step, side="right")) - 1, 0)])


@dataclass(frozen=True)
class WhatIf:
    """A recorded run in another format. `survives` is None if it would survive with losses."""

    source: Source
    target: Format
    fixed_scale: float | None
    survives: bool | None
    reasons: list[list[Outcome]]  # tensors that share a kind and an outcome; the deadly ones first
    outcomes: list[Outcome]  # worst first
    path: ScalePath | None  # loss scales; None where none is needed
    needed_bits: int | None  # the smallest loss scale at which no gradient loses what counts
    too_many_skips: bool
    own_scale: bool  # each tensor was given its own scale
    spared: int  # outputs that autocast left in FP32
    stride: int  # 4: every fourth traced step was looked at
    broken_from: int | None  # the step from which on the loss was not finite in the run as it was; nothing behind it is judged
    wrong: Diagnosis | None  # what went wrong in the run as it was
    update_ratio: float | None  # the largest update of a step as a share of its weight, typically
    own: Format  # that the run was in
    rounds_updates: bool  # it keeps no FP32 weights, and its updates are less than half a rounding step of the target

    @property
    def sick(self) -> Diagnosis | None:
        """What went wrong as it would in any format; nothing behind it is judged."""
        return _in_any_format(self.wrong)

    @property
    def died(self) -> bool:
        return self.broken_from is not None or self.sick is not None

    @property
    def unknown(self) -> bool:
        """It went wrong as it was, in another format, and everything on record from before would have fitted into this one."""
        went_wrong = self.died or self.wrong is not None
        return went_wrong and self.sick is None and not self.own_format and not self.reasons and not self.too_many_skips

    @property
    def own_format(self) -> bool:
        """No need to imagine: the run was in this format, and with its own loss scale."""
        return self.own == self.target and self.fixed_scale is None

    @property
    def starts_too_low(self) -> bool:
        """Whether a GradScaler with its defaults would begin below the smallest loss scale that is usable."""
        return self.path is not None and not self.path.fixed and (self.needed_bits or 0) > START_BITS


def judge_in_format(
    source: Source,
    target: Format,
    fixed_scale: float | None = None,
    glob: str | None = None,
    verdict: Verdict | None = None,
) -> WhatIf:
    """Judges every recorded tensor of the run in `target`, gradients under the best loss scale or a fixed one.

    `verdict` is the run's own, if it is known already: several formats need it once.
    """
    limits = Limits()
    fixed_bits = scale_bits(fixed_scale)
    broken = _broken_from(source)
    verdict = verdict or job_verdict([source], findings_of(source))
    wrong = None if verdict.diagnosis is None or verdict.diagnosis.early else verdict.diagnosis
    sick, own = _in_any_format(wrong), own_format(source)
    last = min((step - 1 for step in (broken, None if sick is None else sick.step) if step is not None), default=None)
    there = reader.kinds(source.db, source.run.id)
    recorded = {kind: _recorded_kind(source, kind, last) for kind in (*FORWARD, *BACKWARD) if kind in there}
    own_scale = target.bits == 8 and fixed_bits is None
    path = None
    if not own_scale and (target != BF16 or fixed_bits is not None):
        path = scale_path(_gradient_peaks(source, recorded), target, limits, fixed_bits)
    outcomes: list[Outcome] = []
    stride = 1
    stay = {kind: _sites_in_fp32(source, record) for kind, record in recorded.items()}
    for kind, record in recorded.items():
        histograms = reader.histograms(source.db, source.run.id, kind, last=last)
        found, every = outcomes_of(record, histograms, target, path if kind in BACKWARD else None, limits, own_scale)
        stride = max(stride, every)
        outcomes += [one for one in found if one.site not in stay[kind] and (glob is None or matches(one.site, glob))]
    if not outcomes:
        raise NannyError(_nothing_to_judge(source, recorded, glob, last))
    outcomes.sort(key=_badness)
    needed = [f.needs_bits for f in outcomes if f.needs_bits is not None and f.severity is not Severity.ERROR]
    skips = path is not None and path.skip_rate > limits.skip_rate_error
    deadly, lossy = _consequences(outcomes, limits)
    update_ratio = _update_ratio(source)
    tiny = target.bits == 16 and update_ratio is not None and update_ratio < target.unit_roundoff / 2
    result = WhatIf(
        source=source,
        target=target,
        fixed_scale=fixed_scale,
        survives=False if deadly or skips else None if lossy else True,
        reasons=deadly + lossy,
        outcomes=outcomes,
        path=path if path is not None and len(path.steps) else None,
        needed_bits=max(needed, default=None),
        too_many_skips=skips,
        own_scale=own_scale,
        spared=len(stay.get("output", ())),
        stride=stride,
        broken_from=broken,
        wrong=wrong,
        update_ratio=update_ratio,
        own=own,
        rounds_updates=tiny and keeps_low_weights(source),
    )
    if result.own_format:  # what happened says more than what the histograms foretell
        lossy_at_most = None if lossy or deadly or verdict.healthy is False else True
        return replace(result, survives=False if result.died or wrong is not None else lossy_at_most)
    if result.sick is not None:
        return replace(result, survives=False)
    return replace(result, survives=None) if result.survives and (result.unknown or result.rounds_updates) else result


def _broken_from(source: Source) -> int | None:
    """The step from which on the loss is not finite; refused if it is the first."""
    losses = reader.scalars(source.db, source.run.id, ["loss"]).get("loss")
    broken = first_broken_step(losses)
    if losses is not None and broken == int(losses[0][0]):
        raise NannyError(
            f"the loss of run {source.run.id} is not finite from its first step ({broken}) on, so no format can be imagined; "
            f"`{source.command('summary')}` says what came first"
        )
    return broken


def _in_any_format(wrong: Diagnosis | None) -> Diagnosis | None:
    return wrong if wrong is not None and wrong.precision_caused is False and wrong.step else None


def scale_bits(scale: float | None) -> int | None:
    if scale is None:
        return None
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        hint = f"; try {2.0 ** round(math.log2(scale)):g}" if 0 < scale < math.inf else ""
        raise NannyError(f"--scale {scale:g} is not a power of two, and histograms answer only for those{hint}")
    return exponent - 1


def _consequences(outcomes: Sequence[Outcome], limits: Limits) -> tuple[list[list[Outcome]], list[list[Outcome]]]:
    """The groups of tensors that end the run, and those that it would survive with losses."""
    deadly: list[list[Outcome]] = []
    lossy: list[list[Outcome]] = []
    for kind in (*FORWARD, *BACKWARD):
        members = [outcome for outcome in outcomes if outcome.kind == kind]
        groups: dict[tuple[Severity, str], list[Outcome]] = {}
        for outcome in members:
            if outcome.severity is not None:
                groups.setdefault((outcome.severity, outcome.why), []).append(outcome)
        for (severity, _), group in groups.items():
            kills = severity == Severity.ERROR and _kills(kind, group, members, limits)
            (deadly if kills else lossy).append(group)
    return deadly, lossy


def _sites_in_fp32(source: Source, record: RecordedKind) -> set[str]:
    """Which tensors autocast would leave in FP32: those it did in a run under autocast, and losses (one element)."""
    if record.kind not in ("output", "output_grad"):
        return set()
    low, sizes = own_format(source).bits < 32, record.elements.tolist()
    return {site.name for site, n in zip(record.sites, sizes) if n == 1 or (low and site.dtype == "float32")}


def _update_ratio(source: Source) -> float | None:
    ratios = reader.scalars(source.db, source.run.id, ["update_ratio"]).get("update_ratio")
    return float(np.nanmedian(ratios[1])) if ratios is not None and np.isfinite(ratios[1]).any() else None


def _kills(kind: str, group: Sequence[Outcome], members: Sequence[Outcome], limits: Limits) -> bool:
    """Overflow ends a run. What flushes does only if it still does at the end: branches that start at zero grow out of it.

    A lost parameter gradient stops only its own parameter, so it takes some of them; a weight too small for the format does
    little anyway, and what little it does is judged at the output.
    """
    if group[0].why == "overflows":
        return True
    lost = [outcome for outcome in group if outcome.flushed_energy_at_end >= limits.flush_energy_error]
    if kind == "grad":
        return sum(f.elements for f in lost) >= limits.lost_gradient_share * sum(f.elements for f in members) > 0
    return kind != "weight" and bool(lost)


def _recorded_kind(source: Source, kind: str, last: int | None) -> RecordedKind:
    db, run = source.db, source.run.id
    sites = reader.sites(db, run, kind)
    steps, of = reader.statistics_of(db, run, kind, ("min", "max", "count"), last=last)
    count, size = of["count"], np.maximum(np.abs(of["min"]), np.abs(of["max"])).astype(np.float64)
    peaks = np.full((len(steps), len(sites)), np.nan)
    peaks[:, : size.shape[1]] = np.where(np.isfinite(size) & (count > 0), size, np.nan)
    elements = np.zeros(len(sites), np.int64)
    elements[: count.shape[1]] = count.max(axis=0, initial=0)
    return RecordedKind(kind, sites, steps, peaks, elements)


def _gradient_peaks(source: Source, recorded: dict[str, RecordedKind]) -> dict[int, float]:
    """The largest gradient at each step, of parameters and outputs; those that autocast keeps in FP32 limit no scale."""
    out: dict[int, float] = {}
    for kind in BACKWARD:
        if kind not in recorded:
            continue
        record = recorded[kind]
        stay = _sites_in_fp32(source, record)
        judged = record.peaks[:, [site.name not in stay for site in record.sites]]
        tops = np.where(np.isfinite(judged), judged, 0.0).max(axis=1, initial=0.0)
        for step, top in zip(record.steps.tolist(), tops.tolist()):
            out[step] = max(out.get(step, 0.0), top)
    return out


def _badness(outcome: Outcome) -> tuple[float, ...]:
    order = {"overflows": 0, "becomes zero": 1, "loses energy": 2, "close to overflow": 3, "loses digits": 4}
    size = outcome.peak if outcome.kind in FORWARD else outcome.flushed_energy
    return (-(outcome.severity or 0), order.get(outcome.why, 5), -size, -outcome.flushed, -outcome.peak)


def _nothing_to_judge(source: Source, recorded: dict[str, RecordedKind], glob: str | None, last: int | None) -> str:
    has_some = any(True for kind in recorded for _ in reader.histograms(source.db, source.run.id, kind, last=last))
    if last is not None and not has_some:
        return f"run {source.run.id} has no histograms from before step {last + 1}, where it went wrong as it was"
    if glob is not None and has_some:
        return f"no layer matches {glob!r}; `{source.command('stats')}` lists them"
    return f"run {source.run.id} has no histograms: none of its steps was traced in full; record it with a smaller trace_interval"


# What would have become of each tensor: numbers per site, and a judgement by consequence.
#
# Counts alone kill no run. What does: an output or weight that leaves the range (no loss scale reaches the forward pass), and
# energy that flushes to zero. Gradients are judged at the loss scale that they would have had.


def outcomes_of(
    recorded: RecordedKind,
    histograms: Iterable[tuple[int, np.ndarray]],
    target: Format,
    path: ScalePath | None,
    limits: Limits,
    own_scale: bool = False,
    most_steps: int = MOST_STEPS,
) -> tuple[list[Outcome], int]:
    """The outcomes of all sites of a kind under the loss scales of `path`, or (`own_scale`) each tensor at its own best scale.

    Of a long run every second, fourth, eighth ... histogram is used, so that neither time nor memory grows with it; the second
    result says which. Peaks are those of all steps.
    """
    steps: list[int] = []
    rows: list[np.ndarray] = []
    stride = 1
    for number, (step, counts) in enumerate(histograms):
        if number % stride:
            continue
        if len(rows) >= 2 * most_steps:
            steps, rows, stride = steps[::2], rows[::2], 2 * stride
            if number % stride:
                continue
        steps.append(step)
        columns = _columns_at(recorded, step, counts, target, path, limits, own_scale)
        rows.append(np.pad(columns, ((0, 0), (0, len(recorded.sites) - len(counts)))))  # a site met later has a count of 0
    if not rows:
        return [], stride
    table = np.array(rows)  # [steps, columns, sites]
    outcomes = []
    for i in range(len(recorded.sites)):
        seen = table[:, _COUNT, i] > 0
        if seen.any():
            outcome = _outcome(recorded, i, np.array(steps)[seen], dict(zip(_COLUMNS, table[seen, :, i].T)), target)
            severity, why = _judgement(outcome, limits, own_scale)
            outcomes.append(replace(outcome, severity=severity, why=why))
    return outcomes, stride


def _columns_at(
    recorded: RecordedKind, step: int, counts: np.ndarray, target: Format, path: ScalePath | None, limits: Limits, own_scale: bool
) -> np.ndarray:
    """_COLUMNS of all sites at one step."""
    peaks = _peaks_at(recorded, step, counts)
    if own_scale:
        bits = limit_bits(peaks, target)
        bits = np.where(bits == NOTHING, 0, bits)
    else:
        bits = np.full(len(counts), path.at(step) if path is not None else 0)
    lowest = exponent_below(counts, limits.flush_energy_warn)
    needs = np.where(lowest == NOTHING, -NOTHING, flush_exponent(target) - lowest)
    s = shares(counts, target, bits)
    columns = (s.count, peaks, bits, needs, s.flushed, s.subnormal, s.saturated, s.flushed_energy, s.subnormal_energy)
    return np.array(columns, np.float64)


_COLUMNS = ("count", "peak", "bits", "needs", "flushed", "subnormal", "saturated", "flushed_energy", "subnormal_energy")
_COUNT = 0


def _peaks_at(recorded: RecordedKind, step: int, counts: np.ndarray) -> np.ndarray:
    """Exact magnitudes where they are on record; else (tensors with NaN or infinity) the lower edge of the highest bin."""
    highest = highest_exponent(counts)
    edge = np.where(highest > -NOTHING, np.exp2(np.clip(highest, -1000, 1000).astype(float)), np.nan)
    row = int(np.searchsorted(recorded.steps, step))
    if row == len(recorded.steps) or recorded.steps[row] != step:
        return edge
    exact = recorded.peaks[row, : len(counts)]
    return np.where(np.isfinite(exact), exact, edge)


def _outcome(recorded: RecordedKind, i: int, steps: np.ndarray, column: dict[str, np.ndarray], target: Format) -> Outcome:
    lost = column["flushed_energy"]
    sizes = np.ldexp(column["peak"], column["bits"].astype(np.int32))
    backward = recorded.kind in BACKWARD
    needs = int(np.sort(column["needs"])[int((len(steps) - 1) * LASTING)])
    when, peaks = _all_peaks(recorded, i, steps, column["peak"])
    top = int(np.argmax(peaks))
    as_is = not backward and not column["bits"].any()
    over = when[overflows(peaks, target)] if as_is else steps[overflows(sizes, target)]
    return Outcome(
        kind=recorded.kind,
        site=recorded.sites[i].name,
        elements=int(recorded.elements[i]),
        steps=tuple(steps.tolist()),
        peak=float(peaks[top]),
        peak_step=int(when[top]),
        overflow_steps=len(over),
        first_overflow=int(over[0]) if len(over) else None,
        flushed=float(column["flushed"].mean()),
        subnormal=float(column["subnormal"].mean()),
        saturated=float(column["saturated"].mean()),
        flushed_energy=quantile(lost, LASTING),
        flushed_energy_at_end=quantile(lost[len(lost) * 3 // 4 :], 0.5),
        subnormal_energy=quantile(column["subnormal_energy"], LASTING),
        headroom_bits=math.log2(target.max / float(peaks[top] if as_is else sizes.max())),
        needs_bits=needs if backward and needs > -NOTHING else None,
        history=tuple((lost if backward else sizes / target.max).tolist()),
    )


def quantile(values: np.ndarray, share: float) -> float:
    """As np.quantile, which takes ten times as long on a few hundred values, and is asked thrice for each tensor and format."""
    ordered = np.sort(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def _all_peaks(recorded: RecordedKind, i: int, steps: np.ndarray, examined: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps and peaks of a site: those on record, and those that only its histograms tell."""
    known = np.isfinite(recorded.peaks[:, i])
    there = recorded.steps[known]
    if len(there) and np.array_equal(there[np.minimum(np.searchsorted(there, steps), len(there) - 1)], steps):
        return there, recorded.peaks[known, i]
    only_here = ~np.isin(steps, there)
    when = np.concatenate([recorded.steps[known], steps[only_here]])
    peaks = np.concatenate([recorded.peaks[known, i], examined[only_here]])
    order = np.argsort(when, kind="stable")
    return when[order], peaks[order]


def _judgement(outcome: Outcome, limits: Limits, own_scale: bool) -> tuple[Severity | None, str]:
    fits_as_is = outcome.kind in FORWARD and not own_scale
    if fits_as_is and outcome.overflow_steps:
        return Severity.ERROR, "overflows"
    if outcome.flushed_energy >= limits.flush_energy_error:
        return Severity.ERROR, "becomes zero" if outcome.flushed_energy > 0.99 else "loses energy"
    if outcome.flushed_energy >= limits.flush_energy_warn:
        return Severity.WARNING, "loses energy"
    if fits_as_is and outcome.headroom_bits < limits.headroom_warn_bits:
        return Severity.WARNING, "close to overflow"
    if outcome.subnormal_energy >= limits.subnormal_energy_warn:
        return Severity.WARNING, "loses digits"
    return None, ""


# Which loss scales gradients of known size could have had.


def limit_bits(peaks: np.ndarray, target: Format) -> np.ndarray:
    """The largest power of two (in bits) that keeps magnitudes of this size finite; NOTHING where there is no magnitude."""
    known = np.isfinite(peaks) & (peaks > 0)
    safe = np.where(known, peaks, 1.0)
    bits = np.floor(np.log2(target.overflow_at) - np.log2(safe)).astype(np.int64)
    too_much = overflows(np.ldexp(safe, np.clip(bits, -1000, 1000).astype(np.int32)), target)
    found: np.ndarray = np.where(known, bits - too_much, NOTHING)
    return found


def scale_path(peaks_by_step: Mapping[int, float], target: Format, limits: Limits, fixed_bits: int | None = None) -> ScalePath:
    """The path of a dynamic loss scaler over gradients whose largest magnitude at each step is known.

    It starts at the best value there is: the largest that at most one step in a hundred overflows. From there it does what
    torch's GradScaler does: halve and skip on overflow, double after 2000 clean steps.
    """
    steps = np.array(sorted(peaks_by_step), dtype=np.int64)
    most = limit_bits(np.array([peaks_by_step[int(step)] for step in steps], dtype=np.float64), target)
    steps, most = steps[most < NOTHING], most[most < NOTHING]
    if fixed_bits is not None or not len(steps):
        return ScalePath(steps, most, np.full(len(steps), fixed_bits or 0), fixed_bits is not None)
    scale = int(np.quantile(most, limits.skip_rate_warn, method="lower"))
    changed = int(steps[0])
    path = np.empty(len(steps), dtype=np.int64)
    for i, (step, limit) in enumerate(zip(steps.tolist(), most.tolist())):
        if step - changed >= GROWTH_INTERVAL:
            scale, changed = scale + 1, step
        path[i] = scale
        if scale > limit:
            scale, changed = scale - 1, step
    return ScalePath(steps, most, path, False)
