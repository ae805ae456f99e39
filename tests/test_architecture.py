"""docs/architecture.md must stay true: the walls it describes are those of the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nanny"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LIGHT = (
    "records",
    "tensor_records",
    "diff_records",
    "examine_records",
    "hazard_records",
    "diagnosis_records",
    "op_records",
    "limits",
    "formats",
    "optable",
    "knowledge",
    "judge",
    "store",
    "show",
    "check",
    "queries",
    "agent",
    "web",
    "report",
    "ui",
    "plot",
    "cli",
)
VERBS = ("observe", "measure", "judge", "store", "show")
FEATURES = (
    "check",
    "queries",
    "query",
    "agent",
    "tensor",
    "monitor",
    "ops",
    "optrace",
    "replay",
    "sanitize_step",
    "run",
    "rule",
    "doctor",
    "web",
    "report",
    "ui",
    "plot",
    "demo",
)
RECORDS = ("records", "tensor_records", "diff_records", "examine_records", "hazard_records", "diagnosis_records", "op_records")
CORE = (*RECORDS, "limits", "formats", "optable", *VERBS)


def modules(*tops: str) -> list[Path]:
    return [p for top in tops for p in [*SOURCE.glob(f"{top}.py"), *SOURCE.glob(f"{top}/**/*.py")]]


def imported(path: Path) -> set[str]:
    """Top-level names under nanny that a module imports anywhere, except for the type checker only."""
    package = path.relative_to(SOURCE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            inside = package[: len(package) - node.level + 1]
            target = [*inside, *(node.module or "").split(".")]
            found.update([target[0]] if target[0] else [alias.name for alias in node.names])
    return found


def imports_at_the_top(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", modules(*LIGHT), ids=lambda p: str(p.relative_to(SOURCE)))
def test_what_works_without_torch_does_not_import_it(path):
    assert "torch" not in imports_at_the_top(path)


@pytest.mark.parametrize("top", ["observe", "measure"])
def test_seeing_and_measuring_neither_judge_nor_store(top):
    for path in modules(top):
        assert not imported(path) & {"judge", "store"}, path


def test_no_verb_imports_a_feature():
    for path in modules(*CORE):
        assert not imported(path) & (set(FEATURES) - set(CORE)), path


def test_every_part_of_the_source_has_its_line():
    parts = {p.name for p in SOURCE.iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.glob("*.py")))}
    missing = {name for name in parts if not re.search(rf"\b{re.escape(name.removesuffix('.py'))}\b", TEXT)}
    assert missing == set()


def test_every_file_that_is_named_exists():
    for name in re.findall(r"`((?:tests|docs|benchmarks)/[\w./*]+)`", TEXT):
        assert list(ROOT.glob(name)), name
    block = TEXT.partition("    src/nanny/\n")[2].partition("\n\n")[0]
    for name in re.findall(r"^ {6}(\S+)", block, re.MULTILINE):
        assert (SOURCE / name).exists(), name
