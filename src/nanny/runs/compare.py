"""Where two runs part: curve by curve and layer by layer, aligned by step and name, across formats.

RUN_A is the reference, usually the FP32 run. Each is a number in the same store (--db), or a path:
other/metrics.db, other/metrics.db:3 or a folder (all ranks of the run then). Two runs have parted where their gap outlasts
noise and exceeds what rounding explains.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.finding import NannyError
from ..core.formats import Format
from ..core.limits import Limits
from ..core.numbers import plain_name
from ..diagnose.verdict import first_broken_step
from ..store import reader
from .alerts import matches
from .matrices import ABSENT, MOST_COLUMNS, Columns, Matrix, groups_of
from .ranks import whole_norms
from .source import Source, own_format

KINDS = ("output", "output_grad", "grad", "weight")  # in the order in which a step makes them
CURVES = ("loss", "grad_norm")
MEDIAN_NOISE = 1.2533  # standard error of a median against that of a mean, of normal noise
SIGMA_OF_MAD = 1.4826
MOST_RATIO = 2.0**30  # what a picture tells apart
SMALLEST = 2.0**-149  # stands for zero where logarithms are taken


@dataclass(frozen=True)
class ComparedSeries:
    """One curve, or one statistic (rms) of one layer; `step` is None if it does not part."""

    name: str
    kind: str  # `curve`, or the kind of the layer's tensor
    step: int | None
    broke: bool  # B is not finite where A is
    a: float  # medians over the window from `step` on, or over the last one; of norms the pair whose ratio is the median
    b: float
    ratio: float
    last_a: float
    last_b: float
    last_ratio: float
    still_apart: bool
    last_step: int
    floor: float  # the gap that noise and rounding explain: of the value for the loss, of its logarithm for norms
    position: int = 0


@dataclass(frozen=True)
class SeriesPair:
    """Series of both runs at their common steps, in columns; NaN where a layer was not measured, infinite where it broke."""

    kind: str
    names: list[tuple[str, int]]  # and position, in the order of execution
    steps: np.ndarray
    a: np.ndarray
    b: np.ndarray
    tolerance: np.ndarray
    log: bool  # norms are compared by their ratio


@dataclass(frozen=True)
class RunComparison:
    reference: Source  # A
    other: Source  # B
    steps: int
    same_start: bool | None  # None: there is no common first loss
    curves: list[ComparedSeries]
    layers: list[ComparedSeries]  # first to part first
    first: ComparedSeries | None
    notes: list[str]

    @property
    def for_good(self) -> bool:
        """Whether anything that parts is still apart at the end."""
        return any(p.broke or p.still_apart for p in (*self.curves, *self.layers) if p.step is not None)


Ranks = Sequence[Source]  # the ranks of a run, the lowest first; often one


def compare_runs(all_of_a: Ranks, all_of_b: Ranks, glob: str | None = None) -> RunComparison:
    """Aligns both runs by step and name. Runs of other seeds are compared against the noise of the one with the wider format.

    Of many ranks, the loss is their average, and a norm that of all their parts.
    """
    a, b = all_of_a[0], all_of_b[0]
    if a.path == b.path and a.run.id == b.run.id:
        raise NannyError(f"both are run {a.run.id} of {a.path}; name two runs, `nanny runs` lists them")
    limits = Limits()
    format_a, format_b = own_format(a), own_format(b)
    target = min((format_a, format_b), key=lambda form: form.significand)  # the narrower
    curve_pairs = [pair for name in CURVES if (pair := _curve_pair(all_of_a, all_of_b, name, target, limits))]
    layer_pairs = [pair for kind in KINDS if (pair := _layer_pair(all_of_a, all_of_b, kind, limits, glob))]
    skipped = np.concatenate([_skipped_on_the_way(job) for job in (all_of_a, all_of_b)])
    curve_pairs, layer_pairs = ([p for pair in found if (p := _without(pair, skipped))] for found in (curve_pairs, layer_pairs))
    pairs = curve_pairs + layer_pairs
    same_start = _same_start(pairs[0], target, limits) if curve_pairs and curve_pairs[0].names == [("loss", 0)] else None
    noise = "gap" if same_start else "b" if format_b.significand > format_a.significand else "a"
    curves = [series for pair in curve_pairs for series in _compare_pair(pair, limits, noise)]
    layers = [series for pair in layer_pairs for series in _compare_pair(pair, limits, noise)]
    if not pairs:
        raise NannyError("the runs have no step in common, so there is nothing to compare; `nanny runs` shows their lengths")
    layers.sort(key=_order)
    apart = [series for series in (*layers, *curves) if series.step is not None]
    first = min(apart, key=lambda p: (p.step, p.kind == "curve")) if apart else None
    steps = max(len(pair.steps) for pair in pairs)
    return RunComparison(a, b, steps, same_start, curves, layers, first, _notes(a, b, same_start, layers))


def _skipped_on_the_way(job: Ranks) -> np.ndarray:
    """Steps that a GradScaler skipped and went on from: how it finds its scale, and no difference between runs. Those behind the
    last update are none: it has not found any."""
    steps, skipped = reader.scalars(job[0].db, job[0].run.id, ["skipped"]).get("skipped", (np.zeros(0), np.zeros(0)))
    taken = steps[skipped == 0]
    return np.asarray(steps[(skipped > 0) & (steps < (taken[-1] if len(taken) else -math.inf))])


def _without(pair: SeriesPair, skipped: np.ndarray) -> SeriesPair | None:
    """Of gradients what was measured at other steps; forward nothing is lost to a scale."""
    kept = ~np.isin(pair.steps, skipped)
    if kept.all() or not (pair.kind in ("grad", "output_grad") or pair.names == [("grad_norm", 0)]):
        return pair
    return replace(pair, steps=pair.steps[kept], a=pair.a[kept], b=pair.b[kept]) if kept.any() else None


def ratio_matrix(a: Source, b: Source, kind: str) -> Matrix | None:
    """B / A of the rms of each site of B at the steps that both have: of a group of steps the one farthest from 1, and NaN where
    B alone is not finite."""
    pair = _layer_pair([a], [b], kind, Limits(), None)
    if pair is None:
        return None
    known, lost = np.isfinite(pair.a) & np.isfinite(pair.b), np.isfinite(pair.a) & np.isinf(pair.b)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.clip(np.where(pair.a == pair.b, 1.0, pair.b / pair.a), 1 / MOST_RATIO, MOST_RATIO)
    distance = np.where(lost, np.inf, np.where(known, np.abs(np.log2(ratio)), -1.0))
    values = np.where(lost, np.inf, np.where(known, ratio, ABSENT)).astype(np.float32)
    columns = Columns(pair.steps, groups_of(len(pair.steps), MOST_COLUMNS))
    starts = columns.bounds[:-1]
    worst = np.stack([start + distance[start:end].argmax(0) for start, end in zip(starts, columns.bounds[1:])])
    sites = [plain_name(site.name) for site in b.sites(kind)]
    rows = {name: i for i, (name, _) in enumerate(pair.names)}
    keys = np.full((len(sites), len(starts)), ABSENT, np.float32)
    at = np.zeros((len(sites), len(starts)), np.uint16)
    for row, name in enumerate(sites):
        if name in rows:
            column = rows[name]
            keys[row] = values[worst[:, column], column]
            at[row] = worst[:, column] - starts
    return Matrix(columns, keys, None if len(starts) == len(pair.steps) else at)


def _curve_pair(a: Ranks, b: Ranks, name: str, target: Format, limits: Limits) -> SeriesPair | None:
    found = [_curve(job, name) for job in (a, b)]
    if found[0] is None or found[1] is None:
        return None
    steps, i, j = np.intersect1d(found[0][0], found[1][0], return_indices=True)
    if not len(steps):
        return None
    one, two = found[0][1][i][:, None], found[1][1][j][:, None]
    if name == "loss":
        return SeriesPair("curve", [(name, 0)], steps, one, two, _loss_tolerance(one, target, limits), log=False)
    return SeriesPair("curve", [(name, 0)], steps, one, two, np.array([[limits.part_norm]]), log=True)


def _curve(job: Ranks, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    if name == "loss" and job[0].loss_of_all is not None:
        return job[0].loss_of_all
    if name == "grad_norm" and len(job) > 1 and (whole := whole_norms(job)) is not None:
        return whole
    read = [reader.scalars(source.db, source.run.id, [name]).get(name) for source in job]
    found = [curve for curve in read if curve is not None]
    if name != "loss" or len(found) < 2:
        return found[0] if found else None
    steps = functools.reduce(np.intersect1d, (steps for steps, _ in found))
    return steps, np.mean([values[np.searchsorted(at, steps)] for at, values in found], axis=0)


def _same_start(loss: SeriesPair, target: Format, limits: Limits) -> bool:
    """Same weights and same batches: the first losses agree up to rounding or noise, and they jump together."""
    first = slice(0, int(limits.baseline_steps))
    a, b = loss.a[first, 0], loss.b[first, 0]
    known = np.isfinite(a) & np.isfinite(b)
    a, b = a[known], b[known]
    if not len(a):
        return False
    rounding = limits.part_loss_roundoffs * target.unit_roundoff * float(np.median(np.abs(a)))
    if float(np.median(np.abs(b - a))) > max(rounding, 0.5 * float(step_noise(a[:, None], limits).max())):
        return False
    with np.errstate(invalid="ignore"):  # from one infinity to the next
        jumps = np.diff(a), np.diff(b)
    enough = len(a) > 5 and all(jump.std() > 0 for jump in jumps)
    return not enough or float(np.corrcoef(*jumps)[0, 1]) > 0.5


def _loss_tolerance(loss: np.ndarray, target: Format, limits: Limits) -> np.ndarray:
    """What rounding may do to a loss of this size, and at least a small part of what it has fallen in all."""
    finite = loss[np.isfinite(loss)]
    fallen = float(np.quantile(finite, 0.95) - np.quantile(finite, 0.05)) if len(finite) else 0.0
    size = np.where(np.isfinite(loss), np.abs(loss), 0.0)
    return np.maximum(limits.part_loss_roundoffs * target.unit_roundoff * size, limits.part_loss_range * fallen)


def _layer_pair(a: Ranks, b: Ranks, kind: str, limits: Limits, glob: str | None) -> SeriesPair | None:
    (steps_a, rms_a, names_a), (steps_b, rms_b, names_b) = _rms(a, kind), _rms(b, kind)
    steps, i, j = np.intersect1d(steps_a, steps_b, return_indices=True)
    common = [name for name in names_a if name in names_b and (glob is None or matches(name, glob))]
    one = rms_a[i][:, [names_a[name] for name in common]]
    two = rms_b[j][:, [names_b[name] for name in common]]
    unmeasured = np.isnan(one) | np.isnan(two)
    seen = ~unmeasured.all(axis=0)
    if not len(steps) or not seen.any():
        return None
    one, two = (np.where(unmeasured, np.nan, values)[:, seen] for values in (one, two))
    names = [(name, names_a[name]) for name, was_seen in zip(common, seen) if was_seen]
    return SeriesPair(kind, names, steps, one, two, np.array([[limits.part_norm]]), log=True)


def _rms(job: Ranks, kind: str) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Steps, rms [steps, sites] (infinite where the tensor is not finite, NaN where it was not measured), name -> column.

    Over ranks squares and counts add up: of shards that gives the whole, of replicas the one, of outputs those of all batches.
    """
    measured = [one for source in job if len((one := _squares(source, kind))[0])]
    if not measured:
        return np.zeros(0, np.int64), np.zeros((0, 0)), {}
    names = {name: i for i, name in enumerate(dict.fromkeys(name for *_, known in measured for name in known))}
    steps = functools.reduce(np.intersect1d, (at for at, *_ in measured))
    squares, counts = np.zeros((2, len(steps), len(names)))
    for at, square, count, known in measured:
        rows, columns = np.searchsorted(at, steps), [names[name] for name in known]
        squares[:, columns] += square[rows][:, list(known.values())]
        counts[:, columns] += count[rows][:, list(known.values())]
    return steps, np.where(counts > 0, np.sqrt(squares / np.maximum(counts, 1)), np.nan), names


