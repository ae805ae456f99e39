"""What one waits for who has just fetched nanny: the first words of `nanny demo`, its end, and the tests before a commit.

    python -m benchmarks make

By the clock, because that is what one waits for: on a quiet machine only. Setting up an environment is no part of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .timing import note

ROOT = Path(__file__).parent.parent
WORDS_BAR, DEMO_BAR, TEST_BAR = 15.0, 45.0, 200.0  # seconds


def demo() -> None:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "nanny", "demo"],
            cwd=folder,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )
        assert process.stdout is not None
        process.stdout.readline()
        words = time.perf_counter() - start
        process.stdout.read()
        process.wait()
        whole = time.perf_counter() - start
    print(f"  nanny demo: first words after {words:.1f} s, in all {whole:.1f} s")
    note("nanny demo, first words", words, "s", WORDS_BAR)
    note("nanny demo, in all", whole, "s", DEMO_BAR)


def tests() -> int:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=ROOT, capture_output=True, text=True)
    whole = time.perf_counter() - start
    print(f"  make test: {whole:.0f} s; {done.stdout.rstrip().splitlines()[-1]}")
    note("make test", whole, "s", TEST_BAR)
    return done.returncode


def main() -> int:
    demo()
    return tests()


if __name__ == "__main__":
    raise SystemExit(main())
