"""`nanny diff` as a user types it: the seeds' command line, its outputs and exit codes, and clear sentences for bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from nanny.cli import main

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.relu(self.inner(x)))
"""

BROKEN = """
import torch
from torch import nn

class Square(nn.Module):
    def forward(self, x):
        return (x * 400) ** 2 / 160000

def build_model():
    return nn.Sequential(nn.Linear(8, 8), Square(), nn.Linear(8, 2))

def my_loss(out):
    return out.square().mean()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text(BROKEN)
    torch.save(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), "sample.pt")
    return tmp_path


def test_the_seeds_command_line_works_verbatim(folder):
    done = subprocess.run(
        [sys.executable, "-m", "nanny.cli", "diff", "--model", "model.py", "--input", "sample.pt", "--dtype", "bf16"],
        capture_output=True, text=True, cwd=folder, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Net: healthy in bf16" in done.stdout
    assert "inner (Linear)" in done.stdout
    assert "bfloat16" in done.stdout
    assert "running the code in model.py" in done.stderr


def test_a_broken_model_exits_1_and_names_the_module(folder, capsys):
    assert main(["diff", "--model", "broken.py", "--input", "sample.pt", "--dtype", "fp16"]) == 1
    out = capsys.readouterr().out
    assert "DIFF_NONFINITE" in out
    assert out.index("1: ERROR") < out.index("module calls")
    assert main(["diff", "--model", "broken.py", "--input", "sample.pt", "--dtype", "fp16", "--fail-on", "never"]) == 0


def test_json_of_a_model_full_of_infinities_is_valid_json(folder):
    base = ["diff", "--model", "broken.py:build_model", "--input", "sample.pt", "--dtype", "fp16", "--loss", "broken.py:my_loss"]
    assert main([*base, "--format", "json", "--output", "out.json"]) == 1

    def refuse(name):
        raise AssertionError(f"bare {name} in JSON")

    data = json.loads((folder / "out.json").read_text(), parse_constant=refuse)
    assert data["findings"][0]["site"] == "1"
    assert data["calls"][0]["dtype"] == "float16"


def test_limits_of_the_seeds_can_be_made_the_rule(folder, capsys):
    base = ["diff", "--model", "model.py", "--input", "sample.pt", "--dtype", "bf16", "--no-backward"]
    assert main(base) == 0
    assert main([*base, "--rel-warn", "0.0001"]) == 1
    assert "REL_ERROR" in capsys.readouterr().out


def test_a_list_in_the_file_is_a_list_of_batches(folder, capsys):
    torch.save([torch.randn(4, 8), torch.randn(2, 8)], "many.pt")
    assert main(["diff", "--model", "model.py", "--input", "many.pt"]) == 0
    assert "2 batches" in capsys.readouterr().out


BAD = {
    "no input": (["--model", "model.py"], "--input is missing: a file with what Net.forward(x) takes"),
    "no such input": (["--model", "model.py", "--input", "nowhere.pt"], "there is no such file"),
    "empty input": (["--model", "model.py", "--input", "empty.pt"], "the file is empty"),
    "damaged input": (["--model", "model.py", "--input", "text.pt"], "not a file that torch.save wrote"),
    "input with code": (["--model", "model.py", "--input", "code.pt"], "would run code"),
    "input without tensors": (["--model", "model.py", "--input", "none.pt"], "holds no tensor"),
    "wrong shape": (["--model", "model.py", "--input", "shape.pt"], "raises in FP32 too"),
    "no such model": (["--model", "nowhere.py", "--input", "sample.pt"], "there is no such file"),
    "no such factory": (["--model", "model.py:build", "--input", "sample.pt"], "has no 'build'; it has: Net"),
    "no model at all": (["--model", "nothing.py", "--input", "sample.pt"], "has no model"),
    "file that fails": (["--model", "fails.py", "--input", "sample.pt"], "cannot be run (ZeroDivisionError"),
    "factory with arguments": (["--model", "needs.py", "--input", "sample.pt"], "needs width"),
    "not a model": (["--model", "gives.py:build_model", "--input", "sample.pt"], "gives a int"),
    "meta device": (["--model", "meta.py", "--input", "sample.pt"], "meta device"),
    "weights as model": (["--model", "sample.pt", "--input", "sample.pt"], "takes a Python file"),
    "no such loss": (["--model", "model.py", "--input", "sample.pt", "--loss", "model.py:nope"], "has no function 'nope'"),
    "unknown dtype": (["--model", "model.py", "--input", "sample.pt", "--dtype", "fp8"], "invalid choice"),
    "output folder missing": (["--model", "model.py", "--input", "sample.pt", "--output", "no/where.txt"], "cannot be written"),
    "loss that is no number": (["--model", "model.py", "--input", "sample.pt", "--loss", "vector.py:loss"], "single number"),
}


class Harmless:
    pass


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_sentence_and_exit_code_2(folder, case, capsys):
    (folder / "empty.pt").write_bytes(b"")
    (folder / "text.pt").write_text("not a tensor at all")
    torch.save(Harmless(), "code.pt")
    torch.save({"a": 1}, "none.pt")
    torch.save(torch.randn(4, 9), "shape.pt")
    (folder / "nothing.py").write_text("x = 1\n")
    (folder / "fails.py").write_text("1 / 0\n")
    (folder / "needs.py").write_text("from torch import nn\ndef build_model(width):\n    return nn.Linear(8, width)\n")
    (folder / "gives.py").write_text("def build_model():\n    return 3\n")
    (folder / "meta.py").write_text("import torch\nmodel = torch.nn.Linear(8, 2, device='meta')\n")
    (folder / "vector.py").write_text("def loss(out):\n    return out.sum(1)\n")
    arguments, sentence = BAD[case]
    assert main(["diff", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