def _squares(source: Source, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, int]]:
    db, run = source.db, source.run.id
    steps, of = reader.statistics_of(db, run, kind, ("norm", "count"))
    norm, count = of["norm"], of["count"]
    squares = np.where(count > 0, np.where(np.isfinite(norm), norm.astype(np.float64) ** 2, np.inf), 0.0)
    names = {plain_name(site.name): i for i, site in enumerate(reader.sites(db, run, kind)) if i < norm.shape[1]}
    return steps, squares, count.astype(np.float64), names


def _compare_pair(pair: SeriesPair, limits: Limits, noise: str) -> list[ComparedSeries]:
    """`noise` says whose it is: of run `a` or `b`, or of the `gap` between runs that saw the same batches."""
    left, right = (logarithm(pair.a), logarithm(pair.b)) if pair.log else (pair.a, pair.b)
    with np.errstate(invalid="ignore"):
        shared = step_noise(right - left, limits)
    sigma = shared if noise == "gap" else math.sqrt(2) * step_noise(right if noise == "b" else left, limits)
    found = find_divergence(left, right, pair.tolerance, sigma, limits)
    window = window_of(len(pair.steps), limits)
    out = []
    for i, (name, position) in enumerate(pair.names):
        first, broke = int(found.first[i]), bool(found.broke[i])
        at = slice(-window, None) if first < 0 else slice(first, first + 1 if broke else first + window)
        apart = pair.log and first >= 0 and not broke
        a, b = _usual_pair(pair.a[at, i], pair.b[at, i]) if apart else (_middle(pair.a[at, i]), _middle(pair.b[at, i]))
        last_a, last_b = _middle(pair.a[-window:, i]), _middle(pair.b[-window:, i])
        out.append(
            ComparedSeries(
                name=name,
                kind=pair.kind,
                step=int(pair.steps[first]) if first >= 0 else None,
                broke=broke,
                a=a,
                b=b,
                ratio=_ratio(a, b),
                last_a=last_a,
                last_b=last_b,
                last_ratio=_ratio(last_a, last_b),
                still_apart=bool(abs(found.last_gap[i]) > found.floor[i])
                or not (math.isfinite(last_a) and math.isfinite(last_b)),
                last_step=int(pair.steps[-1]),
                floor=float(found.floor[i]),
                position=position,
            )
        )
    return out


