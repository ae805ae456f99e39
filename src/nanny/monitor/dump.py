"""What is kept of the moment something broke: the culprit's inputs, its weights and the random state, without pickle."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..watch.tensors import short_dtype
from .trace import BadOutput

MOST_BYTES = 256 << 20


def save_bad_output(folder: Path, step: int, suspect: BadOutput, rng: Tensor | None) -> tuple[Path, str] | None:
    """Writes `step<N>_<site>.safetensors` with a JSON beside it; None if it would be too large. It holds training data."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {f"input.{i}": t for i, t in enumerate(suspect.inputs)}
    tensors |= {f"weight.{n}": p for n, p in suspect.module.named_parameters()}
    tensors |= {f"buffer.{n}": b for n, b in suspect.module.named_buffers()}
    if rng is not None:
        tensors["rng_state"] = rng
    if sum(t.numel() * t.element_size() for t in tensors.values()) > MOST_BYTES:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in suspect.bad.site)[:80]
    path = folder / f"step{step}_{safe}.safetensors"
    plain = {n: t.detach().contiguous().clone().cpu() for n, t in tensors.items()}
    about: dict[str, Any] = {
        "step": step,
        "site": suspect.bad.site,
        "module": suspect.bad.module,
        "output": {k: getattr(suspect.bad, k) for k in ("dtype", "nan", "posinf", "neginf", "count")},
        "torch": torch.__version__,
        "tensors": {
            n: {"dtype": short_dtype(t.dtype), "shape": list(t.shape), "stride": list(t.stride())} for n, t in tensors.items()
        },
        "note": "inputs and weights of the training run: treat it like the data itself",
    }
    old = os.umask(0o077)
    try:
        save_file(plain, str(path))
        path.with_suffix(".json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    finally:
        os.umask(old)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()
