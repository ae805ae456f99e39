"""The house keeps its order: one meaning per name of a type, files that one can read. Of imports, import-linter."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nanny"
LONGEST = 800  # lines of one file
SEVERAL = {"NannyCallback"}  # Lightning and transformers each look for their own class; both are documented under this name

FILES = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}


def defined(tree: ast.Module) -> Iterator[str]:
    """Names of classes, and of types that are given one: `Steps = tuple[int | None, int | None]`."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name) and not target.id.isupper())


def test_a_type_name_means_one_thing() -> None:
    homes = defaultdict(list)
    for module, path in FILES.items():
        for name in defined(ast.parse(path.read_text(encoding="utf-8"))):
            homes[name].append(module)
    homes = {name: found for name, found in homes.items() if not name.startswith("_") and name not in SEVERAL}
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_every_file_can_be_read_at_once() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}


PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_architecture_page_has_a_line_for_every_room() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == rooms


def test_every_file_on_the_architecture_page_is_there() -> None:
    paths = re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", PAGE)
    assert len(paths) > 40
    roots = (SOURCE, ROOT, *(path for path in SOURCE.iterdir() if path.is_dir()))  # in a room's own row, of that room
    assert [path for path in paths if not any((root / path).exists() or (root / f"{path}.py").exists() for root in roots)] == []
