"""From signals to the root cause: `diagnose(source)`, `examine(model, step_fn)`, `nanny diagnose`.

For instance:

    with MixedPrecisionNanny(model, optimizer, scaler) as nanny:
        ...
    for cause in diagnose(nanny):          # or diagnose("nanny_logs/metrics.db"), or a DiffReport
        print(cause.summary)

    for cause in diagnose(examine(model, step_fn)):   # step_fn(i) does one whole training step
        ...
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.finding import NannyError
from ..core.step import StepRecord
from .choose import diagnoses_of
from .evidence import Evidence, RunFacts
from .records import Diagnosis


def diagnose(source: Any, run: int | None = None) -> list[Diagnosis]:
    """Root causes of what went wrong, best first; empty on a healthy run.

    `source` is a MixedPrecisionNanny (open or closed), what `examine` returned, a store (file or folder; `run` picks one of its
    runs), or a DiffReport.
    """
    return diagnoses_of(evidence_of(source, run))


def evidence_of(source: Any, run: int | None = None) -> Evidence:
    """The same evidence, wherever it comes from."""
    if isinstance(source, Evidence):
        return source
    if isinstance(source, (str, os.PathLike)):
        return stored_evidence(Path(source), run)
    if hasattr(source, "evidence") and callable(source.evidence):
        found: Evidence = source.evidence()
        return found
    raise NannyError(
        f"diagnose() cannot read a {type(source).__name__}; give it a MixedPrecisionNanny, what examine() returned, "
        "the path of a metrics.db, or a DiffReport"
    )


def stored_evidence(path: Path, run: int | None = None) -> Evidence:
    """Also of a run that was killed: what had been written until then."""
    from ..store import reader
    from ..store.encode import dataclass_of

    with reader.reading(reader.find_stores(path)[0] if path.is_dir() else path) as db:
        row = reader.pick_run(db, run)
        facts = reader.facts(db, row.id).get("facts")
        return Evidence(
            facts=dataclass_of(RunFacts, facts) if facts else RunFacts(latest=StepRecord(0, amp_dtype=row.amp_dtype)),
            scalars=reader.scalars(db, row.id),
            findings=tuple(reader.findings(db, row.id)),
            examinations=tuple(reader.examinations(db, row.id)),
        )


def main(argv: Sequence[str]) -> int:
    from ..core.plain_json import to_text
    from ..show.term import width_of
    from ..store.reader import find_stores
    from .text import render_markdown, render_text

    options = _parser().parse_args(list(argv))
    path = find_stores(options.db)[0]
    found = diagnose(path, options.run)
    title = f"run {options.run} in {path}" if options.run else str(path)
    if options.format == "json":
        print(to_text([one.to_json() for one in found]))
    elif options.format == "markdown":
        print(render_markdown(found, title))
    else:
        print(render_text(found, title, min(width_of(sys.stdout), 120)).rstrip())
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanny diagnose", description="The root causes of what went wrong in a recorded run.", allow_abbrev=False
    )
    parser.add_argument("--db", metavar="PATH", help="a metrics.db or its folder (default: the newest in nanny_logs)")
    parser.add_argument("--run", type=int, metavar="N", help="number of the run in it, see `nanny runs` (default: the newest)")
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text")
    return parser
