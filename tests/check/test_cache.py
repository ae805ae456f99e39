"""A second run says the same and checks only what has changed; a cache that is broken is none."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from nanny.check import engine
from nanny.check.cache import Cache
from nanny.check.files import check_paths
from nanny.check.interpreter.source import says_half

MASKS = "def hide(scores, mask):\n    return scores.masked_fill(mask, VALUE)\n"
TRAIN = (
    "import torch\nfrom torch import nn\nfrom masks import hide\n\ndef run(x, mask):\n    layer = nn.Linear(8, 8)\n"
    "    with torch.autocast('cuda', dtype=torch.float16):\n        return hide(layer(x), mask)\n"
)
ALONE = "import torch\n\ndef run(x):\n    return torch.cuda.amp.GradScaler().scale(x)\n"


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    root.mkdir()
    (root / "pyproject.toml").write_text("")
    (root / "masks.py").write_text(MASKS.replace("VALUE", "-1e9"))
    (root / "train.py").write_text(TRAIN)
    (root / "alone.py").write_text(ALONE)
    (root / "broken.py").write_text("import torch\nx = torch.float16(\n")
    (root / "plain.py").write_text("x = 1\n")
    return root


@pytest.fixture
def walked(monkeypatch):
    """The files that are walked, in this process."""
    seen: list[str] = []
    check = engine._check_file

    def counting(source, *rest):
        seen.append(os.path.basename(source.filename))
        return check(source, *rest)

    monkeypatch.setattr(engine, "_check_file", counting)
    return seen


def told(root: Path, path: Path, **how: object) -> list[object]:
    cache = Cache(str(path))
    report = check_paths([str(root)], jobs=1, cache=cache, **how)
    cache.close()
    return [(f.file, f.line, f.code, f.severity, f.message, f.hint, f.chain) for f in report.findings] + sorted(report.files)


def test_a_second_run_says_the_same_and_walks_nothing(tree, tmp_path, walked):
    first = told(tree, tmp_path / "c.sqlite")
    assert sorted(walked) == ["alone.py", "train.py"]
    walked.clear()
    assert told(tree, tmp_path / "c.sqlite") == first
    assert walked == []
    assert {item[2] for item in first if isinstance(item, tuple)} == {"NUM_MASK_CONSTANT", "REGION_DEPRECATED", "SYNTAX_ERROR"}


def test_what_imports_a_changed_file_is_checked_again(tree, tmp_path, walked):
    told(tree, tmp_path / "c.sqlite")
    walked.clear()
    (tree / "masks.py").write_text(MASKS.replace("VALUE", "-1e4"))
    assert not any(item[2] == "NUM_MASK_CONSTANT" for item in told(tree, tmp_path / "c.sqlite") if isinstance(item, tuple))
    assert walked == ["train.py"]


def test_a_new_file_that_an_import_may_mean_is_noticed(tree, tmp_path, walked):
    (tree / "masks.py").rename(tree / "later.py")
    before = told(tree / "train.py", tmp_path / "c.sqlite")
    (tree / "later.py").rename(tree / "masks.py")
    assert told(tree / "train.py", tmp_path / "c.sqlite") != before
    assert walked == ["train.py", "train.py"]


@pytest.mark.parametrize(
    "code", ["import json\nx = json.load(open('plain.json'))\n", "import accelerate\nx = accelerate.Accelerator()\n"]
)
def test_what_reads_settings_is_known_until_they_change(tree, tmp_path, walked, code):
    (tree / "alone.py").write_text(code + ALONE)
    first = told(tree, tmp_path / "c.sqlite")
    walked.clear()
    assert told(tree, tmp_path / "c.sqlite") == first
    assert walked == []
    for text in ('{"mixed_precision": "fp16"}', '{"mixed_precision": "bf16"}'):  # one that is new, one that changes
        (tree / "plain.json").write_text(text)
        told(tree, tmp_path / "c.sqlite")
        assert walked == ["alone.py"]
        walked.clear()


@pytest.mark.parametrize("harm", ["no database", "another table", "no JSON", "other JSON", "not writable"])
def test_a_broken_cache_is_no_cache(tree, tmp_path, harm):
    path = tmp_path / "c.sqlite"
    first = told(tree, path)
    if harm == "no database":
        path.write_bytes(b"\0" * 5000)
    elif harm == "not writable":
        path.unlink()
        path.mkdir()
    else:
        db = sqlite3.connect(path)
        if harm == "another table":
            db.executescript("DROP TABLE checked; CREATE TABLE checked (a)")
        else:
            db.execute("UPDATE checked SET findings = ?", ("{" if harm == "no JSON" else '[{"code": 1, "severity": "X"}]',))
        db.commit()
        db.close()
    assert told(tree, path) == first


def test_only_docstrings_do_not_make_a_file_worth_parsing():
    assert not says_half('"""Works in float16."""\n\ndef f(x):\n    r"""bf16"""\n    return x\n')
    for code in (
        'x = """float16"""\n',
        "'''a'''\nx.half()\n",
        '"""a"""\ny = \'"""\'\nx.half()\n"""b"""\n',
        '# """\nx.half()\n"""a"""\n',
    ):
        assert says_half(code), code
    for code in (
        "a = precision = 16",
        "dtype = getattr(\n torch, name)",
        "x = b16",
        "F.binary_cross_entropy(a, b)",
        "import deepspeed",
    ):
        assert says_half(code), code
    for code in ("behalf = 1", "halfway", "x = 2160", "binary_cross_entropy_with_logits(a)", "getattr(torchvision, n)"):
        assert not says_half(code), code
