"""Only to find its questions imports half a dozen libraries: `make test` does not."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name == "test_gallery.py" and config.option.markexpr == "not slow" else None
