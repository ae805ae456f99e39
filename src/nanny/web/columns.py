"""Worst-wins pooling of samples into a bounded number of columns.

2000 steps on 900 pixels lose a NaN of one step if neighbours are averaged, and a long run would not fit into a page. So samples
are grouped, and of each group every layer keeps its worst value and the step at which it stood. Sampling is uneven (dense around
errors, thin later), and groups have an equal number of samples: where more was looked at, more is seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ABSENT = np.float32(-1.0)
GAP = 4.0  # a stretch without samples this many times the usual distance stays empty in the picture


def order_keys(values: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """float32 whose maximum is the worst: not measured < zero < finite < infinite < NaN."""
    keys = np.abs(values).astype(np.float32)
    keys = np.where(np.isinf(keys), np.finfo(np.float32).max, keys)
    keys = np.where(np.isnan(keys), np.inf, keys)
    return np.where(measured, keys, ABSENT).astype(np.float32)


def groups_of(samples: int, most: int) -> np.ndarray:
    """First sample of each group, and the end: at most `most` groups of the same size."""
    size = -(-samples // max(most, 1)) if samples else 1
    return np.append(np.arange(0, samples, size), samples)


@dataclass(frozen=True)
class Pooled:
    """The worst key of each site in each group, and which of the group's samples it was."""

    keys: np.ndarray  # float32 [sites, groups]
    at: np.ndarray  # uint16 [sites, groups]


def pooled(blocks: list[np.ndarray]) -> Pooled:
    """From one block of keys [samples of a group, sites] per group; sites met later are missing in earlier blocks."""
    sites = max((block.shape[1] for block in blocks), default=0)
    keys = np.full((len(blocks), sites), ABSENT, np.float32)
    at = np.zeros((len(blocks), sites), np.uint16)
    for i, block in enumerate(blocks):
        width = block.shape[1]
        where = block.argmax(0) if len(block) else np.zeros(width, np.int64)
        at[i, :width] = np.minimum(where, 65535)
        keys[i, :width] = block[where, np.arange(width)]
    return Pooled(np.ascontiguousarray(keys.T), np.ascontiguousarray(at.T))


def reach(steps: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """float64 [groups, 2]: from where to where on the step axis each group's column is drawn.

    A column begins at its own first step, so that no damage shows before it was seen, and reaches to the next one, unless that is
    far away: then the stretch between was not sampled.
    """
    if not len(steps):
        return np.zeros((0, 2))
    first, last = steps[bounds[:-1]].astype(float), steps[bounds[1:] - 1].astype(float)
    usual = _usual_distance(steps)
    following = np.append(first[1:], last[-1] + usual)
    far = following - last > GAP * usual
    return np.stack([first, np.where(far, last + usual, following)], axis=1) - 0.5


def _usual_distance(steps: np.ndarray) -> float:
    """The largest distance between samples that is no exception: dense ones around an error must not make the rest look empty."""
    distances = np.sort(np.diff(steps))[::-1]
    exceptions = max(2, len(distances) // 100)
    return float(distances[min(exceptions, len(distances) - 1)]) if len(distances) else 1.0
