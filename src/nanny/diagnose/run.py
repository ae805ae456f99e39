"""From signals to the root cause: `diagnose(source)`, `examine(model, step_fn)`.

For instance:

    with MixedPrecisionNanny(model, optimizer, scaler) as nanny:
        ...
    for cause in diagnose(nanny):          # or diagnose("nanny_logs/metrics.db"), or a DiffReport
        print(cause.summary)

    for cause in diagnose(examine(model, step_fn)):   # step_fn(i) does one whole training step
        ...
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

from ..core.finding import NannyError
from ..core.step import StepRecord
from ..store import reader
from ..store.encode import dataclass_of
from ..store.files import find_stores
from ..store.reader import RunRow
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
        path = Path(source)
        with reader.reading(find_stores(path)[0] if path.is_dir() else path) as db, reader.one_moment(db):
            return stored_evidence(db, reader.pick_run(db, run))
    if hasattr(source, "evidence") and callable(source.evidence):
        found: Evidence = source.evidence()
        return found
    raise NannyError(
        f"diagnose() cannot read a {type(source).__name__}; give it a MixedPrecisionNanny, what examine() returned, "
        "the path of a metrics.db, or a DiffReport"
    )


def stored_evidence(db: sqlite3.Connection, run: RunRow) -> Evidence:
    """What the store says about a run; also of one that was killed: what had been written until then."""
    facts = reader.facts(db, run.id).get("facts")
    return Evidence(
        facts=dataclass_of(RunFacts, facts) if facts else RunFacts(latest=StepRecord(0, amp_dtype=run.amp_dtype)),
        scalars=reader.scalars(db, run.id),
        findings=tuple(reader.findings(db, run.id)),
        examinations=tuple(reader.examinations(db, run.id)),
    )
