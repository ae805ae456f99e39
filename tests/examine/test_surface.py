"""What a user meets of the sanitizer and of the operation tools: arguments, scripts under `nanny trace`, follow-up commands."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs.query_recordings import Recipe, nanny, record
from torch import nn

from nanny import CompareWithCPU, NanInfTracker, sanitize
from nanny.core.finding import Finding, NannyError, Severity
from nanny.watch import events
from nanny.watch.places import _is_user_file
from nanny.watch.steps import StepClock

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

MASKED = """
import sys
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        mask[0] = "full" in sys.argv
        return (q @ k.mT).masked_fill(mask, float("-inf")).softmax(-1) @ v  # the mask

torch.manual_seed(0)
model = Attention().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(2):
    model(torch.randn(2, 5, 8, dtype=torch.bfloat16)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def trace(folder: Path, source: str, *options: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(source)
    command = [sys.executable, "-m", "nanny.cli", "trace", *options, "train.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, timeout=120)


@pytest.mark.parametrize("tool", [CompareWithCPU, NanInfTracker])
def test_the_signature_names_every_option(tool):
    parameters = inspect.signature(tool).parameters
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())
    assert {"enabled", "target_list", "target_op", "white_list", "dump_error_data", "verbose", "enable_ranks"} <= set(parameters)
    assert {"should_log_to_file", "output_dir", "start_step", "end_step"} <= set(parameters)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"atol": "small"}, "no tolerance"),
        ({"rtol": -1.0}, "no tolerance"),
        ({"atol": float("nan")}, "no tolerance"),
        ({"enable_ranks": 0}, r"enable_ranks=\[0\]"),
        ({"start_step": -3}, "counted from 0"),
    ],
)
def test_wrong_arguments_are_told_with_what_to_write(wrong, said):
    with pytest.raises(NannyError, match=said):
        CompareWithCPU(**wrong)


@pytest.mark.parametrize("option", ["should_log_to_file", "dump_error_data"])
def test_a_folder_that_cannot_be_made_is_told_before_training_starts(tmp_path, option):
    (tmp_path / "file").write_text("")
    tool = NanInfTracker(output_dir=tmp_path / "file" / "logs", **{option: True})
    with pytest.raises(NannyError, match="name another folder"), tool:
        pass


def test_the_demo_is_a_users_file_and_a_console_script_is_nobodys():
    import sysconfig

    from nanny.cli import demo
    from nanny.ops import watch as ops

    assert _is_user_file(demo.__file__)
    assert not _is_user_file(ops.__file__)
    assert not _is_user_file(os.path.join(sysconfig.get_paths()["scripts"], "nanny"))
    assert not _is_user_file("<frozen runpy>")
    assert _is_user_file(__file__)


