"""Questions to a dataset of 4,096 ranks: 200 sites, 100 steps each.

Sixteen ranks are recorded and exported; the others are links to them, since a rank is known by its folder. So the files are as
many and as large as real ones; what a network adds is not in it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nanny import cli
from nanny.core.finding import Finding, Severity
from nanny.core.step import GRADIENT_STATS, SAMPLE_STATS, RunInfo, Sample, Site
from nanny.store.packing import pack_bits
from nanny.store.writer import RunWriter

RANKS, RECORDED, SITES, STEPS, TRACED = 4096, 16, 200, 100, 25
BAR_SECONDS, BAR_BYTES = 5.0, 1e9
FIRST = 5  # of the recorded ones is in trouble


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        files, dataset = Path(folder) / "files", Path(folder) / "dataset"
        for rank in range(RECORDED):
            record(files, rank)
        began = time.perf_counter()
        with open(os.devnull, "w") as nothing:
            kept, sys.stdout = sys.stdout, nothing
            try:
                cli.main(["export", "--format", "parquet", "--db", str(files), "-o", str(dataset)])
            finally:
                sys.stdout = kept
        exported = (time.perf_counter() - began) / RECORDED
        of_rank = dataset / "run=1" / "rank=0"
        size = sum(path.stat().st_size for path in of_rank.rglob("*") if path.is_file())
        file_count = sum(path.is_file() for path in of_rank.rglob("*"))
        for rank in range(RECORDED, RANKS):
            copy(dataset / "run=1" / f"rank={rank % RECORDED}", dataset / "run=1" / f"rank={rank}")
        print(f"a rank of {SITES} sites and {STEPS} steps: {size / 1e6:.2f} MB in {file_count} files, {exported:.2f} s to export")
        missed = 0
        for words in (["summary"], ["alerts", "--severity", "error"]):
            seconds, cpu, most = ask(words, dataset)
            bar = f" (bar {BAR_SECONDS:g} s, {BAR_BYTES / 1e9:g} GB)" if words == ["summary"] else ""
            print(f"nanny {words[0]} on {RANKS:,} ranks: {seconds:.1f} s ({cpu:.1f} s of processor), {most / 1e6:.0f} MB{bar}")
            missed += bool(bar) and (seconds > BAR_SECONDS or most > BAR_BYTES)
        return int(missed > 0)


def record(folder: Path, rank: int) -> None:
    info = RunInfo(
        time.time(), ("train.py",), "2.13.0", RANKS, rank, "bfloat16", {"replicas": [list(range(RANKS))], "shards": {}}
    )
    writer = RunWriter(folder, info)
    names = [f"blocks.{i // 8}.part{i % 8}.weight" for i in range(SITES)]
    for kind in ("grad", "weight"):
        writer.add_sites([Site(kind, name, "float32", (64, 64)) for name in names])
    random = np.random.default_rng(rank)
    for step in range(STEPS):
        traced = step % TRACED == 0
        for kind, stats in (("grad", GRADIENT_STATS), ("weight", SAMPLE_STATS)):
            if kind == "grad" or traced:
                columns = {name: random.random(SITES) for name in stats} | {"count": np.full(SITES, 4096.0)}
                if traced:
                    columns |= pack_bits(np.arange(SITES) + step, [1] * SITES)
                writer.add_sample(Sample(kind, step, tuple(columns), np.array(list(columns.values()), "<f4").tobytes()))
        writer.add_scalars(step, {"loss": 2.0 + random.random(), "grad_norm": 1.0, "lr": 1e-3, "step_ms": 100.0, "updates": step})
    if rank == FIRST:
        writer.add_finding(Finding("NAN", Severity.ERROR, "3 outputs are NaN", "look there", site="blocks.3", step=57))
    writer.close()


def copy(rank: Path, to: Path) -> None:
    for path in rank.rglob("*"):
        if path.is_file():
            target = to / path.relative_to(rank)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)


def ask(words: list[str], dataset: Path) -> tuple[float, float, float]:
    """Seconds by the clock and of the processor with the start of the command, and the most memory that it had."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "nanny", *words, "--db", str(dataset)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu, used.ru_maxrss * 1024.0
