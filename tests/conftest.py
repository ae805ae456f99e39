"""Two workers with two threads each would wait for one another: every test process, and what it starts, uses one thread."""

import os
import re
import signal
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of slow tests alone is not even read in `make test`: each worker would import what they need."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return (
        re.search(r"^pytestmark = pytest\.mark\.slow\b", collection_path.read_text(encoding="utf-8"), re.MULTILINE) is not None
        or None
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`representative(n)` on a test or a module: n of its cases, evenly spread, run in `make test`, all in `make test-all`."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        for node, mark in item.iter_markers_with_node("representative"):
            name = node.nodeid if node is not item else item.nodeid.partition("[")[0]
            groups.setdefault(f"{mark.args[0]} {name}", []).append(item)
    for group, members in groups.items():
        kept = int(group.partition(" ")[0])
        quick = [item for item in members if item.get_closest_marker("slow") is None]
        chosen = {i * len(quick) // kept for i in range(kept)}
        for i, item in enumerate(quick):
            if i not in chosen:
                item.add_marker(pytest.mark.slow)
