"""What rules, causes and hazards share: they are found by looking into their folder, and their docstring is their page."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from .finding import Severity

Pages = dict[str, tuple[Severity, str]]  # code of a finding -> the worst it can be, and what it means, why, and what to do
Function = TypeVar("Function", bound=Callable[..., Any])


def import_all(package: ModuleType) -> None:
    """Imports every module of a package, so that each enters what it has."""
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")


def paragraph(doc: str, head: str) -> str:
    """The paragraph that begins with `head:`, on one line."""
    _, _, rest = doc.partition(f"{head}:")
    return " ".join(rest.split("\n\n")[0].split())


def docstring_page(pages: Pages, code: str, severity: Severity) -> Callable[[Function], Function]:
    """Enters the docstring of the function that makes a finding as the page of its code."""

    def enter(function: Function) -> Function:
        pages[code] = (severity, function.__doc__ or "")
        return function

    return enter
