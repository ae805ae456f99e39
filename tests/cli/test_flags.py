"""One flag, one meaning: what a command takes and how it ends is the same for all, and what is not has its reason here."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import run_command
from runs.query_recordings import SICK, nanny, record
from show.test_chinese import english_in

from nanny import cli
from nanny.cli import doctor
from nanny.core.command_line import Parser
from nanny.core.finding import NannyError

SERVES = dict.fromkeys(("lsp", "mcp", "completion"), "speaks to programs")
PAGES = {"report": "writes a page", "ui": "serves a page", "card": "draws", "plot": "draws"}
WITHOUT = {
    "--db": {"compare": "takes it, but its runs may name their own"},
    "--run": {"ui": "shows all runs"},
    "-o": {
        **SERVES,
        "run": "its output is the script's own",
        "ui": "serves a page",
        "tail": "goes on and on",
    },
    "--lang": {**SERVES, "plot": "numbers and names of layers"},
    "--format": {
        **SERVES,
        **PAGES,
        "run": "its output is the script's own",
        "export": "csv, parquet, tensorboard",
        "demo": "a story",
    },
}
READS_A_RUN = {name for name, (module, _) in cli.COMMANDS.items() if module in cli.READ_RUNS}
HELD_BACK = {"compare"}  # from what is asked of --db: see WITHOUT


class AskedError(Exception):
    pass


def flags(command: str) -> dict[str, Any]:
    """The options that the command's own parser knows."""
    found: list[Parser] = []

    def stop(parser: Parser, *_args: Any) -> None:
        found.append(parser)
        raise AskedError

    with mock.patch.object(Parser, "parse_args", stop), contextlib.suppress(AskedError, NannyError):
        cli.run_command([command])
    return found[0]._option_string_actions


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_a_command_takes_the_flags_that_all_take(command):
    takes = flags(command)
    asked = ["-o", "--lang", "--format", *(("--db", "--run") if command in READS_A_RUN - HELD_BACK else ())]
    missing = [flag for flag in asked if flag not in takes and command not in WITHOUT[flag]]
    assert missing == []
    if "-o" in takes:
        assert takes["-o"] is takes["--output"]
    if "--format" in takes and command not in WITHOUT["--format"]:
        assert "json" in takes["--format"].choices
    if "--lang" in takes:
        assert tuple(takes["--lang"].choices) == ("en", "zh")


def test_what_is_excused_is_really_missing():
    excused = [(flag, name) for flag, names in WITHOUT.items() for name in names if name not in HELD_BACK]
    had = [(flag, name) for flag, name in excused if flag in flags(name)]
    assert [pair for pair in had if pair[0] != "--format"] == []
    with_json = [name for flag, name in had if "json" in flags(name)[flag].choices]
    assert with_json == []


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_a_wrong_flag_is_one_sentence_and_exit_code_2(command, capsys):
    assert cli.main([command, "--no-such-flag"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("nanny: ")
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["alerts", "check", "diff", "tensor"])
def test_a_flag_with_a_typing_mistake_gets_the_nearest(command, capsys):
    needed = {"check": ["x.py"], "tensor": ["x.pt"], "diff": ["--model", "m.py", "--input", "x.pt"]}.get(command, [])
    assert cli.main([command, *needed, "--formt=json"]) == 2
    assert "--formt=json, did you mean '--format'? type `nanny" in capsys.readouterr().err


def test_a_result_goes_into_a_file_as_it_would_go_to_the_terminal(tmp_path, capsys):
    store = str(record(tmp_path, SICK))
    for words in (["summary"], ["alerts", "--format", "csv"], ["diagnose", "--format", "markdown"], ["stats"]):
        code = cli.main([*words, "--db", store])
        shown = capsys.readouterr().out
        assert cli.main([*words, "--db", store, "-o", str(tmp_path / "out")]) == code
        assert (tmp_path / "out").read_text(encoding="utf-8") == shown
        assert capsys.readouterr().out == ""


MODEL = """
from torch import nn

class Square(nn.Module):
    def forward(self, x):
        return x * x

model = nn.Sequential(nn.Linear(8, 8), Square(), nn.Linear(8, 8))
"""
LOGARITHM = """
import torch
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Log(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 8) * 300).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    weights = torch.randn(64, 64) * 1e-3 + 2
    weights[3] *= 1e5
    torch.save({"w": weights, "ids": torch.arange(5000.0)}, tmp_path / "t.pt")
    torch.save(torch.randn(4, 8) * 3000, tmp_path / "x.pt")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(LOGARITHM)
    return tmp_path


@pytest.mark.landing
@pytest.mark.parametrize(
    "command",
    [
        "tensor t.pt:w --dtype fp16 --tile 16",
        "tensor t.pt:ids",
        pytest.param("diff --model model.py --input x.pt --dtype fp16", marks=pytest.mark.slow),
        pytest.param("diff --model model.py --input x.pt --advise 0.0001", marks=pytest.mark.slow),
        pytest.param("trace --nan train.py", marks=pytest.mark.slow),
        pytest.param("trace --compare train.py", marks=pytest.mark.slow),
        pytest.param("trace --sanitize train.py", marks=pytest.mark.slow),
        pytest.param("run train.py", marks=pytest.mark.slow),
    ],
)
def test_what_is_said_is_chinese_where_it_is_asked_for(command, folder):
    name, *words = command.split()
    done = nanny(name, "--lang", "zh", *words, cwd=folder)
    lines = (done.stdout + done.stderr).splitlines()
    log = max((number for number, line in enumerate(lines) if line.startswith("nanny: ")), default=-1)  # of the run: English
    ours = lines[log + 1 :] if name == "run" else lines
    said = "\n".join(ours)
    assert sum("\u4e00" <= char <= "\u9fff" for char in said) > 20
    assert [line for line in ours if english_in(line)] == []


@pytest.mark.landing
def test_the_doctor_speaks_chinese():
    report = doctor.examine()
    report["problems"] = [{"what": "numpy is not installed", "fix": "pip install numpy"}]
    report["extras"][0] |= {"missing": ["matplotlib"], "installed": {}}
    said = doctor.render(report, "zh")
    assert "缺少 matplotlib" in said
    assert "有误：没有安装 numpy" in said
    assert [line for line in said.splitlines() if english_in(line)] == []


@pytest.mark.slow
def test_a_trace_is_data_too(folder):
    done = nanny("trace", "--sanitize", "--nan", "--format", "json", "-o", "found.json", "train.py", cwd=folder)
    assert done.returncode == 1
    answer = json.loads((folder / "found.json").read_text())
    assert answer["examination"]["first_bad"]["op"] == "log"
    assert answer["examination"]["hazards"]
    assert nanny("trace", "-o", "found.txt", "train.py", cwd=folder).returncode == 2


@pytest.mark.landing
def test_a_run_speaks_chinese_from_its_first_line_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for step in range(6):\n"
        "    weight = torch.ones(8, 1).log() / (0.0 if step > 3 else 1.0)\n"
        "    loss = (model(torch.ones(8, 4)) * weight).mean()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    said = run_command("nanny", "run", "--lang", "zh", "train.py", cwd=tmp_path).stderr.decode()
    live, _, _ = said.partition("\n\n")
    words = [line for line in live.splitlines() if line.startswith(("nanny: ", "       -> "))]
    assert len(words) >= 6, said
    assert [line for line in words if english_in(line)] == []
