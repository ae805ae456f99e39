"""One writing process per store: flock on a side file, which the system releases however the holder dies."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_held: set[int] = set()


class LockUnsupported(Exception):
    """This file system, or this system, has no flock."""


@dataclass(frozen=True)
class HeldLock:
    path: Path
    descriptor: int

    def release(self, *, remove: bool = True) -> None:
        """Removes the file first, so that a clean close leaves nothing behind; `try_lock` copes with the race."""
        try:
            if remove and _is_still_there(self.path, self.descriptor):
                self.path.unlink(missing_ok=True)
        except OSError:
            pass  # the right to look or to write may be lost by now; the lock itself ends with its descriptor
        finally:
            _held.discard(self.descriptor)
            os.close(self.descriptor)


def lock_path(store: Path) -> Path:
    return store.with_name(store.name + ".lock")


def try_lock(path: Path) -> HeldLock | None:
    """The lock, or None if a live process has it. Tries for a moment: a reader may be asking whether it is held."""
    for attempt in range(4):
        if attempt:
            time.sleep(0.005)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            is_ours = _flock(descriptor)
        except LockUnsupported:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        if is_ours and _is_still_there(path, descriptor):
            _held.add(descriptor)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{_signature()}\n".encode())
            return HeldLock(path, descriptor)
        os.close(descriptor)
    return None


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock. False where there is no such file, or no flock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return False
    try:
        return not _flock(descriptor, shared=True)
    except LockUnsupported:
        return False
    finally:
        os.close(descriptor)


def locks_work(folder: Path) -> bool:
    """False on a file system that has no locks, where SQLite takes every file for locked."""
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        _flock(descriptor, shared=True)
    except LockUnsupported:
        return False
    finally:
        os.close(descriptor)
    return True


def holder(path: Path) -> str:
    """`process 123 on host`, as the holder wrote it."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        text = ""
    return "an earlier monitor in this process, not yet closed" if text == _signature() else text or "another process"


def _signature() -> str:
    import socket  # 3 ms, and most have nothing to lock

    return f"process {os.getpid()} on {socket.gethostname()}"


def _flock(descriptor: int, *, shared: bool = False) -> bool:
    if fcntl is None:
        raise LockUnsupported("this system has no flock")
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        raise LockUnsupported(str(error)) from error
    return True


def _is_still_there(path: Path, descriptor: int) -> bool:
    """False if the last holder removed the file between our open and our lock."""
    try:
        named = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _let_go_in_child() -> None:
    # A forked child shares the lock: without this, a surviving data worker would keep a dead trainer's store locked.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
