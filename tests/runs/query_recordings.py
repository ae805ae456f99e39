"""Runs for the query tests, written through the store's own writer: numbers of real arrays, no torch."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from commands import run_command

from nanny.core.finding import Finding, Severity
from nanny.core.formats import ABOVE_BIN, BELOW_BIN, FIRST_BIN, HISTOGRAM_BINS, LAST_BIN, LOWEST_EXPONENT, NONFINITE_BIN, ZERO_BIN
from nanny.core.step import GRADIENT_STATS, SAMPLE_STATS, RunInfo, Sample, Site
from nanny.store.writer import RunWriter

ELEMENTS = 256


def histogram_of(values: np.ndarray) -> np.ndarray:
    """The exponent histogram of an array, by numpy's own frexp."""
    finite = np.isfinite(values)
    exponents = np.frexp(np.where(finite & (values != 0), values, 1.0))[1] - 1
    bins = np.clip(exponents - LOWEST_EXPONENT + FIRST_BIN, BELOW_BIN, LAST_BIN + 1)
    bins = np.where(bins > LAST_BIN, ABOVE_BIN, bins)
    bins = np.where(~finite, NONFINITE_BIN, np.where(values == 0, ZERO_BIN, bins))
    return np.bincount(bins.ravel(), minlength=HISTOGRAM_BINS).astype(np.uint16)


def stats_of(values: np.ndarray | None) -> dict[str, float]:
    """What the monitor would keep of an array; nothing was measured if there is none."""
    if values is None:
        return dict.fromkeys(SAMPLE_STATS, 0.0)
    with np.errstate(all="ignore"):
        return {
            "count": values.size,
            "min": float(values.min()),
            "max": float(values.max()),
            "norm": float(np.sqrt((values**2).sum())),
            "mean": float(values.mean()),
            "nan": int(np.isnan(values).sum()),
            "posinf": int((values == np.inf).sum()),
            "neginf": int((values == -np.inf).sum()),
        }


def sample_of(kind: str, step: int, stats: Sequence[str], arrays: Sequence[np.ndarray | None], histograms: bool) -> Sample:
    columns = [stats_of(array) for array in arrays]
    data = np.array([[column[name] for column in columns] for name in stats], "<f4").tobytes()
    empty = np.zeros(HISTOGRAM_BINS, np.uint16)
    packed = b"".join((empty if a is None else histogram_of(a)).astype("<u2").tobytes() for a in arrays) if histograms else b""
    return Sample(kind, step, tuple(stats), data, packed)


@dataclass(frozen=True)
class Recipe:
    """A run to record. Sizes are binary exponents of a typical value."""

    layers: Mapping[str, tuple[float, float]]  # name -> (of its output, of its gradients)
    steps: int = 40
    trace_every: int = 10
    amp_dtype: str = ""
    seed: int = 0
    noise: float = 0.05
    final_loss: float = 0.5
    loss_is_nan_from: int | None = None
    nan_output: tuple[int, str] | None = None  # (step, layer)
    unmeasured: tuple[str, ...] = ()  # layers that are not called
    grow: Mapping[str, float] = field(default_factory=dict)  # layer -> bits its output grows by until the end
    scale: float | None = None
    findings: tuple[Finding, ...] = ()
    meta: Mapping[str, object] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    status: str = "finished"
    started: float = 0.0

    def loss_at(self, step: int, wobble: float) -> float:
        if self.loss_is_nan_from is not None and step >= self.loss_is_nan_from:
            return math.nan
        return self.final_loss + (2.3 - self.final_loss) * math.exp(-6 * step / self.steps) * (1 + self.noise * wobble)


def many_layers(count: int) -> dict[str, tuple[float, float]]:
    return {f"transformer.encoder.layer.{i}.attention.output.dense_projection": (0.0, -8.0) for i in range(count)}


