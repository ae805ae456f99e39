"""What may be kept beside a program: by what it uses itself, and what is left on its device, in its process and its cgroup."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .storages import StorageMap

SHARE = 0.4  # of what the program itself has used at most; what is computed to compare comes on top for a moment
ENOUGH = 128 << 20  # this much needs no thought: 0.4 of a process that has imported torch; where less is free, nothing is kept
_CGROUPS = Path("/sys/fs/cgroup")
_trim: Any = None
with suppress(OSError, AttributeError, TypeError):  # of glibc alone; looked up before a program may forbid it
    _trim = ctypes.CDLL(None).malloc_trim


class MemoryBudget:
    """Made when nothing is kept yet. The program's tensors since then are counted (`note`), because what a process has in memory
    also holds what was freed beside them."""

    def __init__(self, device: torch.device, most: int | None = None) -> None:
        self._device, self._most = device, most
        self._before = used_bytes(device)
        self._own: StorageMap[int] = StorageMap()
        self._most_own = 0
        self.shortage = ""  # why nothing may be computed beside it, as last asked for what is allowed

    def note(self, made: Tensor) -> None:
        if self._own.find(made) is None:
            self._own.put(made, made.untyped_storage().nbytes())

    def allowance(self, held: int) -> int:
        """As many bytes may be kept, of which `held` are kept now."""
        if self._most is not None:
            return self._most
        self._most_own = max(self._most_own, self._before + sum(self._own.values()))
        free = free_bytes(self._device)
        self.shortage = _too_little(held + free)
        return min(max(ENOUGH, int(SHARE * self._most_own)), (held + free) // 2)  # less is free: some is given back

    def give_back(self) -> None:
        """What was freed between other things stays with the process, and would be more after each step that is looked into."""
        if self._device.type == "cpu" and _trim is not None and used_bytes(self._device) > self._before + ENOUGH:
            _trim(0)


def shortage(device: torch.device, wanted: int = 0) -> str:
    """Why nothing may be computed beside a program; empty: it may."""
    return _too_little(free_bytes(device), wanted)


def _too_little(free: int, wanted: int = 0) -> str:
    return f"only {free >> 20} MiB of memory are free" if free < max(ENOUGH, wanted) else ""


def used_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return max(min(_free_in_machine(), _free_in_cgroups(), _free_in_process()), 0)


_UNLIMITED = 1 << 62


def _free_in_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return _UNLIMITED


def _most_addresses() -> int:
    """What this process has had at a time: a step that gave its memory back will want it again."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak"))


def _free_in_process() -> int:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return _UNLIMITED if limit == resource.RLIM_INFINITY else limit - _most_addresses()
    except (ImportError, OSError, ValueError, StopIteration):
        return _UNLIMITED


def _free_in_cgroups() -> int:
    """Of all that this process lies in, the one with the least."""
    return min([_UNLIMITED, *(limit - used for limit, used in map(_limit_and_use, _cgroup_folders()))])


def _cgroup_folders() -> list[Path]:
    folders = [_CGROUPS, _CGROUPS / "memory"]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                inner = (_CGROUPS / kinds / path.lstrip("/")).resolve()
                folders += [inner, *(p for p in inner.parents if _CGROUPS in p.parents)]
    except (OSError, ValueError):
        pass
    return folders


def _limit_and_use(folder: Path) -> tuple[int, int]:
    for limit, use in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            return int((folder / limit).read_text()), int((folder / use).read_text())
        except (OSError, ValueError):  # not there, or `max`
            continue
    return _UNLIMITED, 0
