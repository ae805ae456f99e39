"""Samples and histograms as bytes, and back, and the checksum of every row of the store."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..core.formats import HISTOGRAM_BINS
from ..core.step import Sample

_CRC = struct.Struct("<I")
_POINT = struct.Struct("<qd")
_KEY = struct.Struct("<qq")


_columns_as_text = json.JSONEncoder(default=str).encode  # a damaged column may hold bytes; programs replace json.dumps


def row_crc(*values: str | float | None) -> int:
    """CRC-32 of the columns of a row, as SQLite gives them back."""
    return zlib.crc32(_columns_as_text(values).encode())


def scalar_crcs(run: int, name: str, points: Sequence[tuple[int, float | None]]) -> list[int]:
    """Of (step, value); -1 for what are no numbers."""
    seed, crc, pack, nan = _scalar_seed(run, name), zlib.crc32, _POINT.pack, math.nan
    try:  # SQLite has no -0.0, and NULL for every NaN
        return [crc(pack(step, nan if value is None or value != value else value + 0.0), seed) for step, value in points]
    except (struct.error, TypeError):
        return [-1] if len(points) == 1 else [one for point in points for one in scalar_crcs(run, name, [point])]


def point_crcs(run: int, name: str, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`scalar_crcs` of many points at once, byte by byte in all of them: a long run has half a million."""
    points = np.empty(len(steps), [("step", "<i8"), ("value", "<f8")])
    points["step"], points["value"] = steps, np.where(np.isnan(values), math.nan, values + 0.0)
    state = np.full(len(points), ~np.uint32(_scalar_seed(run, name)))
    for octet in points.view(np.uint8).reshape(-1, points.itemsize).T:
        state = _crc_table()[(state ^ octet) & 0xFF] ^ (state >> 8)
    return np.asarray(~state)


@lru_cache(maxsize=1)
def _crc_table() -> np.ndarray:
    """What zlib.crc32 looks up for each byte."""
    return np.array([zlib.crc32(bytes([i]), 0xFFFFFFFF) ^ 0xFFFFFFFF for i in range(256)], np.uint32)


@lru_cache(maxsize=256, typed=True)
def _scalar_seed(run: int, name: str) -> int:
    return row_crc(run, name)


def sample_crc(run: int, kind: str, step: int, n: int, rows: str, zeros: str) -> int:
    """Of a sample without its data; -1 for what are no numbers."""
    try:
        return zlib.crc32(_KEY.pack(step, n), _sample_seed(run, kind, rows, zeros))
    except struct.error:
        return -1


@lru_cache(maxsize=256)
def _sample_seed(run: int, kind: str, rows: str, zeros: str) -> int:
    return row_crc(run, kind, rows, zeros)


def pack_sample(sample: Sample, run: int = 0) -> tuple[str, str, int, bytes]:
    """The layout's `rows` and `zeros`, the row's CRC and the data: rows that are zero at every site are named, not stored.

    Each row is followed by a CRC of its own, so that whoever reads one statistic reads and checks no more than that.
    """
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
    names = " ".join(rows), " ".join(zeros)
    crc = sample_crc(run, sample.kind, int(sample.step), sample.sites, *names)
    return *names, crc, with_crcs(b"".join(kept), sample.sites, rows, crc)


def with_crcs(data: bytes, n: int, rows: Sequence[str], crc: int) -> bytes:
    """Packed rows of `n` values, each with its CRC behind it; `crc` is the sample's."""
    parts = ((data[4 * n * i : 4 * n * (i + 1)], name) for i, name in enumerate(rows))
    return b"".join(piece for row, name in parts for piece in (row, _CRC.pack(_stat_crc(row, name, crc))))


def _stat_crc(row: bytes | memoryview, name: str, crc: int) -> int:
    return zlib.crc32(row, zlib.crc32(name.encode(), crc))


def unpack_stat(data: object, row: int, n: int, name: str, crc: int) -> np.ndarray | None:
    """The values of one row of a packed sample, of which `crc` is the sample's; None if it is damaged. Nothing is copied."""
    start, end = 4 * (n + 1) * row, 4 * (n + 1) * (row + 1) - 4
    if not isinstance(data, bytes) or len(data) < end + 4:
        return None
    whole = _CRC.unpack_from(data, end)[0] == _stat_crc(memoryview(data)[start:end], name, crc)
    return np.frombuffer(data, "<f4", n, start) if whole else None


def unpack_sample(data: object, n: int, rows: str, zeros: str, crc: int) -> dict[str, np.ndarray] | None:
    """Statistic -> float32 per site; None if it is damaged."""
    found = {name: unpack_stat(data, row, n, name, crc) for row, name in enumerate(rows.split())}
    whole = {name: values for name, values in found.items() if values is not None}
    return {name: np.zeros(n, "<f4") for name in zeros.split()} | whole if len(whole) == len(found) else None


def stat(data: bytes, n: int, rows: str, zeros: str, name: str, position: int) -> float | None:
    """One value of a packed sample; the SQL function of that name."""
    names = rows.split()
    if not 0 <= position < n:
        return None
    if name not in names:
        return 0.0 if name in zeros.split() else None
    value: float = struct.unpack_from("<f", data, 4 * (names.index(name) * (n + 1) + position))[0]
    return value


def pack_histograms(histograms: bytes) -> bytes:
    """Most bins are empty, so the fastest level is enough: half a kilobyte a site becomes about 35 bytes."""
    return zlib.compress(histograms, 1)


def histogram_crc(run: int, kind: str, step: int, n: int, data: object) -> int:
    return zlib.crc32(data, row_crc(run, kind, step, n)) if isinstance(data, bytes) else -1


def unpack_histograms(data: bytes, n: int) -> np.ndarray:
    """uint16 [sites, HISTOGRAM_BINS]."""
    return np.frombuffer(zlib.decompress(data), "<u2").reshape(n, HISTOGRAM_BINS)


# A checksum of 64 bits as three rows of a sample, each of which a float32 holds exactly. The third also says which group of
# replicas a site belongs to: 0, nobody said that it has any.

BITS = ("bits0", "bits1", "bits2")
_TAKEN = 1 << 16  # above the last 16 bits; then the group
MOST_GROUPS = 126


def pack_bits(sums: np.ndarray, groups: Sequence[int]) -> dict[str, np.ndarray]:
    """int64 per site, and the number of its group; -1: it is not to be compared."""
    words, group = np.asarray(sums, dtype=np.int64).view(np.uint64), np.asarray(groups, dtype=np.int64)
    parts = words & np.uint64(0xFFFFFF), (words >> np.uint64(24)) & np.uint64(0xFFFFFF), words >> np.uint64(48)
    low, middle, high = (np.where(group >= 0, part.astype(np.float64), 0.0) for part in parts)
    return dict(zip(BITS, (low, middle, high + np.where(group >= 0, _TAKEN + (group << 17), 0))))


def unpack_bits(low: np.ndarray, middle: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers as they were, as uint64, and the groups."""
    first, second, third = (np.nan_to_num(np.asarray(part, np.float64)).astype(np.uint64) for part in (low, middle, high))
    words = first | second << np.uint64(24) | (third & np.uint64(0xFFFF)) << np.uint64(48)
    return words, np.where(third & np.uint64(_TAKEN), (third >> np.uint64(17)).astype(np.int64), -1)


# What a rank gave to a reduction and what came out of it, on traced steps of many processes: see nanny.measure.sketch. The last
# says in which format the result is.

REDUCTION = ("sent0", "sent1", "sent2", "sent3", "got0", "got1", "got2", "got3", "grid")
