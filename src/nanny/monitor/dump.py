"""What is kept of the moment something broke: the culprit's inputs, its weights and the random state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..core.examination import Place
from ..watch.dump import Dump, digest, save_dump
from .trace import BadOutput

MOST_BYTES = 256 << 20


def save_bad_output(folder: Path, step: int, suspect: BadOutput, rng: Tensor | None) -> tuple[Path, str] | None:
    """The module's call as a dump, and its digest; None if it would be too large."""
    module, bad = suspect.module, suspect.bad
    state: dict[str, Tensor] = {f"weight.{name}": p for name, p in module.named_parameters()}
    state |= {f"buffer.{name}": b for name, b in module.named_buffers()}
    dump = Dump(
        op=f"{type(module).__module__}.{type(module).__qualname__}",
        args=suspect.inputs,
        state=state if rng is None else {**state, "rng_state": rng},
        options={name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE and _is_plain(value)},
        place=Place(site=bad.site, phase="forward"),
        classes=bad.module,
        kind="nan" if bad.nan else "inf",
        dtype=bad.dtype,
        step=step,
    )
    path = save_dump(folder, f"step{step}_{bad.site}", dump, MOST_BYTES)
    return None if path is None else (path, digest(path))


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def _is_plain(value: Any) -> bool:
    return (
        all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (bool, int, float, str, type(None)))
    )
