"""Samples and histograms as bytes, and back."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from ..core.formats import HISTOGRAM_BINS
from ..core.step import Sample


def pack_sample(sample: Sample) -> tuple[str, str, bytes]:
    """The layout's `rows` and `zeros` and the packed data: rows that are zero at every site are named, not stored."""
    width = 4 * sample.sites
    zero = bytes(width)
    rows, zeros, kept = [], [], []
    for index, name in enumerate(sample.stats):
        row = sample.data[index * width : (index + 1) * width]
        if row == zero:
            zeros.append(name)
        else:
            rows.append(name)
            kept.append(row)
    return " ".join(rows), " ".join(zeros), b"".join(kept) if zeros else sample.data


def unpack_sample(data: bytes, n: int, rows: str, zeros: str) -> dict[str, np.ndarray]:
    """Statistic -> float32 per site."""
    matrix = np.frombuffer(data, "<f4").reshape(-1, n)
    stored = {name: matrix[i] for i, name in enumerate(rows.split())}
    return stored | {name: np.zeros(n, "<f4") for name in zeros.split()}


def stat(data: bytes, n: int, rows: str, zeros: str, name: str, position: int) -> float | None:
    """One value of a packed sample; the SQL function of that name."""
    names = rows.split()
    if not 0 <= position < n:
        return None
    if name not in names:
        return 0.0 if name in zeros.split() else None
    value: float = struct.unpack_from("<f", data, 4 * (names.index(name) * n + position))[0]
    return value


def pack_histograms(histograms: bytes) -> bytes:
    """Most bins are empty, so the fastest level is enough: half a kilobyte a site becomes about 35 bytes."""
    return zlib.compress(histograms, 1)


def unpack_histograms(data: bytes, n: int) -> np.ndarray:
    """uint16 [sites, HISTOGRAM_BINS]."""
    return np.frombuffer(zlib.decompress(data), "<u2").reshape(n, HISTOGRAM_BINS)
