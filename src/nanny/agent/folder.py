"""The part of the file system that an agent may see: everything below one folder, symbolic links followed before the look."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..core.finding import NannyError
from ..store.files import is_store_name, stores_below

MOST_STORES = 200


def real_path(path: str | os.PathLike[str]) -> Path:
    """With every link followed; one that leads to itself stays as it is (`Path.resolve` raises there)."""
    return Path(os.path.realpath(path))


@dataclass(frozen=True)
class ReadableFolder:
    """`root` is where paths begin and end; `db` is the store or folder that is meant when a question names none."""

    root: Path  # resolved
    db: Path | None = None  # named by whoever started the server, so it may lie outside the root

    def path(self, text: str) -> Path:
        """The real path behind a name that an agent gave, or a refusal."""
        if "\0" in text:
            raise NannyError("a path cannot hold a NUL character")
        try:
            real = real_path(self.root / text)
        except (OSError, ValueError) as error:  # too long, no text
            raise NannyError(f"{text}: cannot be resolved ({error}); give a path below {self.root}") from None
        if not self.holds(real):
            raise NannyError(f"{text}: outside the folder that this server may read; give a path below {self.root}")
        if not os.path.exists(real):
            raise NannyError(f"{text}: no such file or folder below {self.root}")
        return real

    def holds(self, real: Path) -> bool:
        return real == self.root or self.root in real.parents

    def display_path(self, path: str | Path) -> str:
        """A path as the agent should give it back: relative to the root where it is below it."""
        real = Path(path)
        text = str(real.relative_to(self.root)) if self.holds(real) else str(real)
        return text.encode("utf-8", "backslashreplace").decode()  # a name may hold bytes that are no text

    def store(self, db: str | None) -> str:
        """The store or folder that a question is about."""
        if db:
            if self.db is not None and Path(db) == self.db:
                return str(self.db)
            real = self.path(db)
            self._all_inside(real)
            return str(real)
        if self.db is not None:
            return str(self.db)
        usual = self.root / "nanny_logs"
        if usual.exists():
            return self.store(str(usual))
        found = self.stores()
        if not found:
            raise NannyError(f"no run is recorded below {self.root}; record one with `nanny run train.py`, or name its --db")
        return str(found[0].parent)

    def stores(self) -> list[Path]:
        """Every store that may be read, the one written last first."""
        if self.db is not None and self.db.is_file():
            return [self.db]
        if self.db is not None:
            return stores_below(self.db, MOST_STORES)
        return [store for store in stores_below(self.root, MOST_STORES) if self.holds(real_path(store))]

    def _all_inside(self, folder: Path) -> None:
        """A folder of stores may hold links that lead out of the root."""
        if folder.is_dir():
            for entry in folder.iterdir():
                if is_store_name(entry.name) and not self.holds(real_path(entry)):
                    raise NannyError(f"{self.display_path(entry)}: a link that leads outside {self.root}; name the store itself")
