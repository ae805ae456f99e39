"""Rules, causes and kinds of hazard: each is one decorated function in a folder; a rule's docstring is its page.

`Registry(package).enter(NAME, ...)` is the decorator; `entries()` imports the folder and gives the functions by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import Any, TypeVar

from .finding import Severity

Pages = dict[str, tuple[Severity, str]]  # code of a finding -> the worst it can be, and what it means, why, and what to do
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """A function under its name, with what was said about it where it was entered."""

    name: str
    function: Callable[..., Any]
    severity: Severity = Severity.INFO  # of a rule
    rank: int = 0  # of a kind of hazard: lower ones are asked first
    family: str = ""  # of a cause
    precision: bool | None = True  # of a cause: what the mechanism implies where the FP32 twin has not decided
    doc: str = field(default="", compare=False)

    @property
    def code(self) -> str:
        return self.name

    @property
    def hint(self) -> str:
        """The paragraph that begins with `Fix:`, on one line."""
        return " ".join(self.doc.partition("Fix:")[2].split("\n\n")[0].split())


class Registry:
    """Functions by name, in the order of rank; the modules of the folder are imported when somebody asks."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._entries: dict[str, Entry] = {}
        self._is_filled = False

    def enter(self, name: str, fix: str = "", **about: Any) -> Callable[[Function], Function]:
        """`fix`: the last paragraph of the page, where it stands elsewhere."""

        def register(function: Function) -> Function:
            doc = cleandoc(function.__doc__ or "") + (f"\n\nFix: {fix}" if fix else "")
            self._entries[name] = Entry(name, function, doc=doc, **about)
            return function

        return register

    def entries(self) -> dict[str, Entry]:
        if not self._is_filled:
            import_all(self._package)
            self._is_filled = True
            ordered = sorted(self._entries.values(), key=lambda one: one.rank)
            self._entries = {one.name: one for one in ordered}
        return self._entries


def import_all(package: str) -> None:
    """Every module of a folder, so that each enters what it has."""
    folder = importlib.import_module(package)
    for module in sorted(m.name for m in pkgutil.iter_modules(folder.__path__)):
        importlib.import_module(f"{package}.{module}")


def docstring_page(pages: Pages, code: str, severity: Severity) -> Callable[[Function], Function]:
    """Enters the docstring of the function that makes a finding as the page of its code."""

    def enter(function: Function) -> Function:
        pages[code] = (severity, function.__doc__ or "")
        return function

    return enter
