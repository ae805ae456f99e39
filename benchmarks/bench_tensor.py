"""What `analyze_tensor` costs: time and memory for 10M elements, against 2 s and 4 times the tensor's own memory.

    python -m benchmarks tensor

Every case runs in a process of its own. Memory is the highest resident set during the analysis less the resident set before it,
so the tensor itself is not counted. The analysis uses one thread: its processor time, printed beside the clock, is what the
clock shows on a quiet machine. The A/A column is the same measurement twice: what it differs from 1 is noise.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

ELEMENTS = 10_000_000
SECONDS = 2.0
MEMORY = 4.0  # times the tensor
REPEATS = 6
CASES = [
    ("10000000", "float32", "bf16"),
    ("2500x4000", "float32", "bf16"),
    ("2500x4000", "float32", "fp16"),
    ("2500x4000", "float32", "fp8_e4m3"),
    ("2500x4000", "bfloat16", "bf16"),
    ("64x256x25x25", "float32", "bf16"),
    ("5000000x2", "float32", "bf16"),
]


def resident_mb(field: str) -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


def measure_case(shape: str, source: str, target: str) -> dict[str, object]:
    """In the child process: memory of the first analysis, times of all."""
    import time

    import torch

    from nanny.tensor.run import analyze_tensor

    size = [int(n) for n in shape.split("x")]
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(getattr(torch, source))
    analyze_tensor(torch.randn(64, 64), target)  # loads what is loaded once
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the high-water mark starts again from here
    before = resident_mb("VmRSS")
    times, cpu = [], []
    peak = 0.0
    for _ in range(REPEATS):
        start, busy = time.perf_counter(), time.process_time()
        analyze_tensor(x, target)
        times.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
        peak = peak or resident_mb("VmHWM") - before
    return {"times": times, "cpu": cpu, "peak": peak, "own": x.numel() * x.element_size() / 2**20}


def main() -> int:
    """0 if every case keeps both bars in its best repetition."""
    print(f"analyze_tensor, {ELEMENTS} elements; bars: {SECONDS} s, {MEMORY:g} x the tensor's memory; {REPEATS} repetitions")
    print(
        f"{'shape':>14} {'source':>9} {'target':>9} "
        f"{'best s':>7} {'median s':>9} {'cpu s':>6} {'A/A':>5} {'extra MB':>9} {'x tensor':>9}"
    )
    missed = 0
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.bench_tensor", *case]
        got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        times = got["times"]
        control = statistics.median(times[::2]) / statistics.median(times[1::2])
        ratio = got["peak"] / got["own"]
        over = min(times) > SECONDS or ratio > MEMORY
        missed += over
        print(
            f"{case[0]:>14} {case[1]:>9} {case[2]:>9} {min(times):7.2f} {statistics.median(times):9.2f} {min(got['cpu']):6.2f} "
            f"{control:5.2f} "
            f"{got['peak']:9.0f} {ratio:9.2f}{'  over the bar' if over else ''}",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    print(json.dumps(measure_case(*sys.argv[1:])))
