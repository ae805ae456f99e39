"""An operation run beside the program's own: what it warns of has been said, or was never the program's to hear.

torch collects the warnings of a kernel until the call from Python that began it returns, and gives them to whoever called. So
the second run gets such a call of its own, made in this module, and for that moment warnings of this module are ignored:
those of other threads pass, nothing is registered as told, and no filter of the program is lost.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

_call: Any = torch._C._disabled_torch_function_impl  # of all that runs a function, the one that does nothing else
_OURS: Any = ("ignore", None, Warning, re.compile(re.escape(__name__) + r"\Z"), 0)


def run_without_warnings(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    filters: Any = warnings.filters  # the list of now: a program may change it while the operation runs
    try:
        filters.insert(0, _OURS)  # not `filterwarnings`: that makes Python forget what it has told already
        return _call(func, (), args, kwargs)
    finally:
        if filters[0] is _OURS:
            del filters[0]
        elif _OURS in filters:  # somebody put another in front
            filters.remove(_OURS)
