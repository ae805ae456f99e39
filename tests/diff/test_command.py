"""`nanny diff` as a user types it: the seeds' command line, its outputs and exit codes, and clear sentences for bad input."""

from __future__ import annotations

import json
import re
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


@pytest.mark.slow
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


def test_where_all_is_nan_no_error_of_zero_is_shown(folder, capsys):
    (folder / "nan.py").write_text(BROKEN.replace("/ 160000", "* 0"))
    main(["diff", "--model", "nan.py", "--input", "sample.pt", "--dtype", "fp16", "--no-backward"])
    lines = capsys.readouterr().out.splitlines()
    spoiled = [line for line in lines if line.startswith("2 (Linear)")]
    assert spoiled
    assert spoiled[0].split()[4] == "-"
    assert not [line for line in lines if line.startswith("  2, dim")]
    assert any(line.startswith("output") and line.endswith("nothing is left to compare") for line in lines)


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


def test_what_is_asked_on_the_command_line_is_what_runs(folder, capsys):
    (folder / "noisy.py").write_text(MODEL.replace("torch.relu", "torch.dropout(x, 0.5, self.training) + torch.relu"))
    base = ["diff", "--model", "noisy.py", "--input", "sample.pt", "--dtype", "fp16", "--format", "json"]

    def told(*flags: str) -> dict:
        main([*base, *flags])
        return json.loads(capsys.readouterr().out)

    data = told("--loss-scale", "8", "--reference", "fp64", "--no-own", "--rel-error", "1e-9")
    assert (data["training"], data["reference"], data["total"]["loss_scale"]) == (True, "fp64", 8)
    assert {call["own"] for call in data["calls"]} == {None}
    assert {(f["code"], f["severity"]) for f in data["findings"]} == {("REL_ERROR", "ERROR")}
    assert told("--seed", "1")["reference_loss"] == told("--seed", "1")["reference_loss"] != data["reference_loss"]
    assert told("--eval")["training"] is False


def test_a_list_in_the_file_is_a_list_of_batches(folder, capsys):
    torch.save([torch.randn(4, 8), torch.randn(2, 8)], "many.pt")
    assert main(["diff", "--model", "model.py", "--input", "many.pt"]) == 0
    assert "2 batches" in capsys.readouterr().out


WITH_TARGET = """
import torch

def loss(out, target):
    return torch.nn.functional.cross_entropy(out, target)
"""


