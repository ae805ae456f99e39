"""How many of many inputs end badly: `python -m fuzz.measure SEED COUNT` in tests/."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from .calls import Playground, run_many
from .files import make_whole_files


def main() -> None:
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as top:
        whole = Path(top) / "whole"
        whole.mkdir()
        make_whole_files(whole)
        began = time.monotonic()
        wrong = run_many(Playground(whole, Path(top)), seed, count)
    kinds = Counter(outcome.trouble.partition(":")[0] for _, _, outcome in wrong)
    for number, case, outcome in wrong:
        words = ascii([word[:60] for word in case.argv])
        print(f"--- {number} {words} [{case.spoilt}] exit {outcome.code}\n{outcome.trouble[:900]}")
    print(f"{count} inputs with seed {seed} in {time.monotonic() - began:.0f} s: {dict(kinds)}")


main()
