"""A training script or module, started as the interpreter itself would start it: for commands that watch one."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ..core.finding import NannyError


def start_target(target: Sequence[str], as_module: bool) -> None:
    """The script or module, set up as the interpreter itself would."""
    name = target[0]
    sys.argv = list(target)
    sys.path[0] = os.getcwd() if as_module else str(Path(name).resolve().parent)
    if as_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


def check_module(name: str) -> None:
    """Refuses a name that `python -m` would not find."""
    if os.path.isfile(name):  # asking for its module would run it, as the package `train` of a module `py`
        raise NannyError(f"{name} is a script, not a module; leave -m out")
    sys.path[0] = os.getcwd()  # as python -m does
    try:
        found = importlib.util.find_spec(name) if all(name.split(".")) else None
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        found = None
    if found is None:
        raise NannyError(f"there is no module {name!r} here; for a script give its path, such as train.py")
