"""Norms that grow geometrically within one step: over the calls of one module (time), or over the layers (depth)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.step import Growth
from .trace import Call

FEWEST = 6
LEAST_EACH = 1.15  # per call or layer; a healthy residual stream grows more slowly
LEAST_WHOLE = 1e3
FADED = 1e-5  # what is left of a gradient after all calls


def growths_of(calls: Sequence[Call], values: Any) -> Iterator[Growth]:
    """`values` are the rows of the trace: count, min, max, sum of squares, sum."""
    with np.errstate(invalid="ignore", divide="ignore"):
        rms = np.sqrt(values[3] / values[0])
    by_site: dict[str, list[Call]] = {}
    for call in calls:
        by_site.setdefault(call.site, []).append(call)
    for site, members in by_site.items():
        forward = [float(rms[c.output]) for c in members]
        backward = [float(rms[c.gradient[0]]) for c in reversed(members) if c.gradient]
        yield from _one("forward", site, "calls", forward)
        yield from _one("backward", site, "calls", backward)
    first = [members[0] for members in by_site.values()]
    distinct = list({c.output: c for c in first}.values())  # a container hands on the row of its last child
    forward = [float(rms[c.output]) for c in distinct]
    backward = [float(rms[c.gradient[0]]) for c in reversed(distinct) if c.gradient]
    weighty = next((c.site for c in distinct if c.has_parameters), distinct[0].site if distinct else "")
    yield from _one("forward", weighty, "layers", forward)
    yield from _one("backward", weighty, "layers", backward)


def _one(direction: str, site: str, unit: str, norms: Sequence[float]) -> Iterator[Growth]:
    """The longest stretch at the beginning or end that grows in nearly every member; what overflowed ends it."""
    known = []
    for norm in norms:
        if not np.isfinite(norm):
            break
        if norm > 0:
            known.append(norm)
    if len(known) < FEWEST:
        return
    ratios = np.diff(np.log(known))
    steady = float(np.mean(ratios > 0)) > 0.7
    whole = float(np.exp(ratios.sum()))
    if steady and whole > LEAST_WHOLE and whole ** (1 / len(ratios)) > LEAST_EACH:
        yield Growth(direction, site, unit, len(known), whole)
    if unit == "calls" and float(np.mean(ratios < 0)) > 0.7 and whole < FADED:
        yield Growth(direction, site, unit, len(known), whole)
