"""How often a diagnosis is right: the programs of tests/corpus under the monitor with its defaults, then `diagnose`.

Goals: cause 90 %, culprit 85 %, precision_caused 95 %, no false alarm. `python -m benchmarks diagnose`; with NAMES in the
environment variable NANNY_CASES (comma separated) only those.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import nanny

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

GOALS = {"cause": 0.90, "culprit": 0.85, "precision": 0.95}


def main() -> int:
    from corpus import asked
    from corpus.asking import built, watched

    torch.set_num_threads(1)
    wanted = [name for name in os.environ.get("NANNY_CASES", "").split(",") if name]
    programs = [p for p in asked("diagnose") if not wanted or p.name in wanted]
    planted = [p for p in programs if p.role == "planted"]
    right = dict.fromkeys(GOALS, 0)
    false_alarms = 0
    began = time.perf_counter()
    for program in programs:
        found = nanny.diagnose(watched(built(program), program.steps))
        best = found[0] if found else None
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
            told = "nothing" if best is None else f"{best.cause} at {best.culprit} ({best.precision_caused})"
            print(f"  {wrong:24} {program.name}: {program.cause} at {program.culprits[0]}, said {told}", flush=True)
    for name, goal in GOALS.items():
        share = right[name] / len(planted) if planted else 1.0
        print(f"  {name:14} {right[name]:3} of {len(planted)}  {share:6.1%}  goal {goal:.0%}")
    print(f"  {'false alarms':14} {false_alarms:3} of {len(programs) - len(planted)}           goal 0")
    print(f"  {time.perf_counter() - began:.0f} s for {len(programs)} trainings")
    met = all(right[name] >= goal * len(planted) for name, goal in GOALS.items()) and not false_alarms
    return 0 if met else 1
