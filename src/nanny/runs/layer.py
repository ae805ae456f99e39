"""The history of one layer, parameter or gradient, with its curves and findings.

NAME is a site's name as `nanny stats` shows it, or enough of it to be the only one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.finding import Finding, NannyError
from ..core.numbers import join_names
from ..core.step import SAMPLE_STATS, Site
from ..store import reader
from .alerts import Steps, findings_of, is_within, job_verdict, sort_by_step, under_verdict
from .source import Source
from .stats import kinds_of, stats_of


@dataclass(frozen=True)
class KindHistory:
    """One site over the steps at which it was measured."""

    site: Site
    steps: np.ndarray
    values: dict[str, np.ndarray]

    @property
    def curves(self) -> dict[str, np.ndarray]:
        """What is worth drawing: typical and largest magnitude, and statistics of the kind's own."""
        out = {}
        if "norm" in self.values:
            out["typical"] = self.values["norm"] / np.sqrt(np.maximum(self.values["count"], 1))
        if "min" in self.values and "max" in self.values:
            out["largest"] = np.maximum(np.abs(self.values["min"]), np.abs(self.values["max"]))
        return out | {name: column for name, column in self.values.items() if name not in SAMPLE_STATS}

    @property
    def is_bad(self) -> np.ndarray:
        """Per step: something is not finite."""
        bad = np.zeros(len(self.steps), bool)
        for column in self.curves.values():
            bad |= ~np.isfinite(column)
        return bad


@dataclass(frozen=True)
class LayerHistory:
    """All that is on record of one layer. An operation, the data or the loss scale has findings and no measurements."""

    source: Source
    name: str
    kinds: list[KindHistory]
    findings: list[Finding]
    parameters: list[str]  # of what is inside it

    @property
    def worst_step(self) -> int:
        """The first step that is not finite, else the one with the largest magnitude."""
        history = self.kinds[0]
        bad = np.flatnonzero(history.is_bad)
        size = next(iter(history.curves.values()), np.zeros(len(history.steps)))
        return int(history.steps[bad[0] if len(bad) else np.argmax(np.nan_to_num(size))])


def layer_history(source: Source, name: str, *, kind: str | None = None, steps: Steps | None = None) -> LayerHistory:
    """The history of the layer of this name, or of the only one whose name contains it."""
    first, last = steps or (None, None)
    sites = {kind: source.sites(kind) for kind in kinds_of(source, kind)}
    names = list(dict.fromkeys(site.name for members in sites.values() for site in members))
    findings = sort_by_step([f for f in findings_of(source) if steps is None or is_within(f, steps)])
    if name not in names and any(finding.site == name for finding in findings):
        return LayerHistory(source, name, [], _under_verdict(source, findings, name), [])
    name = chosen_name(name, names)
    histories = [_site_history(source, kind, members, name, first, last) for kind, members in sites.items()]
    found = [history for history in histories if history is not None and len(history.steps)]
    if not found:
        raise NannyError(f"{name} was never measured{' in these steps' if steps else ''}; it may not have been called")
    inner = [site.name for site in sites.get("grad", ()) if site.name.startswith(f"{name}.")]
    return LayerHistory(source, name, found, _under_verdict(source, findings, name), inner)


def _under_verdict(source: Source, findings: Sequence[Finding], name: str) -> list[Finding]:
    """Those of this layer. What to change is said as the verdict on the run says it."""
    own = [finding for finding in findings if finding.site == name]
    return under_verdict(job_verdict([source], findings_of(source)), own) if own else []


def chosen_name(wanted: str, names: Sequence[str]) -> str:
    """The name that is meant: exactly, else the only one that contains it."""
    if wanted in names:
        return wanted
    holding = [name for name in names if wanted in name]
    if len(holding) == 1:
        return holding[0]
    if holding:
        raise NannyError(f"{wanted!r} could be {join_names(holding, 5)}; write one of them in full")
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
    meant = f"; did you mean {' or '.join(close)}?" if close else "; `nanny stats` lists the layers"
    raise NannyError(f"this run has no layer {wanted!r}{meant}")


def _site_history(
    source: Source, kind: str, sites: Sequence[Site], name: str, first: int | None, last: int | None
) -> KindHistory | None:
    position = next((i for i, site in enumerate(sites) if site.name == name), None)
    if position is None:
        return None
    columns = {}
    steps = np.empty(0, np.int64)
    for stat in stats_of(source, kind):
        steps, matrix = reader.samples(source.db, source.run.id, kind, stat, first, last)
        missing = 0.0 if stat == "count" else math.nan
        columns[stat] = matrix[:, position].astype(float) if position < matrix.shape[1] else np.full(len(steps), missing)
    if "count" not in columns:  # a site that is known, and no sample yet
        return None
    seen = columns["count"] > 0
    return KindHistory(sites[position], steps[seen], {stat: column[seen] for stat, column in columns.items()})
