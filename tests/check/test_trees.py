"""Trees of many files: findings are the same alone, in a folder, in any order and batch, under other names and comments."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from nanny.check import files
from nanny.check.files import check_paths

from .test_layouts import LAYOUTS
from .test_meaning import WORDS, with_comments
from .test_projects import BASE, CLIPPED, STARTS
from .test_rules import PROJECT

LIGHTNING = {
    "main.py": "import lightning as L\nfrom net import Reader\n\ndef main(data):\n"
    "    L.Trainer(precision='16-mixed').fit(Reader(), data)\n",
    "net.py": "import lightning as L\nfrom torch import nn\nfrom masks import hide\n\nclass Reader(L.LightningModule):\n"
    "    def __init__(self):\n        super().__init__()\n        self.q = nn.Linear(8, 8)\n\n"
    "    def training_step(self, batch, index):\n        return hide(self.q(batch)).softmax(-1).mean()\n",
    "masks.py": "def hide(scores):\n    return scores.masked_fill(scores == 0, -1e9)\n",
}
TWO_CALLERS = {  # one helper, in fp16 for the one and in bf16 for the other
    "masks.py": "def hide(scores, mask):\n    return scores.masked_fill(mask, -1e9)\n",
    **{
        f"{name}.py": "import torch\nfrom torch import nn\nfrom masks import hide\n\n"
        "def run(x, mask):\n    layer = nn.Linear(8, 8)\n"
        f"    with torch.autocast('cuda', dtype=torch.{kind}):\n        return hide(layer(x), mask)\n"
        for name, kind in (("first", "float16"), ("second", "bfloat16"))
    },
}


def of_layout(*folders: str) -> dict[str, str]:
    paths = [path for folder in folders for path in sorted((LAYOUTS / folder).rglob("*.py"))]
    return {
        path.relative_to(LAYOUTS / folders[0] if len(folders) == 1 else LAYOUTS).as_posix(): path.read_text() for path in paths
    }


SOURCES = {
    "src/app/__init__.py": "",
    "src/app/net.py": PROJECT["app/layers.py"],
    "src/app/steps.py": PROJECT["app/steps.py"],
    "scripts/fit.py": PROJECT["app/train.py"].replace("from . import", "from app import").replace("app.layers", "app.net"),
}
TREES: dict[str, dict[str, str]] = {
    "imported_entry": of_layout("imported_entry"),
    "leak": of_layout("leak"),
    "attr": of_layout("attr"),
    "imported_helper": of_layout("protocol_styles/imp"),
    "star_import": of_layout("protocol_styles/star"),
    "package": PROJECT,
    "lightning": LIGHTNING,
    "two_callers": TWO_CALLERS,
    "sources": SOURCES,
    "program": {"base.py": BASE, "clipped.py": CLIPPED.format(unscale="pass"), "main.py": STARTS},
}
SILENT = {"leak"}
Told = set[tuple[object, ...]]


def write(root: Path, tree: Mapping[str, str]) -> None:
    (root / "pyproject.toml").write_text("")  # the root of the project
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def told(root: Path, paths: list[Path] | None = None, names: Mapping[str, str] | None = None, **how: int) -> Told:
    """Everything that is said, but for the wording: place, code, severity and chain of each finding."""
    back = names or {}

    def inside(file: str) -> str:
        name = os.path.relpath(file, root).replace(os.sep, "/")
        return back.get(name, name)

    found = check_paths([str(path) for path in paths or [root]], **{"jobs": 1, **how}).findings
    return {
        (inside(f.file), f.line, f.column, f.code, f.severity, tuple((inside(k.file), k.line) for k in f.chain)) for f in found
    }


@pytest.fixture(params=sorted(TREES))
def tree(request, tmp_path) -> tuple[Path, dict[str, str]]:
    write(tmp_path, TREES[request.param])
    assert bool(told(tmp_path)) is (request.param not in SILENT)
    return tmp_path, TREES[request.param]


def test_each_file_alone_says_together_what_the_folder_says(tree):
    root, texts = tree
    alone: Told = set()
    for name in texts:
        alone |= told(root, [root / name])
    by_place = {}
    for finding in sorted(alone, key=lambda f: -f[4]):  # a helper that two files call in different ways: the worse counts
        by_place.setdefault(finding[:4], finding)
    assert set(by_place.values()) == told(root)


def test_a_file_alone_says_no_more_of_itself_than_in_the_folder(tree):
    root, texts = tree
    places = {finding[:4] for finding in told(root)}
    for name in texts:
        assert {finding[:4] for finding in told(root, [root / name])} <= places


def test_the_order_of_files_changes_nothing(tree):
    root, texts = tree
    paths = [root / name for name in texts]
    assert told(root, paths) == told(root, paths[::-1]) == told(root)


@pytest.mark.representative(2)
def test_the_size_of_batches_changes_nothing(tree, monkeypatch):
    root, _ = tree
    expected = told(root)
    monkeypatch.setattr(files, "SMALLEST_BATCH", 1)
    monkeypatch.setattr(files, "LARGEST_BATCH", 1)
    assert told(root) == expected


@pytest.mark.slow
@pytest.mark.representative(3)
@pytest.mark.parametrize("jobs", [2, 5])
def test_the_number_of_processes_changes_nothing(tree, monkeypatch, jobs):
    root, _ = tree
    expected = told(root)
    monkeypatch.setattr(files, "SMALLEST_BATCH", 1)
    monkeypatch.setattr(files, "LARGEST_BATCH", 1)
    assert told(root, jobs=jobs) == expected


@pytest.mark.parametrize("style", ["z{}", "a{}_x"])
def test_other_file_names_change_nothing(tree, tmp_path_factory, style):
    root, texts = tree
    stems = {Path(name).stem for name in texts} - {"__init__"}
    new = {stem: style.format(stem) for stem in stems}

    def text_of(text: str) -> str:
        def put(match: re.Match[str]) -> str:
            return re.sub(r"\w+", lambda word: new.get(word[0], word[0]), match[0])

        text = re.sub(r"^(from \. import )(\w+)$", lambda m: f"{m[1]}{new.get(m[2], m[2])} as {m[2]}", text, flags=re.M)
        text = re.sub(r"^(from app import )(\w+)$", lambda m: f"{m[1]}{new.get(m[2], m[2])} as {m[2]}", text, flags=re.M)
        return re.sub(r"^from [\w.]+(?= import)", put, text, flags=re.M)

    renamed = {name: str(Path(name).with_stem(new.get(Path(name).stem, Path(name).stem)).as_posix()) for name in texts}
    other = tmp_path_factory.mktemp("renamed")
    write(other, {renamed[name]: text_of(text) for name, text in texts.items()})
    assert told(other, names={new_name: name for name, new_name in renamed.items()}) == told(root)


@pytest.mark.parametrize("comment", ["", WORDS], ids=["none", "many"])
def test_comments_change_nothing(tree, tmp_path_factory, comment):
    root, texts = tree
    other = tmp_path_factory.mktemp("comments")
    write(other, {name: with_comments(text, comment) for name, text in texts.items()})
    assert told(other) == told(root)


def test_a_named_file_says_what_it_read(tmp_path):
    write(tmp_path, TREES["imported_helper"])
    report = check_paths([str(tmp_path / "train.py")], jobs=1)
    assert [os.path.basename(path) for path in report.read_too] == ["lib.py"]
    assert [os.path.basename(f.file) for f in report.findings] == ["lib.py"]


def test_nothing_above_the_root_of_the_project_is_read(tmp_path):
    write(tmp_path, {"lib.py": TREES["imported_helper"]["lib.py"]})
    inner = tmp_path / "inner"
    inner.mkdir()
    write(inner, {"train.py": TREES["imported_helper"]["train.py"]})
    report = check_paths([str(inner / "train.py")], jobs=1)
    assert (report.read_too, report.findings) == ([], [])


def test_installed_packages_are_not_read(tmp_path):
    write(tmp_path, {"train.py": TREES["imported_helper"]["train.py"]})
    installed = tmp_path / "env" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "lib.py").write_text(TREES["imported_helper"]["lib.py"])
    (installed / "use.py").write_text(TREES["imported_helper"]["train.py"])
    assert check_paths([str(installed / "use.py")], jobs=1).read_too == []