def record(folder: Path, recipe: Recipe) -> Path:
    """Writes the run and returns the store's path."""
    info = RunInfo(
        started=recipe.started or time.time(), argv=("train.py", "--lr", "0.001"), torch="2.13.0", amp_dtype=recipe.amp_dtype,
        rank=recipe.rank, world_size=recipe.world_size, meta={"cost_percent": 1.7, "optimizer": "AdamW", **recipe.meta},
    )  # fmt: skip
    writer = RunWriter(folder, info)
    dtype = recipe.amp_dtype or "float32"
    names = list(recipe.layers)
    shape = (16, ELEMENTS // 16)
    for kind in ("output", "output_grad"):
        writer.add_sites([Site(kind, name, dtype, shape) for name in names])
    for kind in ("weight", "grad"):
        writer.add_sites([Site(kind, f"{name}.weight", "float32", shape) for name in names])
    data, wobble = np.random.default_rng(recipe.seed), np.random.default_rng(100 + recipe.seed)
    for step in range(recipe.steps):
        _record_step(writer, recipe, step, data, float(wobble.normal()))
    for finding in recipe.findings:
        writer.add_finding(finding)
    writer.close(recipe.status)
    return writer.path


def _record_step(writer: RunWriter, recipe: Recipe, step: int, data: np.random.Generator, wobble: float) -> None:
    traced = step % recipe.trace_every == 0
    jitter = 2.0 ** (recipe.noise * wobble)
    values = data.normal(size=(len(recipe.layers), ELEMENTS))
    grads: list[np.ndarray | None] = [row * 2.0**grad * jitter for row, (_, grad) in zip(values, recipe.layers.values())]
    writer.add_sample(sample_of("grad", step, GRADIENT_STATS, grads, histograms=traced))
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads if g is not None))
    scalars = {"loss": recipe.loss_at(step, wobble), "grad_norm": norm, "lr": 1e-3, "traced": float(traced), "step_ms": 12.5}
    if recipe.scale is not None:
        scalars |= {"scale": recipe.scale, "skipped": float(step in (3, 4))}
    if traced:
        scalars["update_ratio"] = 1e-3
        outputs = [_output(recipe, step, name, row, size) for row, (name, (size, _)) in zip(values, recipe.layers.items())]
        writer.add_sample(sample_of("output", step, SAMPLE_STATS, outputs, histograms=True))
        smaller = [row * 2.0 ** (grad - 4) for row, (_, grad) in zip(values, recipe.layers.values())]
        writer.add_sample(sample_of("output_grad", step, SAMPLE_STATS, smaller, histograms=True))
        writer.add_sample(sample_of("weight", step, SAMPLE_STATS, [row * 0.02 for row in values], histograms=True))
    writer.add_scalars(step, scalars)


def _output(recipe: Recipe, step: int, name: str, row: np.ndarray, size: float) -> np.ndarray | None:
    if name in recipe.unmeasured:
        return None
    values = row * 2.0 ** (size + recipe.grow.get(name, 0.0) * step / max(recipe.steps - 1, 1))
    if recipe.nan_output is not None and step >= recipe.nan_output[0] and name == recipe.nan_output[1]:
        values = np.where(np.arange(len(values)) < 3, np.nan, values)
        values[5] = np.inf
    return values


CULPRIT = Finding(
    "NAN_OUTPUT",
    Severity.ERROR,
    "3 of 256 outputs are NaN, the inputs are finite",
    "compute the softmax in FP32",
    site="head.softmax",
    step=20,
    value=math.nan,
    evidence={"passed_on": ["head.out"], "count": 256, "worst": math.inf},
)
WARNED = Finding("HEADROOM", Severity.WARNING, "0.8 bits left", "use bf16", site="head.softmax", step=10, value=0.8, limit=1.0)
SYMPTOM = Finding("LOSS_NAN", Severity.ERROR, "the loss is NaN", "see the first culprit", site="loss", step=20, value=math.nan)

SICK = Recipe(
    layers={"stem": (0, -8), "body.0": (1, -9), "head.softmax": (13.0, -10), "head.out": (2, -9), "never_called": (0, -8)},
    amp_dtype="float16",
    scale=65536.0,
    nan_output=(20, "head.softmax"),
    loss_is_nan_from=20,
    unmeasured=("never_called",),
    findings=(SYMPTOM, WARNED, CULPRIT),
    meta={"repeats": [["NAN_OUTPUT", "head.softmax", 4, 23]]},
)
HEALTHY = Recipe(layers={"stem": (0, -8), "body.0": (1, -9), "head": (2, -7)})


def nanny(*args: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it."""
    done = run_command("nanny.cli", *map(str, args), cwd=cwd, environment=env)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
