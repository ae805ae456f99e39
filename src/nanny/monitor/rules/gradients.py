"""Gradients against their own history: explosion, vanishing, dead layers, underflow.

Absolute numbers say little: a norm scales with the normalisation of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import numpy as np

from ...core.finding import Severity
from ...core.formats import FINITE_BINS, FP16, exponent_of
from ...core.numbers import share, short
from ...core.step import QuietSteps, SiteTable, StepRecord
from ...diagnose.history import RunHistory, deviation, grad_norm
from ..registry import Observation, rule


@rule("GRAD_EXPLOSION", Severity.ERROR, wakes=lambda quiet, run: run.exploding or len(run.norms) < run.limits.baseline_steps)
def grad_explosion(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The gradient norm is far above its own history.

    Why: one huge update can push the weights out of a region from which they never return, and out of the fp16 range.

    Fix: clip with `clip_grad_norm_` (after `scaler.unscale_` under a GradScaler), lower the learning rate, or warm up longer.
    """
    norm = grad_norm(step)
    if norm is None or not math.isfinite(norm) or norm <= 0 or step.skipped:
        return
    found = list(_explosion(step, run, norm))
    is_error = any(seen.severity in (None, Severity.ERROR) for seen in found)
    if not (is_error and run.exploding):  # one divergence is one finding, whichever layer leads at the moment
        yield from found
    run.exploding = is_error


def _explosion(step: StepRecord, run: RunHistory, norm: float) -> Iterator[Observation]:
    limits, lately = run.limits, run.norms.comparable(step.norm_unit)
    if len(run.norms) < limits.baseline_steps:
        yield from _by_rail(step, run, norm)
        return
    known = deviation(lately, norm) if len(lately) >= limits.baseline_steps else None
    if known is None or known.ratio <= limits.grad_ratio or known.zscore <= limits.grad_zscore:
        return
    lasting = run.norm_high + 1 >= limits.explosion_steps
    severity = Severity.ERROR if lasting or known.ratio > limits.explosion_ratio else Severity.INFO
    if step.clipped is not None and severity is Severity.ERROR and not lasting:
        severity = Severity.INFO  # clipping has dealt with it
    worst = _worst_layer(step, run)
    yield Observation(
        f"gradient norm {short(norm)} is {known.ratio:.3g} times its median {known.median:.3g}"
        + (f", for {run.norm_high + 1} steps" if lasting else "")
        + (f"; most in `{worst}`" if worst else "")
        + (f"; clipped to {step.clipped:g}" if step.clipped is not None else ""),
        worst or "gradients",
        severity=severity,
        value=norm,
        limit=known.median * limits.grad_ratio,
        evidence={"zscore": known.zscore, "ratio": known.ratio, "median": known.median, "clipped": step.clipped},
    )


def _by_rail(step: StepRecord, run: RunHistory, norm: float) -> Iterator[Observation]:
    """Before there is a history a huge norm counts only beside something else that is huge.

    Outputs, updates that replace the weights, or the growth since the first steps: a run that diverges is over by step 20.
    """
    limits = run.limits
    if norm <= limits.grad_rail_high:
        return
    traced = step if step.outputs is not None else run.last_trace
    rms = 0.0
    if traced is not None and traced.outputs is not None:
        norms, n = np.asarray(traced.outputs.columns["norm"]), np.asarray(traced.outputs.columns["count"])
        values = norms[n > 0] / np.sqrt(n[n > 0])
        rms = float(np.max(values[np.isfinite(values)], initial=0.0))
    held = sum(u.count * u.weight_rms**2 for u in step.updates)  # of all weights: a bias that began near 0 is always replaced
    replaced = (sum(u.count * u.update_rms**2 for u in step.updates) / held) ** 0.5 if held else 0.0
    known = deviation(run.norms, norm)
    grown = known.ratio if known is not None else 0.0
    if rms > limits.activation_rail or replaced > limits.update_rail or grown > limits.explosion_ratio:
        worst = _largest_layer(step)
        yield Observation(
            f"gradient norm {short(norm)} at the very start"
            + (f", with outputs of {rms:.3g} (rms)" if rms > limits.activation_rail else "")
            + (f", {short(grown)} times the steps before" if grown > limits.explosion_ratio else "")
            + (f", and the update is {replaced:.3g} times the weights" if replaced > limits.update_rail else ""),
            worst or "gradients",
            severity=Severity.INFO if max(grown / limits.explosion_ratio, replaced / limits.update_rail) <= 1 else None,
            value=norm,
            limit=limits.grad_rail_high,
            evidence={"output_rms": rms, "update_ratio": replaced, "ratio": grown},
            hint="check the initialisation and the scale of inputs and targets; then the learning rate",
        )


