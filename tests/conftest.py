"""Two workers with two threads each would wait for one another: every test process, and what it starts, uses one thread."""

import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# Who starts the tests in the background leaves Ctrl-C ignored, and the programs that tests stop with it would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a machine that others use, drawing an example may take long: that says nothing about the code under test.
settings.register_profile("shared machine", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("shared machine")


# `make test` leaves out what is marked landing or slow, CI what is marked slow, `make test-all` nothing.
LEFT_OUT = {"not slow and not landing": r"(slow|landing)\b", "not slow": r"slow\b"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose tests are all left out is not even read: each worker would import what they need."""
    left_out = LEFT_OUT.get(config.option.markexpr)
    if left_out is None or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return re.search(rf"^pytestmark = pytest\.mark\.{left_out}", text, re.MULTILINE) is not None or None


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which may make models
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers alone, in any order and on any worker."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a test or a module: `representative(n)` leaves n of its cases, evenly spread, to CI, and `quick(n)` n of those to
    `make test`."""
    _spread(items, "representative", pytest.mark.slow)
    _spread(items, "quick", pytest.mark.landing)


def _spread(items: list[pytest.Item], name: str, others: pytest.MarkDecorator) -> None:
    groups: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        for node, mark in item.iter_markers_with_node(name):
            where = node.nodeid if node is not item else item.nodeid.partition("[")[0]
            groups.setdefault((where, mark.args[0]), []).append(item)
    for (_, kept), members in groups.items():
        quick = [item for item in members if item.get_closest_marker("slow") is None]
        chosen = {i * len(quick) // kept for i in range(kept)}
        for i, item in enumerate(quick):
            if i not in chosen:
                item.add_marker(others)
