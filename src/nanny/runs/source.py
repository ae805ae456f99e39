"""The run that a question is about, once it is open (`opening` does that): which file, which run in it, how it is called."""

from __future__ import annotations

import shlex
import sqlite3
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..core.finding import Finding, NannyError
from ..core.formats import FORMATS, FP32, Format, format_of
from ..core.step import Site
from ..diagnose.evidence import Evidence
from ..diagnose.run import stored_evidence
from ..store import reader
from ..store.reader import RunRow

MOST_DIGITS = 18  # of a number that SQLite can hold


@dataclass(frozen=True)
class Source:
    path: Path
    db: sqlite3.Connection
    run: RunRow
    flags: str = ""  # what leads here on a command line: ` --db PATH --run N`
    dataset: str = ""
    elsewhere: tuple[Finding, ...] = ()  # of ranks of the same job that are not opened: a dataset has too many
    ranks_in_dataset: int = 0
    loss_of_all: tuple[np.ndarray, np.ndarray] | None = None  # steps, average over the ranks of a dataset

    @property
    def shown(self) -> str:
        """Where it lies, as it is typed: a dataset may have a URL."""
        return self.dataset or str(self.path)

    @cached_property
    def evidence(self) -> Evidence:
        """What the diagnosis rests on: read once, for an open run is of one moment."""
        return stored_evidence(self.db, self.run)

    @cached_property
    def _sites(self) -> dict[str, list[Site]]:
        return {}

    def sites(self, kind: str) -> list[Site]:
        """As `reader.sites`, read once."""
        if kind not in self._sites:
            self._sites[kind] = reader.sites(self.db, self.run.id, kind)
        return self._sites[kind]

    def command(self, *words: object) -> str:
        """A command that asks about this same run, to be copied from the terminal."""
        return f"nanny {shlex.join(map(str, words))}{self.flags}"


def seconds_of(run: RunRow) -> float | None:
    """From its first step to its end: what its cost is a part of. Without a record of that, as long as the store was open."""
    took = run.meta.get("run_seconds")
    if isinstance(took, (int, float)):
        return float(took)
    return None if run.finished is None else run.finished - run.started


def title_of(source: Source) -> str:
    """`run 3 in nanny_logs/metrics.db (fp16, torch 2.13.0, finished): train.py --lr 1e-3`."""
    run = source.run
    facts = [run.amp_dtype or "no autocast", f"torch {run.torch}" if run.torch else "", run.status]
    rank = f", rank {run.rank} of {run.world_size}" if run.world_size > 1 else ""
    command = f": {shlex.join(run.argv)}" if run.argv else ""
    return f"run {run.id}{rank} in {source.shown} ({', '.join(fact for fact in facts if fact)}){command}"


def own_format(source: Source) -> Format:
    """The low format that the run was in: autocast's, else that of most outputs or weights; FP32 where they are not low."""
    if source.run.amp_dtype:
        return format_of(source.run.amp_dtype)
    return max(_usual_format(source, "output"), _usual_format(source, "weight"), key=lambda pair: pair[1])[0]


def keeps_low_weights(source: Source) -> bool:
    """Whether updates are added to weights of few digits: there is no FP32 copy of them."""
    return _usual_format(source, "weight")[1] > 0


def _usual_format(source: Source, kind: str) -> tuple[Format, int]:
    """The low format that most sites of a kind are in, and of how many; FP32 and 0 where most are not."""
    dtypes = [site.dtype for site in source.sites(kind)]
    low = Counter(form for form in FORMATS.values() for dtype in dtypes if form.bits < FP32.bits and dtype == form.torch_name)
    form, count = low.most_common(1)[0] if low else (FP32, 0)
    return (form, count) if 2 * count > len(dtypes) else (FP32, 0)


def step_range(text: str) -> tuple[int | None, int | None]:
    """`100`, `100:200`, `100:` and `:200`; both ends belong to the range."""
    first, colon, last = text.partition(":")
    try:
        a, b = (int(part) if part else None for part in (first[: MOST_DIGITS + 1], last[: MOST_DIGITS + 1]))
    except ValueError:
        raise NannyError(f"{text!r} is no range of steps; write 100, 100:200, 100: or :200") from None
    if not colon:
        b = a
    if max(len(first), len(last)) > MOST_DIGITS or (a, b) == (None, None) or (a is not None and b is not None and a > b):
        raise NannyError(f"{text!r} is no range of steps; write 100, 100:200, 100: or :200")
    return a, b
