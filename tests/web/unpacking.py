"""What the browser does with packed arrays and codes, for tests."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from nanny.web.arrays import INFINITE, NAN, NOT_SAMPLED, OFFSET, PER_OCTAVE, ZERO


def unpack_array(spec: dict[str, Any]) -> np.ndarray:
    """The inverse of `pack_array`."""
    dtype = np.dtype(f"<{spec['dtype']}")
    planes = np.frombuffer(zlib.decompress(base64.b64decode(spec["deflate"])), np.uint8)
    raw = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T)
    return raw.reshape(-1).view(dtype).reshape(spec["shape"])


def value_of(code: int) -> float | None:
    """The magnitude that a code stands for; None where nothing was sampled."""
    special = {NOT_SAMPLED: None, ZERO: 0.0, INFINITE: float("inf"), NAN: float("nan")}
    return special[code] if code in special else float(2.0 ** (code / PER_OCTAVE - OFFSET))
