"""Threads of ours in a program of somebody else: they take none of its signals.

A signal goes to any thread that does not block it. A program that blocks one, to wait for it (`signal.sigwait`), would be ended
by it as soon as a thread of ours is there that does not.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_OF_FAULTS = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}  # these are of the thread that makes them


def start_thread(name: str, work: Callable[..., Any], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    with _signals_changed("SIG_BLOCK"):  # the new thread begins with what this one blocks
        thread.start()
    return thread


def signals_taken() -> Any:
    """In a thread of ours, around what starts a process: that is to be ended like any other."""
    return _signals_changed("SIG_UNBLOCK")


@contextmanager
def _signals_changed(how: str) -> Iterator[None]:
    mask = getattr(signal, "pthread_sigmask", None)  # not on Windows
    if mask is None:
        yield
        return
    faults = {getattr(signal, name) for name in _OF_FAULTS if hasattr(signal, name)}
    before = mask(getattr(signal, how), signal.valid_signals() - faults)
    try:
        yield
    finally:
        mask(signal.SIG_SETMASK, before)
