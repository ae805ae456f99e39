"""What a narrower format would do to the tensors behind recorded exponent histograms; arrays of sites at a time.

Shares by number and by energy: a value of exponent e weighs 4**e, because a tensor is what its large values are, and small ones
may flush by the million without anybody noticing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..core.formats import FINITE_BINS, ZERO_BIN, Format, exponent_of

FINITE = np.array(FINITE_BINS)
EXPONENTS = np.array([exponent_of(i) for i in FINITE_BINS])
ENERGY = 4.0**EXPONENTS
NOTHING = np.int64(10**6)  # an exponent no value has: "no values, so no requirement"


def top_of(target: Format) -> int:
    """Values of this binary exponent and above leave the format."""
    return target.max_exponent + 1


def flush_exponent(target: Format) -> int:
    """Values below this binary exponent become zero."""
    return math.frexp(target.flush_at)[1] - 1


def overflows(sizes: np.ndarray, target: Format) -> np.ndarray:
    """Which magnitudes leave the format, exactly; a tie rounds to infinity where there is one, and down where there is none."""
    return sizes >= target.overflow_at if target.has_inf else sizes > target.overflow_at


@dataclass(frozen=True)
class Shares:
    """Per site, of the non-zero finite values: shares by number, and by energy where the name says so."""

    count: np.ndarray
    zero: np.ndarray
    flushed: np.ndarray
    subnormal: np.ndarray
    saturated: np.ndarray
    flushed_energy: np.ndarray
    subnormal_energy: np.ndarray


def shares(histograms: np.ndarray, target: Format, scale_bits: int | np.ndarray = 0) -> Shares:
    """What casting the values times 2**scale_bits (one number, or one per site) to `target` would do."""
    filled = _filled_bins(histograms)
    counts = histograms[:, FINITE[filled]].astype(np.float64)
    bits = np.broadcast_to(np.asarray(scale_bits), (len(counts),))[:, None]
    exponents = EXPONENTS[None, filled] + bits
    flushed = exponents < flush_exponent(target)
    subnormal = (exponents < target.min_exponent) & ~flushed
    saturated = exponents >= top_of(target)
    energy = counts * ENERGY[filled]
    finite, total = counts.sum(1), energy.sum(1)
    zeros = histograms[:, ZERO_BIN].astype(np.float64)
    return Shares(
        count=finite,
        zero=_ratio(zeros, zeros + finite),
        flushed=_ratio((counts * flushed).sum(1), finite),
        subnormal=_ratio((counts * subnormal).sum(1), finite),
        saturated=_ratio((counts * saturated).sum(1), finite),
        flushed_energy=_ratio((energy * flushed).sum(1), total),
        subnormal_energy=_ratio((energy * subnormal).sum(1), total),
    )


def exponent_below(histograms: np.ndarray, energy_share: float) -> np.ndarray:
    """Per site, the lowest exponent that must survive: all below it together hold less than `energy_share` of the energy."""
    filled = _filled_bins(histograms)
    energy = histograms[:, FINITE[filled]] * ENERGY[filled]
    total = energy.sum(1)
    reached = np.cumsum(energy, axis=1) >= energy_share * total[:, None]
    found: np.ndarray = np.where(total > 0, EXPONENTS[filled][np.argmax(reached, axis=1)], NOTHING)
    return found


def highest_exponent(histograms: np.ndarray) -> np.ndarray:
    """Per site, the exponent of its largest finite value; -NOTHING where there is none."""
    filled = histograms[:, FINITE] > 0
    last = filled.shape[1] - 1 - np.argmax(filled[:, ::-1], axis=1)
    found: np.ndarray = np.where(filled.any(1), EXPONENTS[last], -NOTHING)
    return found


def _filled_bins(histograms: np.ndarray) -> np.ndarray:
    """The finite bins from the lowest to the highest that any site fills: a sixth of all, as a rule."""
    used = np.flatnonzero(histograms[:, FINITE].any(0))
    return np.arange(used[0], used[-1] + 1) if len(used) else np.arange(1)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
    return found
