"""What recording costs: CPU of the writer thread, size on disk, time to read a heat map back, wait for a finding.

run: python -m benchmarks store

A site-sample is the eight statistics of one site at one step. "Full" samples have no row of zeros; "healthy" ones have no
NaN and no Inf, so three of their eight rows take no space.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanny.core.finding import Finding, Severity
from nanny.core.formats import FIRST_BIN, HISTOGRAM_BINS
from nanny.core.step import SAMPLE_STATS, RunInfo, Sample, Site
from nanny.store.reader import connect, samples
from nanny.store.writer import RunWriter

SITES, STEPS, REPETITIONS = 300, 3334, 5
HEAT_MAP_STEPS, HISTOGRAM_STEPS, FINDINGS = 2000, 50, 200
WRITE_BAR_SECONDS, READ_BAR_MS, DISK_BAR_BYTES = 1.0, 50.0, 40.0


@dataclass(frozen=True)
class Cost:
    cpu_seconds: float  # of the writer thread, from opening the store to closing it
    bytes_per_site_sample: float
    read_ms: float


def make_samples(count: int, healthy: bool, histograms: bool = False) -> list[Sample]:
    """Random statistics; exponent histograms of normal values of many scales, some with zeros, as activations have them."""
    random = np.random.default_rng(0)
    out = []
    for step in range(count):
        rows = random.lognormal(size=(len(SAMPLE_STATS), SITES)).astype("<f4")
        if healthy:
            rows[-3:] = 0
        packed = make_histograms(random) if histograms else b""
        out.append(Sample("output", step, SAMPLE_STATS, rows.tobytes(), packed))
    return out


def make_histograms(random: np.random.Generator) -> bytes:
    counts = np.zeros((SITES, HISTOGRAM_BINS), "<u2")
    for site in range(SITES):
        values = random.standard_normal(16384) * 10.0 ** random.uniform(-5, 1)
        bins = np.frexp(values)[1] + 125 + FIRST_BIN
        bins[: 8192 * (site % 2)] = 0
        counts[site] = np.bincount(bins, minlength=HISTOGRAM_BINS)
    return counts.tobytes()


def record(folder: str, batch: list[Sample]) -> RunWriter:
    writer = RunWriter(folder, RunInfo(started=time.time()), queue_bytes=1 << 30)
    writer.add_sites([Site("output", f"layer{i}") for i in range(SITES)])
    for sample in batch:
        writer.add_sample(sample)
    writer.close(timeout=60)
    if writer.failed or writer.dropped:
        raise RuntimeError(f"{writer.dropped} samples lost: {writer.failed}")
    return writer


def disk_bytes(writer: RunWriter) -> int:
    return writer.path.stat().st_size


def write_and_read(batch: list[Sample]) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        writer = record(folder, batch)
        db = connect(writer.path)
        start = time.perf_counter()
        _, matrix = samples(db, writer.run, "output", "norm", last=HEAT_MAP_STEPS - 1)
        read_ms = 1e3 * (time.perf_counter() - start)
        db.close()
        if matrix.shape != (min(len(batch), HEAT_MAP_STEPS), SITES):
            raise RuntimeError(f"read back {matrix.shape}")
        return Cost(writer.cpu_seconds, disk_bytes(writer) / (len(batch) * SITES), read_ms)


def finding_ms(folder: Path) -> list[float]:
    """Each call returns when the finding is committed."""
    writer = RunWriter(folder, RunInfo(started=time.time()))
    waits = []
    for step in range(FINDINGS):
        start = time.perf_counter()
        writer.add_finding(Finding("NAN", Severity.ERROR, "output has NaN", site="layer1", step=step))
        waits.append(1e3 * (time.perf_counter() - start))
    writer.close()
    return waits


def main() -> int:
    met = True

    def line(what: str, value: float, bar: float, unit: str) -> None:
        nonlocal met
        met = met and value <= bar
        print(f"  {what:<44} {value:8.3g} {unit:<5} bar {bar:g}: {'met' if value <= bar else 'MISSED'}")

    for name, healthy in (("full", False), ("healthy", True)):
        batch = make_samples(STEPS, healthy)
        costs = [write_and_read(batch) for _ in range(REPETITIONS)]
        print(f"{SITES} sites x {STEPS} steps = {SITES * STEPS:,} {name} site-samples, median of {REPETITIONS}")
        line("writer thread, CPU", statistics.median(c.cpu_seconds for c in costs), WRITE_BAR_SECONDS, "s")
        line("disk per site-sample", statistics.median(c.bytes_per_site_sample for c in costs), DISK_BAR_BYTES, "bytes")
        read_ms = statistics.median(c.read_ms for c in costs)
        line(f"heat map of {SITES} x {HEAT_MAP_STEPS} read", read_ms, READ_BAR_MS, "ms")

    plain = make_samples(HISTOGRAM_STEPS, healthy=True)
    with_histograms = make_samples(HISTOGRAM_STEPS, healthy=True, histograms=True)
    pairs = [(write_and_read(plain), write_and_read(with_histograms)) for _ in range(REPETITIONS)]
    size = statistics.median(b.bytes_per_site_sample - a.bytes_per_site_sample for a, b in pairs)
    cpu = statistics.median(b.cpu_seconds - a.cpu_seconds for a, b in pairs)
    per_million = cpu / (HISTOGRAM_STEPS * SITES) * 1e6
    print(f"an exponent histogram on top: {size:.1f} bytes per site-sample, {per_million:.2f} s of CPU per million (no bar)")

    with tempfile.TemporaryDirectory() as folder:
        waits = finding_ms(Path(folder))
    print(f"a finding, until it is committed: median {statistics.median(waits):.2f} ms, worst {max(waits):.1f} ms (no bar)")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
