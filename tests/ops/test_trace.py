"""`nanny trace`: a script that was not changed, its operations watched; and two ranks that do not disturb each other."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nanny.cli import main

SCRIPT = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.act, self.head = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.act(self.encode(x)))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
amp = "--amp" in sys.argv
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=amp)
for step in range(4):
    x = torch.randn(4, 8) * (1e3 if "--blow-up" in sys.argv and step >= 2 else 1.0)
    with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
        loss = (model(x) * 10).pow(2).mean()  # overflows
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print("weights", model.encode.weight.double().sum().item())
if "--raise" in sys.argv:
    raise ValueError("of the script")
sys.exit(7 if "--exit" in sys.argv else 0)
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
BLOWN = next(i for i, line in enumerate(SCRIPT.splitlines(), 1) if "# overflows" in line)

RANKS = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from nanny import CompareWithCPU, NanInfTracker

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
data = torch.randn(2, 4) * (1.0 if rank == 0 else float("nan"))
with CompareWithCPU(should_log_to_file=True, output_dir="both", verbose=True, strict=True) as both, \\
        CompareWithCPU(should_log_to_file=True, output_dir="one", enable_ranks=[1], strict=True) as one, \\
        NanInfTracker(should_log_to_file=True, output_dir="both", strict=True) as tracker:
    model(data).sum().backward()
    dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
print(rank, len(both.faults), one.tally.operations > 0, [f.op for f in tracker.faults])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nanny"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    return tmp_path


@pytest.fixture
def trace(folder, capsys):
    """The command in this process: exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["trace", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def alone(capsys, *arguments: str) -> str:
    sys.argv = ["train.py", *arguments]
    with pytest.raises(SystemExit):
        runpy.run_path("train.py", run_name="__main__")
    return capsys.readouterr().out


def test_a_healthy_script_prints_and_returns_what_it_does_alone(trace, capsys):
    expected = alone(capsys, "--exit", "x y")
    code, out, err = trace("--compare", "--nan", "train.py", "--exit", "x y")
    assert (code, out) == (7, expected)
    assert "0 made NaN or Inf" in err
    assert "[ERROR]" not in err
    assert "[WARNING]" not in err


@pytest.mark.slow
def test_the_command_runs_in_a_process_of_its_own(folder):
    done = subprocess.run(
        [sys.executable, "-m", "nanny.cli", "trace", "train.py"], capture_output=True, text=True, timeout=120, env=ENVIRONMENT
    )
    assert done.returncode == 0
    assert done.stdout.startswith("weights")
    assert done.stderr.splitlines()[-1].startswith("NanInfTracker:")


def test_who_made_the_first_infinity_is_named_with_step_and_line(trace):
    code, _, err = trace("train.py", "--amp", "--blow-up")
    assert code == 1
    warnings = [line for line in err.splitlines() if "[WARNING]" in line]
    assert warnings[0] == "[WARNING] torch.ops.aten.pow(loop) makes Inf out of finite numbers"
    assert f"step 2, train.py:{BLOWN}" in err


def test_the_window_limits_what_is_watched(trace):
    assert trace("--end-step", "2", "train.py", "--amp", "--blow-up")[0] == 0
    assert trace("--op", "addmm", "train.py", "--amp", "--blow-up")[0] == 0


def test_operations_are_left_out_and_tolerances_are_taken_as_given(trace):
    """An exact limit makes rounding a fault; what is on the white list is none."""
    exact = ("--compare", "--end-step", "1", "--atol", "0", "--rtol", "0")
    code, _, err = trace(*exact, "train.py")
    assert code == 1
    assert "atol 0, rtol 0" in err
    assert "torch.ops.aten.addmm(forward)" in err
    code, _, err = trace(*exact, "--white-list", "*", "train.py")
    assert code == 0
    assert "not compared: white list" in err


def test_modules_are_chosen_and_the_log_goes_to_a_file(folder, trace):
    _, _, err = trace("--compare", "--module", "head", "--verbose", "--log", "train.py")
    log = (folder / "nanny_logs" / "ops" / "CompareWithCPU.rank0.log").read_text()
    compared = {line.split("(")[0] for line in log.splitlines() if "succeeds" in line}
    assert compared == {"Net/Linear/torch.ops.aten." + op for op in ("addmm", "mm", "sum")}
    assert "CompareWithCPU:" in err
    assert [f"step = {i}" in log for i in range(5)] == [True] * 4 + [False]


def test_faults_are_saved_and_the_script_goes_on(folder, trace, capsys):
    expected = alone(capsys, "--amp", "--blow-up")
    code, out, _ = trace("--compare", "--nan", "--dump", "--output-dir", "dumps", "train.py", "--amp", "--blow-up")
    assert (code, out) == (1, expected)
    assert (folder / "dumps" / "torch.ops.aten.pow_inputs.safetensors").exists()


def test_hazards_of_one_step_are_listed(trace):
    code, _, err = trace("--sanitize", "--start-step", "2", "train.py", "--amp", "--blow-up")
    assert code == 1
    assert f"train.py:{BLOWN}" in err
    assert trace("--sanitize", "--start-step", "1", "train.py", "--amp", "--blow-up")[0] == 0


def test_an_exception_of_the_script_is_its_own(trace, capsys):
    with pytest.raises(ValueError, match="of the script"):
        trace("train.py", "--raise")
    assert "NanInfTracker:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs a script"),
        (("nothing.py",), "there is no script 'nothing.py'"),
        (("--atol", "1", "train.py"), "tolerances of --compare"),
        (("--op", "admm", "train.py"), "no operation 'admm'"),
    ],
)
def test_mistakes_on_the_command_line_are_told_in_one_sentence(trace, arguments, said):
    code, out, err = trace(*arguments)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.slow
def test_two_ranks_write_two_logs_and_only_the_named_rank_is_watched(tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    started = [
        subprocess.Popen(
            [sys.executable, "ranks.py", str(tmp_path / "meet"), str(rank)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120) for process in started]
    assert said[0][0] == "0 0 False ['allreduce_ (from another rank)']\n", said[0][1]
    assert said[1][0].startswith("1 0 True ['data'"), said[1][1]
    logs = {p.relative_to(tmp_path).as_posix(): p.read_text() for p in tmp_path.glob("*/*.log")}
    assert set(logs) == {
        "both/CompareWithCPU.rank0.log",
        "both/CompareWithCPU.rank1.log",
        "both/NanInfTracker.rank0.log",
        "both/NanInfTracker.rank1.log",
        "one/CompareWithCPU.rank1.log",
    }
    assert "[0] succeeds to pass" in logs["both/CompareWithCPU.rank0.log"]
    assert "collective" in logs["both/CompareWithCPU.rank0.log"]
    assert "rank 1" in logs["both/NanInfTracker.rank1.log"]
