"""`python -m benchmarks [--write] [NAME...]` runs benchmarks/bench_NAME.py, all of them without a name; exits 1 if one failed.

What was measured is printed once more as one table; `--write` puts it into docs/performance.md, with date and machine.
"""

from __future__ import annotations

import compileall
import datetime
import importlib
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from .timing import noted, table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
PLACE = re.compile(r"(<!-- (\w+): .*? -->\n).*?(<!-- end of the table -->)", re.DOTALL)  # where a table is written


def available() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))


def run_one(name: str) -> bool:
    print(f"\n== {name}", flush=True)
    start = time.perf_counter()
    try:
        code = importlib.import_module(f"benchmarks.bench_{name}").main()
    except Exception:  # noqa: BLE001 - one broken benchmark must not hide the numbers of the others
        traceback.print_exc()
        code = 1
    print(f"({'ok' if not code else 'FAILED'}, {time.perf_counter() - start:.1f} s)", flush=True)
    return not code


def machine() -> str:
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    busy = os.getloadavg()[0]
    return f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads, load {busy:.1f}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def written(page: str, command: str, lines: Sequence[str], place: str = "table") -> str:
    """The page with a new table in its place."""
    head = f"`{command}`, {datetime.date.today()}: {machine()}."
    text = "\n".join(["", head, "", *lines, "", ""])
    return PLACE.sub(lambda found: found[1] + text + found[3] if found[2] == place else found[0], page)


def main(argv: Sequence[str]) -> int:
    argv, write = [word for word in argv if word != "--write"], "--write" in argv
    names = [name.removeprefix("bench_") for name in argv] or available()
    if unknown := sorted(set(names) - set(available())):
        print(f"no benchmark called {', '.join(unknown)}; there are: {', '.join(available())}", file=sys.stderr)
        return 2
    compileall.compile_dir(ROOT / "src" / "nanny", quiet=1)  # as an installer does: else each process that is timed compiles it
    failed = [name for name in names if not run_one(name)]
    if noted:
        print("\n" + "\n".join(table(noted)))
    if write:
        PAGE.write_text(written(PAGE.read_text(), " ".join(["python -m benchmarks --write", *argv]), table(noted)))
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
