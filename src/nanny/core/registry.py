"""What rules, causes and hazards share: they are found by looking into their folder, and their docstring is their page."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def import_all(package: ModuleType) -> None:
    """Imports every module of a package, so that each enters what it has."""
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")


def paragraph(doc: str, head: str) -> str:
    """The paragraph that begins with `head:`, on one line."""
    _, _, rest = doc.partition(f"{head}:")
    return " ".join(rest.split("\n\n")[0].split())
