"""The run's own curves (loss, gradient norm, learning rate, loss scale ...), thinned so that no spike and no NaN is lost."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runs.source import Source
from ..store import reader
from .arrays import packed

NAMES = ("loss", "grad_norm", "lr", "scale", "skipped", "unchanged_share", "update_ratio", "step_ms")
MOST_GROUPS = 1500


def curves_of(source: Source, after: int | None = None, most_groups: int = MOST_GROUPS) -> dict[str, Any]:
    """Name -> steps and values; of skipped steps only those that were."""
    out = {}
    first = None if after is None else after + 1
    for name, (steps, values) in reader.scalars(source.db, source.run.id, NAMES, first=first).items():
        if name == "skipped":
            steps, values = steps[values > 0], values[values > 0]
        kept = kept_points(values, most_groups)
        out[name] = {"steps": packed(steps[kept].astype(np.int32)), "values": packed(values[kept].astype(np.float32))}
    return out


def kept_points(values: np.ndarray, most_groups: int) -> np.ndarray:
    """Indices of the points to draw: the last, and of each group the first, the extremes and the first that is not finite."""
    if len(values) <= 2 * most_groups:
        return np.arange(len(values))
    size = -(-len(values) // most_groups)
    kept = {len(values) - 1}
    for start in range(0, len(values), size):
        group = values[start : start + size]
        finite = np.isfinite(group)
        kept.add(start)
        if finite.any():
            kept.add(start + int(np.argmin(np.where(finite, group, np.inf))))
            kept.add(start + int(np.argmax(np.where(finite, group, -np.inf))))
        if not finite.all():
            kept.add(start + int(np.argmin(finite)))
    return np.array(sorted(kept))
