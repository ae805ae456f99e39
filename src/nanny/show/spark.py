"""A curve in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

BLOCKS = "▁▂▃▄▅▆▇█"
NON_FINITE = "!"
FLAT = 0.01  # a change smaller than this is drawn as none: full height would make noise look like a trend


def sparkline(values: Sequence[float], width: int = 60, *, log: bool = False) -> str:
    """One character per step, or per group of steps when there are more than `width`.

    A group shows its largest magnitude, and `!` if anything in it is NaN or infinite: a single bad step must not be averaged
    away. `log` is for quantities that live on many orders of magnitude; zero and below are then drawn at the bottom.
    """
    groups = _groups(np.asarray(values, np.float64), width)
    peaks = [_peak(group) for group in groups]
    finite = [_height(peak, log) for peak in peaks if math.isfinite(peak)]
    known = [height for height in finite if math.isfinite(height)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    if high - low < FLAT * (1.0 if log else max(abs(low), abs(high))):
        low = high
    return "".join(_mark(peak, low, high, log) for peak in peaks)


def _groups(values: np.ndarray, width: int) -> list[np.ndarray]:
    if len(values) <= width:
        return [values[i : i + 1] for i in range(len(values))]
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def _peak(group: np.ndarray) -> float:
    bad = group[~np.isfinite(group)]
    return float(bad[0] if len(bad) else group[np.abs(group).argmax()])


def _height(value: float, log: bool) -> float:
    if not log:
        return value
    return math.log2(value) if value > 0 else -math.inf


def _mark(peak: float, low: float, high: float, log: bool) -> str:
    if not math.isfinite(peak):
        return NON_FINITE
    height = _height(peak, log)
    if height == -math.inf:
        return BLOCKS[0]
    if high == low:
        return BLOCKS[0] if not peak else BLOCKS[3]
    return BLOCKS[min(int((height - low) / (high - low) * len(BLOCKS)), len(BLOCKS) - 1)]
