"""Only regular files are read: a pipe or a device would be waited for, perhaps for ever, and a socket has no content."""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import Any

_OTHERS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: str | os.PathLike[str]) -> None:
    """OSError with the reason if it is anything else."""
    _refuse_others(os.stat(path), path)


def read_regular(path: str | os.PathLike[str], largest: int) -> bytes:
    """Its bytes; OSError if it is not a regular file or larger than this."""
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    )
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        _refuse_others(status, path)
        if status.st_size > largest:
            reason = f"{status.st_size / 2**20:.1f} MB is more than the {largest / 2**20:g} MB that are read"
            raise OSError(errno.EFBIG, reason, os.fspath(path))
        return stream.read(largest)


def _refuse_others(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _OTHERS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}; only regular files are read", os.fspath(path))


def parsed_toml(text: str) -> dict[str, Any]:
    """Raises ValueError if the text is no TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # the same parser, for Python 3.10
    read: dict[str, Any] = tomllib.loads(text)
    return read
