"""Spellings that torch has replaced."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.finding import Severity
from ..interpreter.trace import Event, FileView
from ..registry import Hit, rule


@rule("REGION_DEPRECATED", Severity.INFO, "autocast", "scaler.new", "decorator")
def deprecated_amp(event: Event, view: FileView) -> Iterator[Hit]:
    """`torch.cuda.amp.*` or `torch.cpu.amp.*` is used.

    Why: torch 2.4 and later warn on every call, and the old names pin the code to one device type.

    Example:
        with torch.cuda.amp.autocast():
            ...

    Use instead:
        with torch.amp.autocast("cuda"):
            ...

    When not: the code must run on torch older than 1.10 (autocast) or 2.3 (GradScaler).
    """
    if event.op == "decorator":
        path = event.arg(0).path
        if event.arg(0).last not in ("custom_fwd", "custom_bwd"):
            return
    else:
        path = event.kwargs[""].const if event.op == "autocast" else event.out.ref
    for device in ("cuda", "cpu"):
        if path.startswith(f"torch.{device}.amp."):
            name = path.rpartition(".")[2]
            yield Hit(event.node, f"`{path}` is deprecated", f'use `torch.amp.{name}("{device}", ...)`')