def _largest_layer(step: StepRecord) -> str:
    if step.grads is None or not len(step.grads.names):
        return ""
    return step.grads.names[int(np.nanargmax(np.asarray(step.grads.columns["norm"])))]


def _worst_layer(step: StepRecord, run: RunHistory) -> str:
    """The parameter that rose most against its own past, among those that carry the norm."""
    if step.grads is None:
        return ""
    norms = np.asarray(step.grads.columns["norm"], dtype=np.float64)
    drift = np.where(norms > 0.1 * np.nanmax(norms), run.grads.drift(step.grads), -np.inf)
    return step.grads.names[int(np.argmax(drift))] if np.isfinite(drift).any() else ""


def _may_have_vanished(quiet: QuietSteps, run: RunHistory) -> bool:
    weakest = np.maximum(-quiet.low, quiet.high).min()
    return bool(
        quiet.whole_norms.min() < run.limits.grad_rail_low or weakest < run.limits.grad_none or run.limits.vanish_steps <= 1
    )


@rule("GRAD_VANISH", Severity.WARNING, wakes=_may_have_vanished)
def grad_vanish(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Gradients have become so small that nothing is learned, though the loss is not small.

    Why: by underflow in fp16, by saturation, or by the architecture; which one, the FP32 comparison tells.

    Fix: in fp16 use a GradScaler or BF16. Else look at initialisation, saturating activations and missing normalisation.
    """
    norm = grad_norm(step)
    if norm is None or not math.isfinite(norm) or step.skipped or _loss_converged(step, run):
        return
    limits = run.limits
    if 0 < norm < limits.grad_rail_low and step.loss:
        yield Observation(
            f"the norm of all gradients is {short(norm)} at a loss of {step.loss:.3g}",
            "gradients",
            value=norm,
            limit=limits.grad_rail_low,
        )
        return
    yield from _faded_layers(step, run, norm)
    yield from _vanished_layers(step, run, norm)


def _loss_converged(step: StepRecord, run: RunHistory) -> bool:
    if step.loss is None or not run.first_losses:
        return False
    return abs(step.loss) <= run.limits.converged * abs(median(run.first_losses))


def _faded_layers(step: StepRecord, run: RunHistory, norm: float) -> Iterator[Observation]:
    """Layers that never had a gradient to speak of while the whole has one: it fades on the way back to them.

    A whole layer, never a lone bias: before a norm or a softmax its true gradient is 0, and what is seen is rounding. Nor one
    behind layers that get theirs: nothing fades on the way to them, it is 0 by what is computed (a router of one choice).
    """
    limits = run.limits
    if step.grads is None or run.steps < limits.vanish_steps or not step.lr:
        return
    if step.grads.weakest >= limits.grad_none:
        return
    columns = step.grads.columns
    largest = np.maximum(np.abs(np.asarray(columns["min"])), np.abs(np.asarray(columns["max"])))
    norms = np.asarray(columns["norm"], dtype=np.float64)
    lasting = _lasting(run, step.grads.names, norms, norm)
    if not lasting.any():
        return
    layers = _layers_of(step.grads.names, step.grads.shapes)
    if not layers.names:
        return
    most = np.maximum.reduceat(largest[layers.members], layers.first_member)
    tops = np.maximum.reduceat(norms[layers.weights], layers.first_weight)
    is_top = norms[layers.weights] == np.repeat(tops, np.diff([*layers.first_weight, len(layers.weights)]))
    lasts = np.logical_or.reduceat(is_top & lasting[layers.weights], layers.first_weight)
    first = int(np.argmax([*(tops >= limits.grad_vanish_ratio * norm), True]))  # from here on layers get theirs
    faded = [(layers.names[i], float(tops[i])) for i in np.flatnonzero((most < limits.grad_none) & lasts) if i < first]
    if faded:
        layer, smallest = min(faded, key=lambda pair: pair[1])
        yield Observation(
            f"its gradient norm is {short(smallest)}, of all gradients {short(norm)}: it fades on the way back"
            + (f", in {len(faded)} layers" if len(faded) > 1 else ""),
            layer,
            value=smallest,
            limit=limits.grad_none,
            evidence={"layers": [name for name, _ in faded]},
        )


class _Layers(NamedTuple):
    """Layers that are looked at: the parameters of all, one layer after the other, and where each layer begins."""

    names: list[str]
    members: np.ndarray
    first_member: np.ndarray
    weights: np.ndarray  # of the members, those that count
    first_weight: np.ndarray


@lru_cache(maxsize=4)
def _layers_of(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> _Layers:
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        layers.setdefault(name.rpartition(".")[0], []).append(i)
    known = [
        (layer, members, [i for i in members if len(shapes[i]) > 1] or (members if len(members) > 1 else []))
        for layer, members in layers.items()
    ]
    known = [one for one in known if one[2]]
    return _Layers([layer for layer, _, _ in known], *_join([m for _, m, _ in known]), *_join([w for _, _, w in known]))


def _join(parts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([i for part in parts for i in part], dtype=np.int64), np.cumsum([0, *map(len, parts)], dtype=np.int64)[:-1]


def _lasting(run: RunHistory, names: tuple[str, ...], norms: np.ndarray, norm: float) -> np.ndarray:
    """Far below the norm of all for several steps, and not on its way up, as a branch that begins at zero is."""
    past = run.grads.ring(names)
    known = ~np.isnan(past)
    many = known.sum(axis=0) >= run.limits.vanish_steps
    small = np.maximum(norms, np.max(past, axis=0, initial=-np.inf, where=known)) < run.limits.grad_vanish_ratio * norm
    out = many & small & (norms > 0)
    for i in np.flatnonzero(out & (norms > np.min(past, axis=0, initial=np.inf, where=known))):
        out[i] = norms[i] <= 2 * float(np.median(past[known[:, i], i]))
    return out


def _vanished_layers(step: StepRecord, run: RunHistory, norm: float) -> Iterator[Observation]:
    """Layers far below their own median for several steps, while the whole is not."""
    if step.grads is None or len(run.norms) < run.limits.baseline_steps:
        return
    at = run.grads.columns(step.grads.names)  # may make new ones, so it comes first
    if not run.grads.has_streaks and run.limits.vanish_steps > 1:
        return
    low = run.grads.low_steps[at] + 1 >= run.limits.vanish_steps
    whole = deviation(run.norms, norm) if low.any() else None
    if whole is None or whole.ratio < 0.1:
        return
    norms = np.asarray(step.grads.columns["norm"], dtype=np.float64)
    vanished: list[tuple[float, float, str]] = []
    for i in np.flatnonzero(low & (norms > 0)):
        known = deviation(run.grads.past(step.grads.names[i]), float(norms[i]))
        if known and known.ratio < run.limits.grad_vanish_ratio and -known.zscore > run.limits.grad_zscore:
            vanished.append((known.ratio, float(norms[i]), step.grads.names[i]))
    if vanished:
        ratio, value, name = min(vanished)
        also = f" (and {len(vanished) - 1} more)" if len(vanished) > 1 else ""
        yield Observation(
            f"gradient norm {short(value)} is {share(ratio)} of its own median{also}, others are as before",
            name, value=value, limit=value / ratio * run.limits.grad_vanish_ratio,
            evidence={"parameters": [n for _, _, n in vanished]},
        )  # fmt: skip


@rule("DEAD_LAYER", Severity.WARNING, needs="traced")
def dead_layer(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """A layer that runs and is trained has had gradients of exactly zero for several steps.

    Why: dead units, a detached branch, or gradients that all flushed to zero in fp16.

    Fix: under fp16 check the GradScaler (gradients below 6e-8 become 0). Else look for units that are never active, a
    `.detach()`, or an output that the loss ignores.
    """
    if step.grads is None or not step.traced or step.skipped or not step.lr:
        return
    norm = grad_norm(step)
    if norm is None or not norm > 0:
        return
    run.grads.columns(step.grads.names)
    at = {n: i for i, n in enumerate(run.grads.names)}
    norms = np.asarray(step.grads.columns["norm"], dtype=np.float64)
    layers: dict[str, list[int]] = {}
    for i, name in enumerate(step.grads.names):
        layers.setdefault(name.rpartition(".")[0], []).append(i)
    dead: dict[str, int] = {}
    for layer, members in layers.items():
        steps = min(int(run.grads.zero_steps[at[step.grads.names[i]]]) + 1 for i in members)
        usual = max(int(run.grads.zero_record[at[step.grads.names[i]]]) for i in members)
        if any(f"{layer}.".startswith(f"{expert}.") for expert in step.experts):
            continue
        if layer in step.called and all(norms[i] == 0 for i in members) and steps >= max(run.limits.dead_steps, 4 * usual):
            dead[layer] = steps
    if dead:
        layer, steps = list(dead.items())[-1]  # the one nearest to the loss: behind it the gradient is zero for all
        fp16 = step.amp_dtype == "float16"
        yield Observation(
            f"its gradients have been exactly 0 for {steps} steps while the rest learns"
            + (f", and those of {len(dead) - 1} more layers" if len(dead) > 1 else "")
            + (f" (fp16, loss scale {step.scale:g})" if fp16 and step.scale else " (fp16, no GradScaler)" if fp16 else ""),
            layer, value=0.0, evidence={"layers": list(dead), "steps": steps},
        )  # fmt: skip


@rule("UNDERFLOW", Severity.WARNING, needs="zero_outputs output_grads outputs")
def underflow(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Values that matter are below the normal range of fp16: they lose bits or become 0.

    Why: below 6.1e-5 fp16 loses precision bit by bit, at 3e-8 a value is 0. Judged by energy: small values beside large ones
    do not count.

    Fix: gradients: use a GradScaler, or raise its scale. Activations: rescale them, or compute this part in FP32 or BF16.
    """
    for site in step.zero_outputs:
        yield Observation(
            "every value of its fp16 output is 0 although its input is not: the result is below 3e-8", site, value=0.0
        )
    yield from _underflowing_gradients(step, run)
    for name, part in _small_fp16(step.outputs, run):
        if name not in step.zero_outputs and part < 1:
            yield Observation(
                f"{share(part)} of the energy of its fp16 output lies below {short(FP16.min_normal)}, where bits are lost",
                name, severity=Severity.INFO, value=part, limit=run.limits.subnormal_energy_warn,
            )  # fmt: skip


def _underflowing_gradients(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """A branch with small gradients is no fault; if most of the model's gradients are down there, the scale is wrong."""
    if step.output_grads is None or step.skipped or step.bad_calls or not math.isfinite(step.loss or 0.0):
        return
    total = sum(d == "float16" for d in step.output_grads.dtypes)
    small = _small_fp16(step.output_grads, run)
    zero = [name for name, part in small if part == ALL_ZERO]
    if not small or (len(zero) == total and not step.loss):  # a loss of 0 has no gradient to lose
        return
    if len(zero) == len(small) < total:
        return  # nothing on its way to zero, others as usual: a layer or gate that begins at 0 gives no gradient to what feeds it
    most = len(small) > run.limits.underflow_sites * total
    scale = f"loss scale {step.scale:g}" if step.scale else "no GradScaler"
    yield Observation(
        f"the fp16 gradients of {len(small)} of {total} modules are below {short(FP16.min_normal)}, where bits are lost"
        + (f", {len(zero)} of them all 0" if zero else "")
        + f" ({scale})",
        small[-1][0],  # nearest to the loss
        severity=None if most else Severity.INFO,
        value=len(small) / total,
        limit=run.limits.underflow_sites,
        evidence={"kind": "output_grad", "sites": [n for n, _ in small], "zero": zero, "scale": step.scale},
    )


ALL_ZERO = 2.0  # instead of a share, which is undefined then


def _small_fp16(table: SiteTable | None, run: RunHistory) -> list[tuple[str, float]]:
    """fp16 sites whose energy is subnormal, or that are zero altogether, in the order of execution."""
    if table is None or table.histograms is None:
        return []
    out = []
    for i, name in enumerate(table.names):
        if table.dtypes[i] == "float16" and table.columns["count"][i] > 0:
            part = subnormal_energy(table.histograms[i])
            part = ALL_ZERO if part is None else part
            if part > run.limits.subnormal_energy_warn:
                out.append((name, part))
    return out


def subnormal_energy(histogram: np.ndarray) -> float | None:
    """Share of the sum of squares that lies in fp16's subnormal zone; None if all is zero."""
    exponents = np.array([exponent_of(i) for i in FINITE_BINS], dtype=np.float64)
    n = histogram[list(FINITE_BINS)].astype(np.float64)
    if not n.sum():
        return None
    energy = n * np.exp2(2 * (exponents - exponents[n > 0].max()))
    return float(energy[exponents < FP16.min_exponent].sum() / energy.sum())
