"""Which operations are looked at: patterns on their names and on the names of modules, as users write them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..core.finding import NannyError
from ..watch.op_facts import long_name


def op_pattern(pattern: Any) -> str:
    """A name, glob or operation object as a pattern on long names: `addmm`, `aten::addmm`, `torch.ops.aten.addmm.default`."""
    if isinstance(pattern, torch._ops.OpOverload):
        return long_name(pattern)
    if isinstance(pattern, torch._ops.OpOverloadPacket):
        return "torch.ops." + str(pattern._qualified_op_name).replace("::", ".")
    if not isinstance(pattern, str):
        raise NannyError(f"{pattern!r} is no operation; write it as 'torch.ops.aten.addmm', 'addmm' or a glob such as '*mm'")
    text = pattern.strip().replace("::", ".").removeprefix("torch.ops.")
    parts = text.split(".")
    if len(parts) > 2 and not set(text) & set("*?["):
        parts = parts[:2]  # without its overload
    text = ".".join(parts)
    return "torch.ops." + (text if len(parts) > 1 else f"*.{text}")


def op_patterns(given: str | Iterable[Any] | None, what: str) -> tuple[str, ...]:
    if given is None:
        return ()
    listed = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    out = tuple(op_pattern(item) for item in listed)
    for name, item in zip(out, listed):
        bare = name.removeprefix("torch.ops.").removeprefix("aten.").removeprefix("*.")
        if isinstance(item, str) and not set(bare) & set("*?[.") and not hasattr(torch.ops.aten, bare):
            raise NannyError(f"{what}: torch has no operation {item!r}; write its aten name, such as 'torch.ops.aten.addmm'")
    return out


class Selection:
    """Which operations are looked at: all, or those of a list, less those of a white list; by operation and by module."""

    def __init__(self, targets: tuple[str, ...], white: tuple[str, ...], modules: tuple[str, ...]) -> None:
        self._targets, self._white, self.modules = targets, white, modules
        self._wanted: dict[Any, bool] = {}

    def wants(self, func: Any) -> bool:
        wanted = self._wanted.get(func)
        if wanted is None:
            name = long_name(func)
            wanted = (not self._targets or self.names(func)) and not _any(name, self._white)
            self._wanted[func] = wanted
        return wanted

    def names(self, func: Any) -> bool:
        """Asked for by name, and not only because everything is."""
        return _any(long_name(func), self._targets)

    def is_white(self, func: Any) -> bool:
        return _any(long_name(func), self._white)

    def wants_site(self, site: str) -> bool:
        return not self.modules or any(fnmatchcase(site, p) for p in self.modules)


def _any(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
