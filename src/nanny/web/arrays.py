"""Numbers for the browser: typed arrays, deflated, in base64; magnitudes as 16-bit codes that keep their order.

A code stands for the logarithm of a magnitude, so that one encoding serves every quantity: not sampled < zero < finite <
infinite < NaN. `page.js` reads them with the same constants, which it gets from `CODES`. In histograms a cell is the share of the
values in one binary order, as a code of one byte: 0 is none, 1 the smallest share that a sample can show, 255 is all.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from ..runs.histograms import ExponentHistograms
from ..runs.matrices import Columns, KindMatrices, Matrix

NOT_SAMPLED, ZERO, LOWEST = 0, 1, 2
INFINITE, NAN = 65534, 65535
PER_OCTAVE = 128  # codes per factor of two: values are true to 0.3 %
OFFSET = 160  # binary orders below one that still have a code; fp32 ends 149 below
CODES = {"zero": ZERO, "infinite": INFINITE, "nan": NAN, "perOctave": PER_OCTAVE, "offset": OFFSET}

SHARES_PER_OCTAVE = 18  # of histograms: 14 octaves in 254 codes

_NAMES = {"uint8": "u1", "uint16": "u2", "int32": "i4", "float32": "f4", "float64": "f8"}


def pack_array(array: np.ndarray) -> dict[str, Any]:
    """`{"dtype": "u2", "shape": [rows, columns], "deflate": base64}`, little endian.

    Wider numbers are laid out byte plane by byte plane: the high bytes of neighbours are alike and shrink to almost nothing.
    """
    plain = np.ascontiguousarray(array)
    name = _NAMES[plain.dtype.name]
    raw = plain.astype(plain.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, plain.dtype.itemsize)
    data = zlib.compress(np.ascontiguousarray(raw.T).tobytes(), 6)
    return {"dtype": name, "shape": list(plain.shape), "deflate": base64.b64encode(data).decode("ascii")}


def codes_of(keys: np.ndarray) -> np.ndarray:
    """Order keys (see `runs.matrices.order_keys`) as uint16 codes."""
    with np.errstate(divide="ignore", invalid="ignore"):
        finite = np.rint((np.log2(np.maximum(keys, 0).astype(np.float64)) + OFFSET) * PER_OCTAVE)
    codes = np.clip(np.where(keys > 0, finite, ZERO), LOWEST, INFINITE - 1)
    codes = np.where(keys == 0, ZERO, codes)
    codes = np.where(keys < 0, NOT_SAMPLED, codes)
    codes = np.where(keys >= np.finfo(np.float32).max, INFINITE, codes)
    return np.where(np.isposinf(keys), NAN, codes).astype(np.uint16)


def share_codes(counts: np.ndarray) -> np.ndarray:
    """uint8 of counts [..., bins], as shares of their sum over the last axis."""
    total = np.maximum(counts.sum(-1, keepdims=True), 1)
    with np.errstate(divide="ignore"):
        codes = np.rint(254 + SHARES_PER_OCTAVE * np.log2(counts / total)) + 1
    return np.where(counts > 0, np.clip(codes, 1, 255), 0).astype(np.uint8)


def pack_columns(columns: Columns) -> dict[str, Any]:
    whole = {"steps": pack_array(columns.steps.astype(np.int32)), "bounds": pack_array(columns.bounds.astype(np.int32))}
    return {**whole, "reach": pack_array(columns.reach)}


def pack_matrix(matrix: Matrix) -> dict[str, Any]:
    at = matrix.at
    return {
        "codes": pack_array(codes_of(matrix.keys)),
        "at": None if at is None else pack_array(at if at.max() > 255 else at.astype(np.uint8)),
    }


def pack_kind(kind: KindMatrices) -> dict[str, Any]:
    """The matrices of one kind of site, without their names."""
    return {
        **pack_columns(kind.columns),
        "quantities": {name: pack_matrix(matrix) for name, matrix in kind.quantities.items()},
    }


def pack_histograms(found: ExponentHistograms) -> dict[str, Any]:
    shares = pack_array(share_codes(found.counts))
    return {**pack_columns(found.columns), "lowest": found.lowest, "highest": found.highest, "shares": shares}


def pack_curve(steps: np.ndarray, values: np.ndarray, most_groups: int) -> dict[str, Any]:
    kept = kept_points(values, most_groups)
    return {"steps": pack_array(steps[kept].astype(np.int32)), "values": pack_array(values[kept].astype(np.float32))}


def kept_points(values: np.ndarray, most_groups: int) -> np.ndarray:
    """Indices of the points to draw: the last, and of each group the first, the extremes and the first that is not finite."""
    if len(values) <= 2 * most_groups:
        return np.arange(len(values))
    size = -(-len(values) // most_groups)
    starts = np.arange(0, len(values), size)
    groups = np.full((len(starts), size), np.nan)
    groups.flat[: len(values)] = values
    finite = np.isfinite(groups)
    lowest, highest = np.where(finite, groups, np.inf).argmin(1), np.where(finite, groups, -np.inf).argmax(1)
    kept = np.unique([*starts, *(starts + lowest), *(starts + highest), *(starts + finite.argmin(1)), len(values) - 1])
    return kept[kept < len(values)]
