"""Where two series part for longer than their own noise explains. Arrays [steps, series]; no store, no text.

Two runs never give the same numbers twice: batches are noisy, and low precision rounds. They have parted where the gap between
them keeps its sign and its size over a whole window of steps, above both what rounding may do and what step-to-step noise would
leave in a median of that many steps. Runs that saw the same batches share the noise, so it is that of their difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.limits import Limits

MEDIAN_NOISE = 1.2533  # standard error of a median against that of a mean, of normal noise
SIGMA_OF_MAD = 1.4826
SMALLEST = 2.0**-149  # stands for zero where logarithms are taken


@dataclass(frozen=True)
class Parting:
    """Per series: index of the first step apart (-1: never), why, and the gap there and at the end."""

    first: np.ndarray
    broke: np.ndarray  # the second is not finite where the first still is
    gap: np.ndarray  # median gap over the window that starts at `first`
    last_gap: np.ndarray  # median gap over the last window
    floor: np.ndarray  # what the gap had to exceed at that step


def window_of(steps: int, limits: Limits) -> int:
    return int(min(max(steps // 8, 1), limits.part_window))


def step_noise(values: np.ndarray, limits: Limits) -> np.ndarray:
    """Robust standard deviation of the step-to-step noise of each series around each step; 0 where it cannot be told.

    Noise changes as training goes on, so it is measured block by block. A block is short, so its neighbour and the run as a whole
    have a say too: the largest of the three counts.
    """
    with np.errstate(invalid="ignore"):  # from one infinity to the next
        jumps = np.abs(np.diff(values, axis=0))
    block = max(window_of(len(values), limits), 4)
    if len(jumps) < block:
        return np.zeros((1, values.shape[1]))
    count = len(jumps) // block
    middle = np.zeros((count, values.shape[1]))
    for i in range(count):
        middle[i] = _finite_median(jumps[i * block : (i + 1) * block if i < count - 1 else None])
    middle = np.maximum(middle, np.median(middle, axis=0))
    middle[1:] = np.maximum(middle[1:], middle[:-1])
    at = np.minimum(np.arange(len(values)) // block, count - 1)
    return SIGMA_OF_MAD / np.sqrt(2.0) * middle[at]


def _finite_median(values: np.ndarray) -> np.ndarray:
    """Of each column; 0 where there are fewer than three finite values."""
    known = np.isfinite(values)
    if known.all():
        return np.asarray(np.median(values, axis=0))
    out = np.zeros(values.shape[1])
    for column in np.flatnonzero(known.sum(0) >= 3):
        out[column] = np.median(values[known[:, column], column])
    return out


def find_parting(a: np.ndarray, b: np.ndarray, tolerance: np.ndarray, noise: np.ndarray, limits: Limits) -> Parting:
    """Where each column of `b` leaves that of `a` by more than `tolerance` and the `noise` of their gap.

    `tolerance` and `noise` (a standard deviation) have a row for each step, or one for all. NaN in both is no difference; NaN or
    infinity in `b` alone is a parting at once.
    """
    with np.errstate(invalid="ignore"):
        delta = b - a
    delta = np.where(np.isfinite(delta), delta, 0.0)
    window = window_of(len(delta), limits)
    unexplained = limits.part_zscore * MEDIAN_NOISE / np.sqrt(window) * noise
    floor = np.broadcast_to(np.maximum(tolerance, unexplained), delta.shape)
    middle = _median_ahead(delta, window)
    apart = (np.abs(middle) > floor) & (np.abs(delta) > floor) & (np.sign(middle) == np.sign(delta))
    broke = np.isfinite(a) & ~np.isfinite(b)
    either = apart | broke
    first = np.where(either.any(0), np.argmax(either, axis=0), -1)
    for column in np.flatnonzero((first >= 0) & ~broke[first, np.arange(len(first))]):
        first[column] = _onset(delta[:, column], int(first[column]), window)
    columns = np.arange(delta.shape[1])
    at = np.maximum(first, 0)
    return Parting(
        first=first,
        broke=(first >= 0) & broke[at, columns],
        gap=middle[at, columns],
        last_gap=middle[-1],
        floor=floor[at, columns],
    )


def logarithm(values: np.ndarray) -> np.ndarray:
    """Natural logarithm of norms; zero counts as the smallest number, so that it differs from everything else."""
    return np.log(np.maximum(values, SMALLEST))


def _onset(delta: np.ndarray, start: int, window: int) -> int:
    """Where in the window the gap opens: before it values are nearer to no gap, from there on to the gap it opens to."""
    ahead = delta[start : start + window]
    gap = float(np.median(delta[start + window // 2 : start + window // 2 + window]))
    nearer_to_gap = (ahead - gap / 2) * np.sign(gap)
    return start + int(np.argmin(np.concatenate([[0.0], np.cumsum(nearer_to_gap)[:-1]])))


def _median_ahead(delta: np.ndarray, window: int) -> np.ndarray:
    """Median of the `window` values from each step on; the last full window serves for all steps after it."""
    views = np.lib.stride_tricks.sliding_window_view(delta, window, axis=0)
    middle = np.median(views, axis=-1)
    return np.concatenate([middle, np.repeat(middle[-1:], window - 1, axis=0)])