def _middle(values: Sequence[float] | np.ndarray) -> float:
    """The median; not finite if most of the values are not."""
    array = np.asarray(values, float)
    finite = array[np.isfinite(array)]
    if 2 * len(finite) > len(array):
        return float(np.median(finite))
    return float(array[~np.isfinite(array)][0]) if len(array) > len(finite) else math.nan


def _usual_pair(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """The values of the step whose ratio is the median: what is said of the ratio can be worked out from them."""
    with np.errstate(invalid="ignore"):
        gaps = logarithm(b) - logarithm(a)
    known = np.flatnonzero(np.isfinite(gaps))
    if not len(known):
        return _middle(a), _middle(b)
    at = known[np.argsort(gaps[known], kind="stable")[len(known) // 2]]
    return float(a[at]), float(b[at])


def _ratio(a: float, b: float) -> float:
    if a == b:
        return 1.0
    return b / a if a else math.inf


def _order(series: ComparedSeries) -> tuple[float, ...]:
    """By step; within a step in the order of execution; what never parts last, widest gap first."""
    gap = abs(math.log(series.last_ratio)) if 0 < series.last_ratio < math.inf else 0.0
    if series.step is None:
        return (math.inf, 0, -gap)
    return (series.step, KINDS.index(series.kind), series.position)


def _notes(a: Source, b: Source, same_start: bool | None, layers: Sequence[ComparedSeries]) -> list[str]:
    out = []
    if same_start is False:
        out.append("the losses differ from the start: another seed, other data, skipped steps; only gaps above noise count")
    losses = [reader.scalars(source.db, source.run.id, ["loss"]).get("loss") for source in (a, b)]
    broke_a, broke_b = (first_broken_step(loss) for loss in losses)
    if broke_a is not None and (broke_b is None or broke_a < broke_b):
        out.append(f"the loss of A, the reference, is not finite from step {broke_a} on: B cannot part from it behind that")
    rates = [reader.scalars(source.db, source.run.id, ["lr"]).get("lr") for source in (a, b)]
    if rates[0] is not None and rates[1] is not None:
        steps, i, j = np.intersect1d(rates[0][0], rates[1][0], return_indices=True)
        differ = ~np.isclose(rates[0][1][i], rates[1][1][j], rtol=1e-3, equal_nan=True)
        if differ.any():
            out.append(f"the learning rates differ from step {steps[np.argmax(differ)]} on, so this compares two recipes")
    if not layers:
        out.append("no layer was sampled at the same steps under the same name in both runs: only curves are compared")
    if a.run.dropped or b.run.dropped:
        out.append(f"samples were dropped (A {a.run.dropped}, B {b.run.dropped}): steps with gaps are left out")
    return out


# Where two series part for longer than their own noise explains: arrays [steps, series], no store and no text.
#
# Two runs never give the same numbers twice: batches are noisy, and low precision rounds. They have parted where the gap between
# them keeps its sign and its size over a whole window of steps, above both what rounding may do and what step-to-step noise would
# leave in a median of that many steps. Runs that saw the same batches share the noise, so it is that of their difference.


@dataclass(frozen=True)
class Divergence:
    """Per series: index of the first step apart (-1: never), why, and the gap at the end."""

    first: np.ndarray
    broke: np.ndarray  # the second is not finite where the first still is
    last_gap: np.ndarray  # median gap over the last window
    floor: np.ndarray  # what the gap had to exceed at that step


def window_of(steps: int, limits: Limits) -> int:
    return int(min(max(steps // 8, 1), limits.part_window))


def step_noise(values: np.ndarray, limits: Limits) -> np.ndarray:
    """Robust standard deviation of the step-to-step noise of each series around each step; 0 where it cannot be told.

    Noise changes as training goes on, so it is measured block by block. A block is short, so its neighbour and the run as a whole
    have a say too: the largest of the three counts.
    """
    with np.errstate(invalid="ignore"):  # from one infinity to the next
        jumps = np.abs(np.diff(values, axis=0))
    block = max(window_of(len(values), limits), 4)
    if len(jumps) < block:
        return np.zeros((1, values.shape[1]))
    count = len(jumps) // block
    middle = np.zeros((count, values.shape[1]))
    for i in range(count):
        middle[i] = _finite_median(jumps[i * block : (i + 1) * block if i < count - 1 else None])
    middle = np.maximum(middle, np.median(middle, axis=0))
    middle[1:] = np.maximum(middle[1:], middle[:-1])
    at = np.minimum(np.arange(len(values)) // block, count - 1)
    found: np.ndarray = SIGMA_OF_MAD / np.sqrt(2.0) * middle[at]
    return found


def _finite_median(values: np.ndarray) -> np.ndarray:
    """Of each column; 0 where there are fewer than three finite values."""
    known = np.isfinite(values)
    if known.all():
        return np.asarray(np.median(values, axis=0))
    out = np.zeros(values.shape[1])
    for column in np.flatnonzero(known.sum(0) >= 3):
        out[column] = np.median(values[known[:, column], column])
    return out


def find_divergence(a: np.ndarray, b: np.ndarray, tolerance: np.ndarray, noise: np.ndarray, limits: Limits) -> Divergence:
    """Where each column of `b` leaves that of `a` by more than `tolerance` and the `noise` of their gap.

    `tolerance` and `noise` (a standard deviation) have a row for each step, or one for all. NaN in both is no difference; NaN or
    infinity in `b` alone is a parting at once.
    """
    with np.errstate(invalid="ignore"):
        delta = b - a
    delta = np.where(np.isfinite(delta), delta, 0.0)
    window = window_of(len(delta), limits)
    unexplained = limits.part_zscore * MEDIAN_NOISE / np.sqrt(window) * noise
    floor = np.broadcast_to(np.maximum(tolerance, unexplained), delta.shape)
    middle = _median_ahead(delta, window)
    apart = (np.abs(middle) > floor) & (np.abs(delta) > floor) & (np.sign(middle) == np.sign(delta))
    broke = np.isfinite(a) & ~np.isfinite(b)
    either = apart | broke
    first = np.where(either.any(0), np.argmax(either, axis=0), -1)
    for column in np.flatnonzero((first >= 0) & ~broke[first, np.arange(len(first))]):
        first[column] = _onset(delta[:, column], int(first[column]), window)
    columns = np.arange(delta.shape[1])
    at = np.maximum(first, 0)
    return Divergence(
        first=first,
        broke=(first >= 0) & broke[at, columns],
        last_gap=middle[-1],
        floor=floor[at, columns],
    )


def logarithm(values: np.ndarray) -> np.ndarray:
    """Natural logarithm of norms; zero counts as the smallest number, so that it differs from everything else."""
    found: np.ndarray = np.log(np.maximum(values, SMALLEST))
    return found


def _onset(delta: np.ndarray, start: int, window: int) -> int:
    """Where in the window the gap opens: before it values are nearer to no gap, from there on to the gap it opens to."""
    ahead = delta[start : start + window]
    gap = float(np.median(delta[start + window // 2 : start + window // 2 + window]))
    nearer_to_gap = (ahead - gap / 2) * np.sign(gap)
    return start + int(np.argmin(np.concatenate([[0.0], np.cumsum(nearer_to_gap)[:-1]])))


def _median_ahead(delta: np.ndarray, window: int) -> np.ndarray:
    """Median of the `window` values from each step on; the last full window serves for all steps after it."""
    views = np.lib.stride_tricks.sliding_window_view(delta, window, axis=0)
    middle = np.median(views, axis=-1)
    return np.concatenate([middle, np.repeat(middle[-1:], window - 1, axis=0)])
