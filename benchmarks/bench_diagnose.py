"""How often a diagnosis is right: the programs of tests/corpus under the monitor with its defaults, then `diagnose`.

Goals: cause 90 %, culprit 85 %, precision_caused 95 %, no false alarm;
what is told 90 % sure is right so often. `python -m benchmarks diagnose`; with NAMES in the
environment variable NANNY_CASES (comma separated) only those.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import nanny

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

BANDS = ((0.9, 1.0), (0.7, 0.9), (0.0, 0.7))  # how sure; below 0.7 the words say "suspected"
GOALS = {"cause": 0.90, "culprit": 0.85, "precision": 0.95}


def reliability(told: Sequence[tuple[float, bool]]) -> Iterator[str]:
    """Of what was told so sure, how much was right; a false alarm is wrong."""
    for low, high in BANDS:
        band = [is_right for sure, is_right in told if low <= sure < high or sure == high == 1.0]
        share = f"{sum(band) / len(band):6.1%}" if band else "     -"
        yield f"told {low:4.0%} to {high:4.0%}: right in {sum(band):3} of {len(band):3}  {share}"


def main() -> int:
    from corpus import asked
    from corpus.asking import built, watched

    torch.set_num_threads(1)
    wanted = [name for name in os.environ.get("NANNY_CASES", "").split(",") if name]
    programs = [p for p in asked("diagnose") if not wanted or p.name in wanted]
    planted = [p for p in programs if p.role == "planted"]
    right = dict.fromkeys(GOALS, 0)
    false_alarms = 0
    told: list[tuple[float, bool]] = []  # how sure, and whether the cause was right
    began = time.perf_counter()
    for program in programs:
        found = nanny.diagnose(watched(built(program), program.steps))
        best = found[0] if found else None
        if best is not None:
            told.append((best.confidence, best.cause == program.cause))
        if program.role != "planted":
            false_alarms += best is not None
            if best is not None:
                print(f"  false alarm   {program.name}: {best.summary}", flush=True)
            continue
        said = {
            "cause": best is not None and best.cause == program.cause,
            "culprit": best is not None and best.culprit in program.culprits,
            "precision": best is not None and best.precision_caused == program.precision_caused,
        }
        for name, is_right in said.items():
            right[name] += is_right
        if not all(said.values()):
            wrong = ", ".join(name for name, is_right in said.items() if not is_right)
            answer = "nothing" if best is None else f"{best.cause} at {best.culprit} ({best.precision_caused})"
            print(f"  {wrong:24} {program.name}: {program.cause} at {program.culprits[0]}, said {answer}", flush=True)
    for name, goal in GOALS.items():
        share = right[name] / len(planted) if planted else 1.0
        print(f"  {name:14} {right[name]:3} of {len(planted)}  {share:6.1%}  goal {goal:.0%}")
    print(f"  {'false alarms':14} {false_alarms:3} of {len(programs) - len(planted)}           goal 0")
    for line in reliability(told):
        print(f"  {line}")
    print(f"  {time.perf_counter() - began:.0f} s for {len(programs)} trainings")
    met = all(right[name] >= goal * len(planted) for name, goal in GOALS.items()) and not false_alarms
    return 0 if met else 1
