"""Every threshold can be looked up: its source is a section of docs/numerics.md, and a stranger can measure it again."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from nanny.core.limits import PAGE, describe

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")


def anchors() -> set[str]:
    """The anchors that a Markdown viewer makes of the headings."""
    return {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)}


def measuring_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numerics_script", ROOT / "docs" / "numerics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_limit_names_a_section_that_exists():
    known = anchors()
    for entry in describe():
        page, _, anchor = entry["source"].partition("#")
        assert page == PAGE, entry["name"]
        assert anchor in known, f"{entry['name']}: there is no section #{anchor} in {PAGE}"


def test_every_section_that_says_measured_has_a_script():
    marked = {part.splitlines()[0] for part in TEXT.split("\n## ")[1:] if re.search(r"[(|] ?M\b|, M\)", part)}
    names = {head.lower().replace(" ", "-") for head in marked}
    assert names == set(measuring_script().SECTIONS)


def test_the_links_of_the_page_of_limits_lead_somewhere():
    table = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(numerics\.md#([^)]+)\)", table)) <= anchors()


def test_every_limit_is_asked_somewhere():
    files = [path for path in (ROOT / "src" / "nanny").rglob("*.py") if path.name != "limits.py"]
    asked = {name for path in files for name in re.findall(r"\.([a-z_0-9]+)", path.read_text(encoding="utf-8"))}
    assert {entry["name"] for entry in describe()} <= asked
