"""How long the answer takes, as whole processes on a run of 1000 sites and 1000 traced steps, and on one of 15,000 steps.

run: python -m benchmarks query

`python -c "import numpy"` stands beside the commands: what the interpreter costs before a question is asked.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nanny.core.finding import Finding, Severity
from nanny.core.formats import FIRST_BIN, HISTOGRAM_BINS
from nanny.core.step import GRADIENT_STATS, SAMPLE_STATS, RunInfo, Sample, Site
from nanny.store.writer import RunWriter

from .timing import note

SITES, STEPS, FINDINGS, REPETITIONS = 1000, 1000, 200, 5
SUMMARY_BAR_SECONDS = 0.5
LONG_STEPS, LONG_SITES, LONG_BAR_SECONDS = 15_000, 100, 0.3  # of CPU, with the start of the interpreter


def record(folder: Path) -> Path:
    """Two kinds of sites at every step, histograms at every tenth, eight scalars a step, some findings."""
    rng = np.random.default_rng(0)
    writer = RunWriter(folder, RunInfo(time.time(), argv=("train.py",), amp_dtype="float16"), queue_bytes=1 << 34)
    for kind in ("output", "grad"):
        writer.add_sites([Site(kind, f"encoder.layer.{i}.attention.dense", "float16", (64, 64)) for i in range(SITES)])
    histograms = np.zeros((SITES, HISTOGRAM_BINS), "<u2")
    histograms[:, FIRST_BIN + 110 : FIRST_BIN + 130] = rng.integers(0, 800, (SITES, 20))
    for step in range(STEPS):
        values = np.abs(rng.normal(size=(len(SAMPLE_STATS), SITES))).astype("<f4")
        values[0], values[5:] = 4096, 0
        taken = histograms.tobytes() if step % 10 == 0 else b""
        for kind in ("output", "grad"):
            writer.add_sample(Sample(kind, step, SAMPLE_STATS, values.tobytes(), taken))
        names = ("loss", "grad_norm", "lr", "scale", "skipped", "traced", "update_ratio", "step_ms")
        writer.add_scalars(step, dict.fromkeys(names, 1.0 + step % 7))
    for i in range(FINDINGS):
        place = f"encoder.layer.{i}.attention.dense"
        writer.add_finding(Finding("GRAD_EXPLOSION", Severity.WARNING, "12 times its median", "clip", site=place, step=i))
    writer.close(timeout=120)
    return writer.path


def record_long(folder: Path) -> Path:
    """Gradients and eight scalars at every step, as an untraced run writes them."""
    rng = np.random.default_rng(0)
    writer = RunWriter(folder, RunInfo(time.time(), argv=("train.py",), amp_dtype="float16"), queue_bytes=1 << 34)
    writer.add_sites([Site("grad", f"layer.{i}.weight", "float32", (4,)) for i in range(LONG_SITES)])
    for step in range(LONG_STEPS):
        row = rng.lognormal(size=LONG_SITES).astype("<f4")
        data = np.stack([np.full(LONG_SITES, 4, "<f4"), row, -row, row])
        writer.add_sample(Sample("grad", step, GRADIENT_STATS, data.tobytes()))
        names = ("loss", "grad_norm", "lr", "scale", "skipped", "traced", "update_ratio", "step_ms")
        writer.add_scalars(step, dict.fromkeys(names, 1.0 + step % 7))
    writer.close(timeout=120)
    return writer.path


def cpu_seconds_of(command: list[str]) -> float:
    """The least of some runs, of the processor's time: what else runs on the machine does not count."""
    taken = []
    for _ in range(REPETITIONS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


def seconds_of(command: list[str]) -> float:
    """The fastest of some runs: other work on the machine only adds to it."""
    taken = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = str(record(Path(folder)))
        size = Path(path).stat().st_size / 1e6
        print(f"{SITES} sites x {STEPS} steps, {size:.0f} MB; whole processes, fastest of {REPETITIONS}")
        print(f"  import numpy        {seconds_of(['-c', 'import numpy, sqlite3, argparse']):6.2f} s")
        ask = ["-m", "nanny.cli"]
        summary = seconds_of([*ask, "summary", "--db", path])
        print(f"  summary             {summary:6.2f} s")
        for command in (["alerts"], ["stats", "--step", "500"], ["layer", "encoder.layer.500.attention.dense"], ["runs"]):
            print(f"  {command[0]:<18}  {seconds_of([*ask, *command, '--db', path]):6.2f} s")
        print(f"  whatif fp16         {seconds_of([*ask, 'whatif', '--dtype', 'fp16', '--db', path]):6.2f} s")
        long = cpu_seconds_of([*ask, "summary", "--db", str(record_long(Path(folder) / "long"))])
        bare = cpu_seconds_of(["-c", "import numpy, sqlite3, argparse"])
        print(f"  summary of {LONG_STEPS:,} steps: {long:.2f} s of CPU, of which numpy alone {bare:.2f}")
        note(f"nanny summary of {LONG_STEPS:,} steps, CPU (numpy alone {bare:.2f})", long, "s", LONG_BAR_SECONDS)
    met, long_met = summary <= SUMMARY_BAR_SECONDS, long <= LONG_BAR_SECONDS
    print(f"bar for summary {SUMMARY_BAR_SECONDS} s: {'met' if met else 'MISSED'}")
    print(f"bar for a long one {LONG_BAR_SECONDS} s of CPU: {'met' if long_met else 'MISSED'}")
    return 0 if met and long_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
