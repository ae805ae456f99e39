"""`nanny.diagnose` and `nanny.examine` are functions and rooms: whichever of the two a name leads to, it can be called."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_FUNCTIONS = {"nanny.diagnose": ("nanny.diagnose.run", "diagnose"), "nanny.examine": ("nanny.monitor.watch", "examine")}


class CallableRoom(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        home, name = _FUNCTIONS[self.__name__]
        return getattr(importlib.import_module(home), name)(*args, **kwargs)


def make_callable(package: str) -> None:
    sys.modules[package].__class__ = CallableRoom
