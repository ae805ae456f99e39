"""The recipes of CONTRIBUTING.md, written into a copy of the tree: they work as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"^`(\S+)`:\n\n(```+)\w+\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
APPLY = ["git", "apply", "--unidiff-zero", "-"]
COMMAND = re.compile(r"Runs with `pytest (.+?)`")


def recipes() -> dict[str, str]:
    adding = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Adding things")[1].split("\n## Style")[0]
    return {head: body for head, _, body in (part.partition("\n") for part in adding.split("\n### ")[1:])}


def test_the_diffs_fit_the_tree() -> None:
    for recipe in recipes().values():
        for diff in DIFF.findall(recipe):
            subprocess.run([*APPLY, "--check"], input=diff, text=True, cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
def test_a_recipe_works_as_it_stands(name: str, tmp_path: Path) -> None:
    for part in ("src", "tests", "docs", "pyproject.toml"):
        source = ROOT / part
        shutil.copytree(source, tmp_path / part) if source.is_dir() else shutil.copy(source, tmp_path)
    text = recipes()[name]
    for place, _, content in FILE.findall(text):
        assert not (tmp_path / place).exists(), "a recipe adds files"
        (tmp_path / place).write_text(content, encoding="utf-8")
    for diff in DIFF.findall(text):
        subprocess.run(APPLY, input=diff, text=True, cwd=tmp_path, check=True)
    (words,) = COMMAND.findall(text)
    args = [word.strip('"') for word in re.findall(r'"[^"]+"|\S+', words)]
    if "learning_rate_zero" in words:  # its Chinese page is left to the reader
        pages = "tests/diagnose/test_knowledge_pages.py::"
        args += ["--deselect", f"{pages}test_both_languages_say_the_same"]
        args += ["--deselect", f"{pages}test_a_page_has_all_its_sections_and_says_something_in_each[learning_rate_zero-zh]"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *args]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
