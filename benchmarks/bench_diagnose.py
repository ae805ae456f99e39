"""How often a diagnosis is right: tests/corpus under the monitor, tests/scripts under `nanny run`, the models of tests/gallery.

Goals: cause 90 %, culprit 85 %, precision_caused 95 %, no false alarm;
what is told 90 % sure is right so often. `python -m benchmarks diagnose`; with NAMES in the
environment variable NANNY_CASES (comma separated) only those; NANNY_CORPUS=scripts asks one of the three only.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import nanny

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

BANDS = ((0.9, 1.0), (0.7, 0.9), (0.0, 0.7))  # how sure; below 0.7 the words say "suspected"
GOALS = {"cause": 0.90, "culprit": 0.85, "precision": 0.95}


@dataclass(frozen=True)
class Answer:
    name: str
    faulty: bool
    said: str = ""  # cause, culprit and confidence; nothing is said: ""
    sure: float = 0.0
    cause: bool = False
    culprit: bool | None = None  # None: nobody wrote down what is right
    precision: bool | None = None


def _of_corpus(wanted: Sequence[str]) -> Iterator[Answer]:
    from corpus import asked
    from corpus.asking import built, watched

    for program in asked("diagnose"):
        if wanted and program.name not in wanted:
            continue
        best = next(iter(nanny.diagnose(watched(built(program), program.steps))), None)
        faulty = program.role == "planted"
        if best is None:
            yield Answer(program.name, faulty, culprit=False, precision=False)
            continue
        right = faulty and best.cause == program.cause
        culprit, precision = best.culprit in program.culprits, best.precision_caused == program.precision_caused
        yield Answer(program.name, faulty, f"{best.cause} at {best.culprit}", best.confidence, right, culprit, precision)


def _of_scripts(wanted: Sequence[str]) -> Iterator[Answer]:
    from scripts import EXPECTED, said_of

    for about in EXPECTED:
        missing = [library for library in about.get("needs", ()) if importlib.util.find_spec(library) is None]
        if missing or (wanted and about["file"] not in wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = said_of(about["file"], Path(folder))
        said = f"{found['cause']} at {found['culprit']}" if found else ""
        right = found.get("cause") in about["cause"]
        yield Answer(about["file"], not about["healthy"], said, found.get("confidence", 0.0), right)


def _of_gallery(wanted: Sequence[str]) -> Iterator[Answer]:
    from gallery import tables, watched

    for library, why, cases in tables():
        if why:
            print(f"  not asked: {library}: {why}")
        for case in cases:
            for faulty in (True, False) if not wanted or case.name in wanted else ():
                best = next(iter(nanny.diagnose(watched(case, faulty=faulty))), None)
                if best is None:
                    yield Answer(case.name, faulty, culprit=False, precision=False)
                    continue
                culprit = any(best.culprit == n or best.culprit.startswith(f"{n}." if n else "") for n in case.culprits)
                right, precision = faulty and best.cause in case.causes, best.precision_caused == case.precision
                yield Answer(case.name, faulty, f"{best.cause} at {best.culprit}", best.confidence, right, culprit, precision)


CORPORA = {"corpus": _of_corpus, "scripts": _of_scripts, "gallery": _of_gallery}


def reliability(told: Sequence[tuple[float, bool]]) -> Iterator[str]:
    """Of what was told so sure, how much was right; a false alarm is wrong."""
    for low, high in BANDS:
        band = [is_right for sure, is_right in told if low <= sure < high or sure == high == 1.0]
        share = f"{sum(band) / len(band):6.1%}" if band else "     -"
        yield f"told {low:4.0%} to {high:4.0%}: right in {sum(band):3} of {len(band):3}  {share}"


def _judged(answers: Sequence[Answer]) -> bool:
    """Prints how many were right, and whether that is enough."""
    planted, healthy = [a for a in answers if a.faulty], [a for a in answers if not a.faulty]
    met = True
    for name, goal in GOALS.items():
        known = [value for a in planted if (value := getattr(a, name)) is not None]
        share = sum(known) / len(known) if known else 1.0
        met = met and share >= goal
        print(f"  {name:14} {sum(known):3} of {len(known)}  {share:6.1%}  goal {goal:.0%}")
    false_alarms = sum(bool(a.said) for a in healthy)
    print(f"  {'false alarms':14} {false_alarms:3} of {len(healthy)}           goal 0")
    return met and not false_alarms


def main() -> int:
    torch.set_num_threads(1)
    wanted = [name for name in os.environ.get("NANNY_CASES", "").split(",") if name]
    only = os.environ.get("NANNY_CORPUS", "")
    every: list[Answer] = []
    began = time.perf_counter()
    met = True
    for corpus, ask in CORPORA.items():
        answers = []
        for one in ask(wanted) if only in ("", corpus) else ():
            answers.append(one)
            wrong = [name for name in GOALS if getattr(one, name) is False] if one.faulty else ["false alarm"] if one.said else []
            if wrong:
                print(f"  {', '.join(wrong):24} {one.name}: said {one.said or 'nothing'}", flush=True)
        if answers:
            print(f" {corpus}")
            met = _judged(answers) and met
        every += answers
    print(" how reliable, over all")
    for line in reliability([(a.sure, a.faulty and a.cause) for a in every if a.said]):
        print(f"  {line}")
    print(f"  {time.perf_counter() - began:.0f} s for {len(every)} trainings")
    return 0 if met else 1
