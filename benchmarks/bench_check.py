"""Speed and memory of `nanny check`: files per second with two workers, and the time for one file with start-up.

For instance:

    python -m benchmarks check [FOLDER]
"""

from __future__ import annotations

import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from .timing import note

CPU_BAR, ONE_FILE_BAR = 15.0, 0.10  # seconds
ONE_FILE = """\
import torch

scaler = torch.amp.GradScaler("cuda")


def train(model, optimizer, data):
    for x, y in data:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


def source_tree() -> tuple[Path, str]:
    """The transformers sources if they are installed (they are not imported), else those of torch."""
    for name, said in (("transformers", ""), ("torch", " (transformers is not installed)")):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            return Path(spec.origin).parent, said
    raise SystemExit("neither transformers nor torch is installed; name a folder")


def peak_memory(process: subprocess.Popen[bytes]) -> int:
    """Largest memory of the process and its workers in bytes, sampled until it ends; what they share counts once."""
    import psutil

    peak = 0
    main = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            family = [main, *main.children(recursive=True)]
            sizes = [member.memory_full_info() for member in family]
            peak = max(peak, sum(getattr(size, "pss", size.uss) for size in sizes))
        except psutil.NoSuchProcess:
            continue
        time.sleep(0.1)
    return peak


def run_tree(folder: Path, jobs: int) -> tuple[float, int]:
    command = [sys.executable, "-m", "nanny.check", str(folder), "--jobs", str(jobs), "--statistics", "--exit-zero"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peaks: list[int] = []
    watcher = threading.Thread(target=lambda: peaks.append(peak_memory(process)))
    watcher.start()
    code = process.wait()
    seconds = time.perf_counter() - start
    watcher.join()
    if code:
        raise SystemExit(f"nanny check ended with {code}")
    return seconds, peaks[0]


def one_file_seconds(repeats: int = 9) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.py"
        file.write_text(ONE_FILE)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            done = subprocess.run([sys.executable, "-m", "nanny.check", str(file)], stdout=subprocess.DEVNULL, check=False)
            times.append(time.perf_counter() - start)
            if done.returncode != 1:
                raise SystemExit(f"the file with a mistake ended with {done.returncode}")
    return times


def main() -> None:
    folder, said = (Path(sys.argv[-1]), "") if len(sys.argv) > 1 and os.path.isdir(sys.argv[-1]) else source_tree()
    files = sum(name.endswith(".py") for _, _, names in os.walk(folder) for name in names)
    seconds, peak = run_tree(folder, jobs=2)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{folder.name}{said}: {files} files, 2 workers")
    print(f"  {files / seconds:8.0f} files/s ({seconds:.1f} s; {spent.ru_utime + spent.ru_stime:.1f} s of processor time)")
    note(f"nanny check, {files} files of {folder.name}, CPU", spent.ru_utime + spent.ru_stime, "s", CPU_BAR)
    print(f"  {peak / 2**20:8.0f} MB at the peak, all processes together")
    times = one_file_seconds()
    note("nanny check, one file with start-up", min(times), "s", ONE_FILE_BAR)
    print(f"one file with start-up: {statistics.median(times):.3f} s (fastest {min(times):.3f} s, {len(times)} runs)")


if __name__ == "__main__":
    main()