def test_the_loss_scale_is_found_without_handing_the_scaler_over():
    torch.manual_seed(0)
    model, scaler = nn.Linear(8, 4), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sanitize(model, strict=True) as seen:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 8)), torch.randint(0, 4, (8,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert seen.examination.loss == pytest.approx(loss.item())
    assert seen.examination.scale == 1024.0
    assert not events._listeners


def test_reading_before_anything_was_examined_says_what_to_do():
    with pytest.raises(NannyError, match="with sanitize"):
        print(sanitize(nn.Linear(2, 2)).hazards)


def test_hooks_that_begin_registers_see_the_call_that_began():
    calls = []
    model = nn.Sequential(nn.Linear(2, 2))
    handles = []

    def begin(_):
        handles.append(torch.nn.modules.module.register_module_forward_pre_hook(lambda m, args: calls.append(type(m).__name__)))

    with StepClock(begin):
        model(torch.randn(1, 2))
    handles[0].remove()
    assert calls == ["Sequential", "Linear"]


@pytest.mark.slow
def test_the_root_modules_own_operations_are_in_it_not_in_the_loop(tmp_path):
    done = trace(tmp_path, MASKED, "--sanitize", arguments=("full",))
    line = next(i for i, text in enumerate(MASKED.splitlines(), 1) if "# the mask" in text)
    assert done.returncode == 1, done.stderr
    assert f"Attention forward (train.py:{line})" in done.stderr


@pytest.mark.slow
def test_a_nan_is_told_with_why_fix_and_the_next_command(tmp_path):
    done = trace(tmp_path, MASKED, arguments=("full",))
    assert done.returncode == 1
    assert "[WARNING] Attention/torch.ops.aten._softmax(forward) makes NaN" in done.stderr
    assert "why: a row of its input is -Inf throughout" in done.stderr
    assert "\nfix: " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("next: nanny trace --sanitize --start-step 0 train.py full")
    assert max(map(len, done.stderr.splitlines())) <= 100
    assert "next:" not in trace(tmp_path, MASKED).stderr


@pytest.mark.slow
def test_with_sanitize_the_other_tools_leave_its_step_alone_and_say_so(tmp_path):
    done = trace(tmp_path, MASKED, "--sanitize", "--nan", "--compare")
    assert "update_lost at qkv.weight" in done.stderr  # bfloat16 weights at this learning rate
    assert done.stderr.count("hazard in") == 1
    assert "NanInfTracker leaves out step 0" in done.stderr
    assert "returns no tensor" not in done.stderr  # operations of the sanitizer's own


@pytest.mark.slow
def test_a_window_behind_the_end_of_the_script_is_told(tmp_path):
    for option in ("--sanitize", "--nan"):
        done = trace(tmp_path, MASKED, option, "--start-step", "50")
        assert "nothing was looked at: --start-step is 50, training steps of the script: 2" in done.stderr


def test_modules_that_do_not_exist_are_told(capsys):
    model = nn.Sequential(nn.Linear(2, 2))
    with NanInfTracker(modules="encoder.*"):
        model(torch.randn(1, 2))
    assert "no module is named like 'encoder.*'; there are: 0" in capsys.readouterr().err
    with NanInfTracker(modules="0"):
        model(torch.randn(1, 2))
    assert "no module" not in capsys.readouterr().err


@pytest.mark.parametrize("tool", [CompareWithCPU, NanInfTracker])
def test_pure_fp16_adam_is_told_once_in_full_with_its_parameters(tool, capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    x, target = torch.randn(8, 16).half(), torch.randint(0, 4, (8,))
    with tool(strict=True) as watch:
        nn.functional.cross_entropy(model(x).float(), target).backward()
        optimizer.step()
    made = [f for f in watch.faults if f.bare_op == "addcdiv_"]
    assert {f.place.site for f in made} <= {name for name, _ in model.named_parameters()}
    assert len(made) > 1
    assert len([f for f in watch.findings if "addcdiv_" in f.message]) == 1
    told = capsys.readouterr().err
    assert told.count("why: it divides by argument 2, which holds 0") == 1
    assert "Adam/torch.ops.aten.addcdiv_(optimizer) [0.weight]" in told
    assert "sanitize(model)" in told.splitlines()[-1]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.tensor([1e5]).half(), "float16 ends at 65504; the inputs reach 100000"),
        (lambda: torch.tensor([12.0]).half().exp(), "exp of 12; float16 ends at 65504"),
        (lambda: torch.tensor([1.0]) / torch.zeros(1), "divides by argument 1, which holds 0"),
        (lambda: torch.tensor([-1.0, 2.0]).log(), "log of -1"),
        (lambda: torch.tensor([-1.0, 2.0]).sqrt(), "sqrt of -1"),
        (lambda: torch.tensor([300.0]).half() * 300, "float16 ends at 65504; the inputs reach 300"),
    ],
    ids=["cast", "exp", "div", "log", "sqrt", "mul"],
)
def test_the_ranges_of_the_inputs_tell_why(make, why):
    model = nn.Module()
    model.forward = make
    with NanInfTracker(strict=True) as tracker:
        model()
    assert why in tracker.findings[0].message
    assert tracker.findings[0].hint


def test_a_range_that_cannot_be_the_reason_is_not_given_as_one():
    model = nn.Module()
    model.forward = lambda: torch.tensor([2.0]).half() * 60000.0
    with NanInfTracker(strict=True) as tracker:
        model()
    assert "ends at" not in tracker.findings[0].message


def test_the_grad_scalers_own_operations_are_compared():
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with CompareWithCPU(target_list=["*_amp_*"], strict=True) as watch:
        scaler.scale(model(torch.randn(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert watch.tally.compared == 2
    assert not any("no reference" in why for why in watch.tally.left_out)


def test_a_module_that_is_not_there_is_told_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "nanny.cli", "trace", "-m", "nothing.here"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, timeout=60)
    assert (done.returncode, done.stderr.startswith("nanny: there is no module 'nothing.here'")) == (2, True)


def test_a_place_without_measurements_is_answered_with_its_findings(tmp_path):
    told = Finding("OP_NONFINITE", Severity.ERROR, "bmm makes Inf", site="op:bmm", step=3)
    record(tmp_path / "nanny_logs", Recipe(layers={"fc": (0.0, -4.0)}, steps=12, findings=(told,)))
    done = nanny("layer", "op:bmm", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bmm makes Inf" in done.stdout
    assert "nanny rule OP_NONFINITE" in done.stdout
    assert nanny("layer", "op:mm", cwd=tmp_path).returncode == 2