@pytest.mark.parametrize("how", ["in the sample", "in its own file", "under a key", "in every batch"])
def test_the_target_of_the_loss_comes_from_a_file(folder, how, capsys):
    (folder / "losses.py").write_text(WITH_TARGET)
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 1, 0])
    torch.save({"input": x, "target": y}, "both.pt")
    torch.save(y, "y.pt")
    torch.save({"labels": y}, "keys.pt")
    torch.save([{"input": x, "target": y}, {"input": x[:2], "target": y[:2]}], "many.pt")
    arguments = {
        "in the sample": ["--input", "both.pt"],
        "in its own file": ["--input", "sample.pt", "--target", "y.pt"],
        "under a key": ["--input", "sample.pt", "--target", "keys.pt:labels"],
        "in every batch": ["--input", "many.pt"],
    }[how]
    assert main(["diff", "--model", "model.py", *arguments, "--loss", "losses.py:loss", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert 0.3 < data["reference_loss"] < 1.5
    assert data["notes"] == []
    assert data["batches"] == (2 if how == "in every batch" else 1)


def test_the_page_is_one_file_that_loads_nothing(folder):
    base = ["diff", "--model", "broken.py", "--input", "sample.pt", "--dtype", "fp16"]
    assert main([*base, "--format", "html", "--output", "page.html"]) == 1
    text = (folder / "page.html").read_text()
    assert text.lstrip().lower().startswith("<!doctype html")
    assert "DIFF_NONFINITE" in text
    assert not re.search(r"""(src|href)=["']https?:""", text)


@pytest.mark.slow
def test_the_text_fits_into_a_hundred_columns(folder, capsys):
    (folder / "long.py").write_text(LONG)
    torch.save(torch.randn(4, 6, 32), "long.pt")
    for more in ([], ["--all"], ["--advise", "0.0001"], ["--dtype", "fp16"]):
        main(["diff", "--model", "long.py", "--input", "long.pt", *more])
        assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 100


LONG = """
import torch
from torch import nn

class Offset(nn.Module):
    def forward(self, x):
        return (x + 3000) - 3000

def build_model():
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    return nn.Sequential(layers, nn.Sequential(nn.Sequential(Offset(), nn.Linear(32, 32))), nn.Linear(32, 5))
"""


def test_an_interrupt_prints_the_calls_seen_so_far_and_exits_130(folder, capsys):
    (folder / "stops.py").write_text(STOPS)
    assert main(["diff", "--model", "stops.py", "--input", "sample.pt", "--no-backward"]) == 130
    out = capsys.readouterr().out
    assert "nothing wrong in bf16 so far (interrupted)" in out
    assert "interrupted in batch 1 of 1, after 2 module calls" in out
    assert "1 (Linear)" in out


STOPS = """
from torch import nn

class Stop(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Stop(), nn.Linear(8, 8))
"""


BAD = {
    "negative limit": (["--model", "model.py", "--input", "sample.pt", "--rel-warn", "-1"], "is no relative error"),
    "no input": (["--model", "model.py"], "--input is missing: a file with what Net.forward(x) takes"),
    "no such input": (["--model", "model.py", "--input", "nowhere.pt"], "there is no such file"),
    "empty input": (["--model", "model.py", "--input", "empty.pt"], "the file is empty"),
    "damaged input": (["--model", "model.py", "--input", "text.pt"], "not a file that torch.save wrote"),
    "damaged weights": (
        ["--model", "model.py", "--input", "sample.pt", "--weights", "text.safetensors"],
        "not a file that safetensors wrote",
    ),
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
    "loss without its target": (
        ["--model", "model.py", "--input", "sample.pt", "--loss", "pair.py:loss"],
        "takes out, target, but there is no target",
    ),
    "target without a loss": (["--model", "model.py", "--input", "sample.pt", "--target", "sample.pt"], "--target needs --loss"),
    "no such key": (
        ["--model", "model.py", "--input", "sample.pt", "--loss", "pair.py:loss", "--target", "none.pt:y"],
        "has no 'y'; it has a",
    ),
    "target that does not fit": (
        ["--model", "model.py", "--input", "sample.pt", "--loss", "pair.py:loss", "--target", "shape.pt"],
        "the loss or its backward raises in FP32 too, called as loss(output, target)",
    ),
    "forward that changes its weights": (["--model", "mutates.py", "--input", "sample.pt"], "changes the parameter weight"),
    "loss that is no number": (["--model", "model.py", "--input", "sample.pt", "--loss", "vector.py:loss"], "single number"),
}


MUTATES = """
import torch
from torch import nn

class Shrinks(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)

model = Shrinks(8, 2)
"""


class Harmless:
    pass


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_sentence_and_exit_code_2(folder, case, capsys):
    (folder / "empty.pt").write_bytes(b"")
    for name in ("text.pt", "text.safetensors"):
        (folder / name).write_text("not a tensor at all")
    torch.save(Harmless(), "code.pt")
    torch.save({"a": 1}, "none.pt")
    torch.save(torch.randn(4, 9), "shape.pt")
    (folder / "nothing.py").write_text("x = 1\n")
    (folder / "fails.py").write_text("1 / 0\n")
    (folder / "needs.py").write_text("from torch import nn\ndef build_model(width):\n    return nn.Linear(8, width)\n")
    (folder / "gives.py").write_text("def build_model():\n    return 3\n")
    (folder / "meta.py").write_text("import torch\nmodel = torch.nn.Linear(8, 2, device='meta')\n")
    (folder / "pair.py").write_text("def loss(out, target):\n    return (out - target).square().mean()\n")
    (folder / "mutates.py").write_text(MUTATES)
    (folder / "vector.py").write_text("def loss(out):\n    return out.sum(1)\n")
    arguments, sentence = BAD[case]
    assert main(["diff", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
