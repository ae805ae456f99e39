"""`python -m benchmarks [NAME...]` runs benchmarks/bench_NAME.py, all of them without a name; exits 1 if one failed."""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path


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


def main(argv: Sequence[str]) -> int:
    names = [name.removeprefix("bench_") for name in argv] or available()
    if unknown := sorted(set(names) - set(available())):
        print(f"no benchmark called {', '.join(unknown)}; there are: {', '.join(available())}", file=sys.stderr)
        return 2
    failed = [name for name in names if not run_one(name)]
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
