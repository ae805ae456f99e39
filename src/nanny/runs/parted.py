"""Two recorded runs beside each other: what is read from the stores, and where each curve and layer statistic parts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.finding import NannyError
from ..core.formats import FP32, Format, format_of
from ..core.limits import Limits
from ..store import reader
from .alerts import matches
from .parting import find_parting, logarithm, step_noise, window_of
from .source import Source

KINDS = ("output", "output_grad", "grad", "weight")  # in the order in which a step makes them
CURVES = ("loss", "grad_norm")
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


@dataclass(frozen=True)
class Parted:
    """One curve, or one statistic (rms) of one layer; `step` is None if it does not part."""

    name: str
    kind: str  # `curve`, or the kind of the layer's tensor
    step: int | None
    broke: bool  # B is not finite where A is
    a: float  # medians over the window from `step` on, or over the last one
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
class Pair:
    """Series of both runs at their common steps, in columns; NaN where a layer was not measured, infinite where it broke."""

    kind: str
    names: list[tuple[str, int]]  # and position, in the order of execution
    steps: np.ndarray
    a: np.ndarray
    b: np.ndarray
    tolerance: np.ndarray
    log: bool  # norms are compared by their ratio


@dataclass(frozen=True)
class Comparison:
    steps: int
    same_start: bool | None  # None: there is no common first loss
    curves: list[Parted]
    layers: list[Parted]  # first to part first
    first: Parted | None
    notes: list[str]

    @property
    def for_good(self) -> bool:
        """Whether anything that parts is still apart at the end."""
        return any(p.broke or p.still_apart for p in (*self.curves, *self.layers) if p.step is not None)


def compare_runs(a: Source, b: Source, limits: Limits, glob: str | None = None) -> Comparison:
    """Aligns both runs by step and name. Runs of other seeds are compared against the noise of the one with the wider format."""
    if a.path == b.path and a.run.id == b.run.id:
        raise NannyError(f"both are run {a.run.id} of {a.path}; name two runs, `nanny runs` lists them")
    target = _narrower(a, b)
    curve_pairs = [pair for name in CURVES if (pair := _curve_pair(a, b, name, target, limits))]
    layer_pairs = [pair for kind in KINDS if (pair := _layer_pair(a, b, kind, limits, glob))]
    pairs = curve_pairs + layer_pairs
    same_start = _same_start(pairs[0], target, limits) if curve_pairs and curve_pairs[0].names == [("loss", 0)] else None
    noise = "gap" if same_start else "b" if _bits(b) > _bits(a) else "a"
    curves = [parted for pair in curve_pairs for parted in _parted(pair, limits, noise)]
    layers = [parted for pair in layer_pairs for parted in _parted(pair, limits, noise)]
    if not pairs:
        raise NannyError("the runs have no step in common, so there is nothing to compare; `nanny runs` shows their lengths")
    layers.sort(key=_order)
    apart = [parted for parted in (*layers, *curves) if parted.step is not None]
    first = min(apart, key=lambda p: (p.step, p.kind == "curve")) if apart else None
    steps = max(len(pair.steps) for pair in pairs)
    return Comparison(steps, same_start, curves, layers, first, _notes(a, b, same_start, layers))


def plain_name(name: str) -> str:
    """Without the names that wrappers (DDP, FSDP, compile, checkpointing) put in front."""
    return _WRAPPERS.sub("", name).lstrip(".")


def _curve_pair(a: Source, b: Source, name: str, target: Format, limits: Limits) -> Pair | None:
    found = [reader.scalars(source.db, source.run.id, [name]).get(name) for source in (a, b)]
    if found[0] is None or found[1] is None:
        return None
    steps, i, j = np.intersect1d(found[0][0], found[1][0], return_indices=True)
    if not len(steps):
        return None
    one, two = found[0][1][i][:, None], found[1][1][j][:, None]
    if name == "loss":
        return Pair("curve", [(name, 0)], steps, one, two, _loss_tolerance(one, target, limits), log=False)
    return Pair("curve", [(name, 0)], steps, one, two, np.array([[limits.part_norm]]), log=True)


def _same_start(loss: Pair, target: Format, limits: Limits) -> bool:
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


def _layer_pair(a: Source, b: Source, kind: str, limits: Limits, glob: str | None) -> Pair | None:
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
    return Pair(kind, names, steps, one, two, np.array([[limits.part_norm]]), log=True)


def _rms(source: Source, kind: str) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Steps, rms [steps, sites] (infinite where the tensor is not finite, NaN where it was not measured), name -> column."""
    db, run = source.db, source.run.id
    steps, norm = reader.samples(db, run, kind, "norm")
    _, count = reader.samples(db, run, kind, "count")
    measured = count > 0
    rms = np.where(np.isfinite(norm), norm.astype(np.float64), np.inf) / np.sqrt(np.maximum(count, 1))
    names = {plain_name(site.name): i for i, site in enumerate(reader.sites(db, run, kind)) if i < norm.shape[1]}
    return steps, np.where(measured, rms, np.nan), names


def _parted(pair: Pair, limits: Limits, noise: str) -> list[Parted]:
    """`noise` says whose it is: of run `a` or `b`, or of the `gap` between runs that saw the same batches."""
    left, right = (logarithm(pair.a), logarithm(pair.b)) if pair.log else (pair.a, pair.b)
    with np.errstate(invalid="ignore"):
        shared = step_noise(right - left, limits)
    sigma = shared if noise == "gap" else math.sqrt(2) * step_noise(right if noise == "b" else left, limits)
    found = find_parting(left, right, pair.tolerance, sigma, limits)
    window = window_of(len(pair.steps), limits)
    out = []
    for i, (name, position) in enumerate(pair.names):
        first, broke = int(found.first[i]), bool(found.broke[i])
        at = slice(-window, None) if first < 0 else slice(first, first + 1 if broke else first + window)
        a, b = _middle(pair.a[at, i]), _middle(pair.b[at, i])
        last_a, last_b = _middle(pair.a[-window:, i]), _middle(pair.b[-window:, i])
        out.append(
            Parted(
                name=name,
                kind=pair.kind,
                step=int(pair.steps[first]) if first >= 0 else None,
                broke=broke,
                a=a,
                b=b,
                ratio=math.exp(found.gap[i]) if pair.log and first >= 0 and not broke else _ratio(a, b),
                last_a=last_a,
                last_b=last_b,
                last_ratio=_ratio(last_a, last_b),
                still_apart=bool(abs(found.last_gap[i]) > found.floor[i]) or not math.isfinite(last_b),
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


def _ratio(a: float, b: float) -> float:
    if a == b:
        return 1.0
    return b / a if a else math.inf


def _order(parted: Parted) -> tuple[float, ...]:
    """By step; within a step in the order of execution; what never parts last, widest gap first."""
    gap = abs(math.log(parted.last_ratio)) if 0 < parted.last_ratio < math.inf else 0.0
    if parted.step is None:
        return (math.inf, 0, -gap)
    return (parted.step, KINDS.index(parted.kind), parted.position)


def _narrower(a: Source, b: Source) -> Format:
    return min((_format(a), _format(b)), key=lambda form: form.significand)


def _format(source: Source) -> Format:
    return format_of(source.run.amp_dtype) if source.run.amp_dtype else FP32


def _bits(source: Source) -> int:
    return _format(source).significand


def _notes(a: Source, b: Source, same_start: bool | None, layers: Sequence[Parted]) -> list[str]:
    out = []
    if same_start is False:
        out.append("the losses differ from the start: another seed, other data, skipped steps; only gaps above noise count")
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
