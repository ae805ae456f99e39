"""The list of fixers: `@fixer(CODE, ...)` enters a generator that turns a finding into what could be written instead.

It gets the file's `Tree` and the `Finding`, and yields `Change`s, the best first; nothing, where it does not know better than the
reader. `nanny.check.fix` applies a change only if the checker then has one finding less and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ..core.finding import Finding
from ..core.registry import import_all

if TYPE_CHECKING:
    from .tree import Edit, Tree

FIXES = "nanny.check.fixes"


@dataclass(frozen=True)
class Change:
    """Edits of one file that belong together, and what they do, in a few words."""

    title: str
    edits: tuple[Edit, ...]
    is_safe: bool = True  # False: right as far as can be seen, but results may have another dtype or other numbers
    rests_on: tuple[tuple[int, int], ...] = ()  # where its variables get their values: if one is mended, this may not be needed


Fixer = Callable[["Tree", Finding], Iterator[Change]]
_FIXERS: dict[str, Fixer] = {}


def fixer(*codes: str) -> Callable[[Fixer], Fixer]:
    def enter(function: Fixer) -> Fixer:
        _FIXERS.update(dict.fromkeys(codes, function))
        return function

    return enter


@cache
def all_fixers() -> dict[str, Fixer]:
    import_all(FIXES)
    return dict(sorted(_FIXERS.items()))
