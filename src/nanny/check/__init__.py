"""Finds mixed-precision mistakes in source code, before the first GPU hour: `nanny check PATH`. Never imports torch.

The engine is loaded when it is asked for: what a cache knows needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import check_project as check_project
    from .engine import check_source as check_source
    from .interpreter.trace import Options as Options
    from .registry import CheckRule as CheckRule
    from .registry import all_rules as all_rules
    from .registry import rule as rule

__all__ = ["CheckRule", "Options", "all_rules", "check_project", "check_source", "rule"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import engine, registry

    return getattr(registry if hasattr(registry, name) else engine, name)
