"""A second run of the program's code that may do nothing but compute.

    with no_effects():         # of this thread
        model(x)               # raises Effect before it prints, opens a file, sends, logs, starts a thread, registers for the end

Python tells of every call into C before it is made, so what would be noticed outside is not done. Functions of torch, numpy and
of extensions may be called; of Python's own only those that compute. What the code changes in objects is put back by `reached`.
Warnings of the second run are not shown.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import gc
import inspect
import logging
import operator
import random
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Set
from contextlib import contextmanager
from sys import _getframe
from threading import get_ident
from typing import Any

from .python_state import is_of_library

# modules of Python, most of them in C, whose functions compute, look, or change what they are given
_COMPUTE = {
    *("_abc", "_bisect", "_collections", "_collections_abc", "_datetime", "_decimal", "_functools", "_heapq", "_json"),
    *("_operator", "_pickle", "_random", "_sre", "_stat", "_statistics", "_string", "_struct", "_typing"),
    *("_warnings", "_weakref", "abc", "binascii", "builtins", "cmath", "collections", "copy", "copyreg"),
    *("datetime", "decimal", "enum", "fractions", "functools", "heapq", "inspect", "itertools", "math"),
    *("numbers", "operator", "random", "re", "statistics", "string", "struct", "time", "types"),
    *("typing", "unicodedata", "warnings", "weakref", "zlib"),
}
_NOT_SO: Any = (print, open, input, exec, eval, compile, getattr(builtins, "breakpoint", None))
_LOOKS = {*(f"posix.{name}" for name in ("fspath", "getpid", "getcwd", "stat", "get_inheritable", "cpu_count")), "nt.getpid"}
_LOOKS |= {f"sys.{name}" for name in ("_getframe", "exc_info", "getrefcount", "getsizeof", "getrecursionlimit", "is_finalizing")}
_LOOKS |= {
    *("ContextVar.get", "ContextVar.set", "ContextVar.reset"),  # in a copy of the context, which nobody sees
    "sys.intern",
    "sys.audit",
    "sys.getprofile",
    "sys.gettrace",
    "_thread.get_ident",
    "_thread.allocate_lock",
}
_OBJECTS = (
    *(re.Pattern, re.Match, random.Random, collections.deque, collections.OrderedDict, collections.defaultdict, weakref.ref),
    *(
        datetime.date,
        datetime.time,
        datetime.timedelta,
        decimal.Decimal,
        decimal.Context,
        operator.itemgetter,
    ),
    *(type(threading.Lock()), type(threading.RLock()), types.MappingProxyType, types.SimpleNamespace),
)
# ours, from which the program's code is called
_LEADS_ON = {
    *("nanny.watch.calls", "nanny.examine.again", "nanny.watch.effects", "nanny.watch.python_state"),
    "nanny.watch.op_stream",  # an operation that the program has replaced by a function of its own
}
_WRITTEN_IN_PYTHON = {
    logging.Logger.handle.__code__: "its code writes to a log",
    weakref.finalize.__init__.__code__: "its code waits for the end of things",
}
_CURRENT_FRAME = inspect.currentframe.__code__
_UNKNOWN = "a library calls code of the program that nobody has looked into"  # a function of torch's that it has replaced
_LOOKS_AT_CALLERS = "its code looks at who calls it"  # which is another one now


class Effect(BaseException):
    """What the code was about to do; nobody catches it by accident."""


def effect_of(function: Any) -> str:
    """What a call of this C function may do besides computing, for people; empty if nothing."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        module = str(getattr(function, "__module__", None) or getattr(owner, "__name__", ""))
        name = f"{module}.{getattr(function, '__name__', '')}"
        known = module in _COMPUTE and not any(function is one for one in _NOT_SO)
    else:
        kind = owner if isinstance(owner, type) else type(owner)
        module, name = kind.__module__, f"{kind.__name__}.{getattr(function, '__name__', '')}"
        known = module == "builtins" or issubclass(kind, _OBJECTS)
    if known or name in _LOOKS or module.partition(".")[0] not in sys.stdlib_module_names:
        return ""
    return f"its code calls {name}, which may do more than compute"


class _Guard:
    """What Python calls at every call. What our own code does on the way is not looked at, nor what torch imports for it."""

    def __init__(self, known: Set[types.CodeType]) -> None:
        self.stopped, self._known = "", known
        self._ours: Any = None

    def __call__(self, frame: Any, event: str, about: Any) -> None:
        if self._ours is not None:
            if event == "return" and frame is self._ours:
                self._ours = None
        elif event in ("call", "c_call"):
            name = frame.f_globals.get("__name__")
            if isinstance(name, str) and name.partition(".")[0] in ("nanny", "importlib", "_frozen_importlib"):
                if event == "call" and name not in _LEADS_ON:
                    self._ours = frame
            elif event == "c_call":
                self._stop(_LOOKS_AT_CALLERS if about is _getframe and not is_of_library(name) else effect_of(about))
            elif frame.f_code is _CURRENT_FRAME and not is_of_library(frame.f_back.f_globals.get("__name__")):
                self._stop(_LOOKS_AT_CALLERS)
            elif not is_of_library(name) and frame.f_code not in self._known and is_of_library(_caller(frame)):
                self._stop(_UNKNOWN)
            else:
                self._stop(_WRITTEN_IN_PYTHON.get(frame.f_code, ""))

    def _stop(self, why: str) -> None:
        if why:
            self.stopped = why
            raise Effect(why)


def _caller(frame: Any) -> Any:
    return frame.f_back and frame.f_back.f_globals.get("__name__")


def can_be_guarded() -> bool:
    """A profiler or a debugger of the program's own is on otherwise, and would see what runs."""
    return sys.getprofile() is None and sys.gettrace() is None


@contextmanager
def no_effects(known: Set[types.CodeType]) -> Iterator[None]:
    """`known`: code of the program whose variables are put back afterwards. A library may call no other."""
    guard = _Guard(known)
    with _garbage_kept(), _unshown_warnings():
        sys.setprofile(guard)
        try:
            yield
        finally:
            sys.setprofile(None)
    if guard.stopped:  # it was raised where Python drops what is raised
        raise Effect(guard.stopped)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """What was garbage before is collected later: its finalizers are no part of the second run, and must not be cut off by the
    guard. What the second run leaves is its own."""
    is_ours = gc.isenabled() and not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@contextmanager
def _unshown_warnings() -> Iterator[None]:
    """Of this thread; the filters stay, so that Python remembers what it has told."""
    here, shows = get_ident(), warnings._showwarnmsg  # type: ignore[attr-defined]

    def show(message: Any) -> None:
        if get_ident() != here:
            shows(message)

    warnings._showwarnmsg = show  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if warnings._showwarnmsg is show:  # type: ignore[attr-defined]
            warnings._showwarnmsg = shows  # type: ignore[attr-defined]
