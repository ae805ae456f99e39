"""Numbers for the browser: typed arrays, deflated, in base64; magnitudes as 16-bit codes that keep their order.

A code stands for the logarithm of a magnitude, so that pooling is a plain maximum and one encoding serves every quantity:
not sampled < zero < finite < infinite < NaN. `page.js` reads them with the same constants, which it gets from `CODES`.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

NOT_SAMPLED, ZERO, LOWEST = 0, 1, 2
INFINITE, NAN = 65534, 65535
PER_OCTAVE = 128  # codes per factor of two: values are true to 0.3 %
OFFSET = 160  # binary orders below one that still have a code; fp32 ends 149 below
CODES = {"zero": ZERO, "infinite": INFINITE, "nan": NAN, "perOctave": PER_OCTAVE, "offset": OFFSET}

_NAMES = {"uint8": "u1", "uint16": "u2", "int32": "i4", "float32": "f4", "float64": "f8"}


def packed(array: np.ndarray) -> dict[str, Any]:
    """`{"dtype": "u2", "shape": [rows, columns], "deflate": base64}`, little endian.

    Wider numbers are laid out byte plane by byte plane: the high bytes of neighbours are alike and shrink to almost nothing.
    """
    plain = np.ascontiguousarray(array)
    name = _NAMES[plain.dtype.name]
    raw = plain.astype(plain.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, plain.dtype.itemsize)
    data = zlib.compress(np.ascontiguousarray(raw.T).tobytes(), 6)
    return {"dtype": name, "shape": list(plain.shape), "deflate": base64.b64encode(data).decode("ascii")}


def unpacked(spec: dict[str, Any]) -> np.ndarray:
    """The inverse of `packed`; the browser has its own."""
    dtype = np.dtype(f"<{spec['dtype']}")
    planes = np.frombuffer(zlib.decompress(base64.b64decode(spec["deflate"])), np.uint8)
    raw = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T)
    return raw.reshape(-1).view(dtype).reshape(spec["shape"])


def codes_of(keys: np.ndarray) -> np.ndarray:
    """Order keys (see `columns.order_keys`) as uint16 codes."""
    with np.errstate(divide="ignore", invalid="ignore"):
        finite = np.rint((np.log2(np.maximum(keys, 0).astype(np.float64)) + OFFSET) * PER_OCTAVE)
    codes = np.clip(np.where(keys > 0, finite, ZERO), LOWEST, INFINITE - 1)
    codes = np.where(keys == 0, ZERO, codes)
    codes = np.where(keys < 0, NOT_SAMPLED, codes)
    codes = np.where(keys >= np.finfo(np.float32).max, INFINITE, codes)
    return np.where(np.isposinf(keys), NAN, codes).astype(np.uint16)


def value_of(code: int) -> float | None:
    """The magnitude that a code stands for; None where nothing was sampled."""
    special = {NOT_SAMPLED: None, ZERO: 0.0, INFINITE: float("inf"), NAN: float("nan")}
    return special[code] if code in special else float(2.0 ** (code / PER_OCTAVE - OFFSET))
