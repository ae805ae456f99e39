"""What `nanny check` does with files nobody wishes for: broken, old, huge, binary, deep, in odd encodings, in loops, gone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nanny import check_model
from nanny.check.config import Config
from nanny.check.files import check_paths
from nanny.check.walk import Found, decode, find_files, matches_path, read_text
from nanny.core.finding import NannyError

DEPRECATED = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"


def names(folder: Path, **kwargs: object) -> list[str]:
    return [os.path.relpath(found.path, folder) for found in find_files(str(folder), [], **kwargs)]


def codes(path: object) -> list[str]:
    return [finding.code for finding in check_model(path)]


def test_a_syntax_error_is_a_finding_and_the_other_files_go_on(tmp_path):
    (tmp_path / "a.py").write_text(f"def f(:\n    pass\n{DEPRECATED}")
    (tmp_path / "b.py").write_text(DEPRECATED)
    broken, other = check_model(tmp_path)
    assert (broken.code, broken.line, broken.column) == ("SYNTAX_ERROR", 1, 7)
    assert other.code == "REGION_DEPRECATED"


def test_broken_code_that_has_nothing_to_do_with_precision_is_told_where_it_is_named(tmp_path):
    (tmp_path / "a.py").write_text("def f(:\n    pass\n")
    assert codes(tmp_path) == []
    assert codes(tmp_path / "a.py") == ["SYNTAX_ERROR"]


@pytest.mark.parametrize("line", ['print "loss", loss', "except ValueError, e:\n    pass", "raise E, 'no'", "if a <> b: pass"])
def test_python_2_is_recognised(tmp_path, line):
    text = f"try:\n    pass\n{line}\n" if line.startswith("except") else f"{line}\n"
    (tmp_path / "old.py").write_text(text)
    (finding,) = check_model(tmp_path / "old.py")
    assert finding.code == "SYNTAX_ERROR"
    assert "Python 2" in finding.hint


def test_a_syntax_error_can_be_silenced(tmp_path):
    (tmp_path / "a.py").write_text("def f(:  # noqa: SYNTAX_ERROR\n")
    assert codes(tmp_path / "a.py") == []


@pytest.mark.parametrize(
    "data",
    [
        "# größe\n".encode() + DEPRECATED.encode(),
        b"\xef\xbb\xbf" + DEPRECATED.encode(),
        b"# -*- coding: latin-1 -*-\n# gr\xf6\xdfe\n" + DEPRECATED.encode(),
        b"#!/usr/bin/env python\n# vim: set fileencoding=cp1252 :\n# \x80\n" + DEPRECATED.encode(),
        b"# coding: no-such-codec\n" + DEPRECATED.encode(),
        b"# gr\xf6\xdfe without a cookie\n" + DEPRECATED.encode(),
        DEPRECATED.encode("utf-16"),
        DEPRECATED.replace("\n", "\r\n").encode(),
        DEPRECATED.replace("\n", "\r").encode(),
    ],
    ids=["utf-8", "bom", "latin-1 cookie", "cp1252 cookie", "unknown cookie", "no cookie", "utf-16", "crlf", "cr"],
)
def test_every_encoding_is_read(tmp_path, data):
    (tmp_path / "a.py").write_bytes(data)
    (finding,) = check_model(tmp_path / "a.py")
    assert finding.code == "REGION_DEPRECATED"
    lines = data.decode("utf-16" if data[:2] == b"\xff\xfe" else "latin-1").splitlines()
    assert lines[finding.line - 1] == "scaler = torch.cuda.amp.GradScaler()"


def test_an_encoding_that_had_to_be_guessed_is_noted(tmp_path):
    (tmp_path / "a.py").write_bytes(b"# \xf6\n")
    assert check_paths([str(tmp_path)]).notes == [f"{tmp_path}/a.py: not utf-8; read as latin-1"]


def test_columns_are_counted_in_characters_not_in_bytes(tmp_path):
    (tmp_path / "a.py").write_text('import torch\nx = "größe"; scaler = torch.cuda.amp.GradScaler()\n')
    (finding,) = check_model(tmp_path / "a.py")
    assert finding.column == len('x = "größe"; scaler = ') + 1


def test_binary_and_huge_files_are_skipped_with_a_note(tmp_path):
    (tmp_path / "a.py").write_bytes(b"\x7fELF\0\0\0")
    (tmp_path / "b.py").write_text("x = 1\n" * 400_000)
    (tmp_path / "c.py").write_text(DEPRECATED)
    report = check_paths([str(tmp_path)])
    assert [finding.code for finding in report.findings] == ["REGION_DEPRECATED"]
    binary, huge = report.notes
    assert "a.py: skipped, it is a binary file" in binary
    assert "b.py: skipped, 2.3 MB is more than" in huge


@pytest.mark.parametrize(
    "deep",
    [
        "x = " + "(" * 5000 + "1" + ")" * 5000,
        "x = " + "-" * 200_000 + "1",
        "x = 1" + " + 1" * 20_000,
        "x = a" + ".b" * 3000,
    ],
    ids=["parentheses", "minus signs", "sum", "attributes"],
)
def test_deep_nesting_does_not_end_the_run(tmp_path, deep):
    (tmp_path / "a.py").write_text(f"{deep}\n{DEPRECATED}")
    (tmp_path / "b.py").write_text(DEPRECATED)
    report = check_paths([str(tmp_path)])
    assert [f.code for f in report.findings if f.file.endswith("b.py")] == ["REGION_DEPRECATED"]
    of_deep = [f.code for f in report.findings if f.file.endswith("a.py")]  # which of these depends on the Python version
    assert of_deep in (["REGION_DEPRECATED"], ["SYNTAX_ERROR"]) or "a.py: skipped, its code is nested" in report.notes[0]


@pytest.mark.slow
def test_a_long_chain_of_elif_is_still_checked(tmp_path):
    chain = "if n == 0:\n    pass\n" + "".join(f"elif n == {i}:\n    pass\n" for i in range(1, 700))
    (tmp_path / "a.py").write_text(f"{DEPRECATED}n = 3\n{chain}")
    report = check_paths([str(tmp_path)])
    assert [finding.code for finding in report.findings] == ["REGION_DEPRECATED"]
    assert report.notes == []


def test_linked_folders_are_not_entered_and_loops_do_no_harm(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text(DEPRECATED)
    (tmp_path / "pkg" / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "self.py").symlink_to(tmp_path / "self.py")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    report = check_paths([str(tmp_path)])
    assert len(report.findings) == 1
    assert len(report.notes) == 2
    assert len(check_model(tmp_path / "pkg" / "again")) == 1


def test_a_link_to_a_file_is_not_a_second_file(tmp_path):
    (tmp_path / "a.py").write_text(DEPRECATED)
    (tmp_path / "b.py").symlink_to(tmp_path / "a.py")
    assert len(check_model(tmp_path)) == 1


def test_a_pipe_in_the_folder_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "a.py")
    (tmp_path / "b.py").write_text(DEPRECATED)
    assert codes(tmp_path) == ["REGION_DEPRECATED"]


def test_a_file_deleted_during_the_walk_is_noted(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(DEPRECATED)
    walk = list(find_files(str(tmp_path), []))
    (tmp_path / "a.py").unlink()
    texts = [read_text(found) for found in walk]
    assert texts[0] == f"{tmp_path}/a.py: skipped, no such file or directory"
    assert texts[1].text == DEPRECATED


def test_a_folder_deleted_during_the_walk_is_noted(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text(DEPRECATED)
    notes: list[str] = []
    walk = find_files(str(tmp_path), notes)
    assert next(walk).path == f"{tmp_path}/a/x.py"
    (tmp_path / "b" / "x.py").unlink()
    (tmp_path / "b").rmdir()
    assert list(walk) == []
    assert notes == [f"{tmp_path}/b: skipped, no such file or directory"]


def test_folders_of_tools_and_environments_are_left_out(tmp_path):
    for folder in (".venv/lib", ".git", "build", "node_modules/x", "__pycache__", "my_env", "src"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("x = 1\n")
    (tmp_path / "my_env" / "pyvenv.cfg").write_text("")
    assert names(tmp_path) == ["src/a.py"]
    assert names(tmp_path / "build") == ["a.py"]


def test_patterns_of_exclude_name_files_folders_and_trees(tmp_path):
    for name in ("a.py", "old/a.py", "src/old/b.py", "src/keep.py", "notes.ipynb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    root = str(tmp_path)
    assert names(tmp_path, exclude=("old",), root=root) == ["a.py", "notes.ipynb", "src/keep.py"]
    assert names(tmp_path, exclude=("src/", "*.ipynb"), root=root) == ["a.py", "old/a.py"]
    assert matches_path(f"{root}/src/x/y.py", ("src/**/y.py",), root)
    assert matches_path(f"{root}/src/y.py", ("src/**/y.py",), root)
    assert not matches_path(f"{root}/src/my.py", ("src/y.py",), root)


def test_check_model_takes_paths_and_source_text(tmp_path):
    (tmp_path / "a.py").write_text(DEPRECATED)
    assert codes(DEPRECATED) == codes(str(tmp_path / "a.py")) == codes(tmp_path) == ["REGION_DEPRECATED"]
    assert codes("scaler = 1") == codes("import torch") == codes("") == []
    for missing in ("missing_model.py", "src/modl", "weights.pt"):
        with pytest.raises(NannyError, match="no such file"):
            check_model(missing)
    with pytest.raises(NannyError, match="path or source text, not dict"):
        check_model({})
    with pytest.raises(NannyError, match="device must be one of"):
        check_model(DEPRECATED, device="tpu")


def test_a_named_file_is_python_whatever_it_is_called(tmp_path):
    (tmp_path / "train").write_text(DEPRECATED)
    assert codes(tmp_path / "train") == ["REGION_DEPRECATED"]
    assert codes(tmp_path) == []


def test_files_of_one_folder_are_checked_together(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(8, 8)\n\n    def forward(self, x):\n        return torch.sigmoid(self.fc(x)).mean() + 1e-8\n"
    )
    (tmp_path / "train.py").write_text(
        "import torch\nfrom model import Net\n\nnet = Net().cuda()\nwith torch.autocast('cuda', dtype=torch.float16):\n"
        "    loss = 1 / net(torch.ones(4, 8, device='cuda'))\n"
    )
    assert codes(tmp_path / "model.py") == []
    together = [(f.code, os.path.basename(f.file)) for f in check_model(tmp_path)]
    assert ("NUM_EPS_UNDERFLOW", "model.py") in together


def test_decode_tells_binary_from_text():
    assert decode(b"abc\0") is None
    assert decode(b"").text == ""


def test_reading_says_what_it_could_not_read(tmp_path):
    assert "is a directory" in read_text(Found(str(tmp_path), "python"))


NOTEBOOK = {
    "metadata": {"language_info": {"name": "python"}},
    "nbformat": 4,
    "cells": [
        {"cell_type": "markdown", "source": ["# Training"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip list\n", "import torch\n", "a = !ls\n", "torch?"]},
        {"cell_type": "code", "source": "%%bash\nrm -rf def class\n"},
        {"cell_type": "code", "source": "for x in (:\n"},
        {"cell_type": "code", "source": ["%%time\n", "if True:\n", "    !nvidia-smi\n", "scaler = torch.cuda.amp.GradScaler()"]},
        {"cell_type": "code", "source": "again = torch.cuda.amp.GradScaler()  # noqa: REGION_DEPRECATED"},
    ],
}


def test_findings_in_a_notebook_name_cell_and_line(tmp_path):
    (tmp_path / "n.ipynb").write_text(json.dumps(NOTEBOOK))
    report = check_paths([str(tmp_path)])
    assert [(f.code, f.cell, f.line) for f in report.findings] == [("SYNTAX_ERROR", 4, 1), ("REGION_DEPRECATED", 5, 4)]
    assert report.lines[f"{tmp_path}/n.ipynb", 5][3].startswith("scaler")


def test_lines_in_the_message_are_those_of_the_cell(tmp_path):
    train = (
        "scaler = torch.amp.GradScaler('cuda')\nfor x in data:\n    with torch.autocast('cuda'):\n        loss = model(x).sum()\n"
        "    scaler.scale(loss).backward()\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    scaler.step(opt)\n    scaler.update()\n"
    )
    cells = [*NOTEBOOK["cells"][:2], {"cell_type": "code", "source": train}]
    (tmp_path / "n.ipynb").write_text(json.dumps({**NOTEBOOK, "cells": cells}))
    (finding,) = check_model(tmp_path / "n.ipynb")
    assert (finding.code, finding.cell, finding.line) == ("SCALER_CLIP_BEFORE_UNSCALE", 3, 6)
    assert "line 5" not in finding.message.replace("cell 3, line 5", "")


def test_old_and_foreign_notebooks(tmp_path):
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": [DEPRECATED]}]}], "metadata": {}}
    (tmp_path / "old.ipynb").write_text(json.dumps(old))
    (tmp_path / "r.ipynb").write_text(json.dumps({**NOTEBOOK, "metadata": {"kernelspec": {"language": "R"}}}))
    (tmp_path / "zbroken.ipynb").write_text("{")
    (tmp_path / "zempty.ipynb").write_text('{"cells": []}')
    (tmp_path / "zlist.ipynb").write_text("[1]")
    report = check_paths([str(tmp_path)], Config())
    assert [finding.code for finding in report.findings] == ["REGION_DEPRECATED", "SYNTAX_ERROR", "SYNTAX_ERROR"]
    assert report.notes == [f"{tmp_path}/r.ipynb: skipped, its code is not Python"]
