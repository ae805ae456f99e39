"""No deadlock, ever: a rank dies, skips a step, has fewer batches, is slow, is examined alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanny import cli

from .job import SECONDS, run_job

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


def verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    cli.main(["summary", "--db", str(folder), "--format", "json"])
    said = str(json.loads(capsys.readouterr().out)["verdict"])
    cli.main(["summary", "--db", str(folder)])
    return said, capsys.readouterr().out


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("trouble")
    return folder, run_job("trouble", 2, folder, "fewer", "skips", "slow", "one_is_examined", "talks", "hides")


@pytest.mark.parametrize("how", ["fewer", "skips", "slow", "one_is_examined"])
def test_ranks_that_do_not_keep_step_end_and_raise_no_alarm(job, how, capsys):
    said, text = verdict(job[0] / how, capsys)
    assert said.startswith("HEALTHY"), text
    assert "2 of 2 on record" in text
    assert all("error" not in rank[how] for rank in job[1])


def test_one_rank_may_be_examined_while_the_other_is_not(job):
    assert [rank["one_is_examined"]["examined"] for rank in job[1]] == [0, 10]


def test_a_model_that_asks_the_others_is_not_run_again_by_one_of_them(job):
    assert any("one process cannot do alone" in rank["talks"]["not_again"] for rank in job[1])


def test_nan_that_the_loss_does_not_show_is_named_where_a_step_cannot_be_run_again(job, capsys):
    assert any("hooks" in rank["hides"]["not_again"] for rank in job[1])  # those of FSDP2, which gather
    said, text = verdict(job[0] / "hides", capsys)
    assert "mask_inf_full_row in op:softmax at step 7 on rank 1" in said, text
    assert "the loss is finite and its gradients are not" in " ".join(text.split())


def test_a_rank_that_dies_leaves_the_others_with_the_error_they_would_have_had(tmp_path, capsys):
    alive, dead = run_job("trouble", 2, tmp_path, "dies", deaths=1)
    assert dead is None
    assert alive["dies"]["error"]
    said, text = verdict(tmp_path / "dies", capsys)
    assert "2 of 2 on record" in text
    assert "no numerical trouble" in said


def torchrun(script: Path, folder: Path, *options: str) -> str:
    """Under `nanny run` in two processes; what was said."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "nanny",
        "run",
        *options,
    ]
    with (folder / "said.txt").open("wb") as said:
        process = subprocess.Popen([*command, str(script)], cwd=folder, start_new_session=True, stdout=said, stderr=said)
    try:
        assert process.wait(timeout=SECONDS) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return (folder / "said.txt").read_text(errors="replace")


def test_torchrun_of_nanny_run_watches_a_script_that_knows_nothing_of_it(tmp_path, capsys):
    torchrun(EXAMPLES / "ddp.py", tmp_path)
    said, text = verdict(tmp_path / "nanny_logs", capsys)
    assert "data_nan" in said, text
    assert "on rank 1" in said
    assert "2 of 2 on record" in text


BY_HAND = """
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
if BROADCASTS:
    for p in net.parameters():
        dist.broadcast(p.data, 0)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(32, 16)
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x), x[:, :1]).backward()
    for p in net.parameters():
        if AVERAGES:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("broadcasts", "averages"), [(True, True), (False, True), (False, False)])
def test_gradients_averaged_by_hand_make_replicas_and_trainings_of_their_own_do_not(broadcasts, averages, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(BY_HAND.replace("BROADCASTS", str(broadcasts)).replace("AVERAGES", str(averages)))
    torchrun(script, tmp_path)
    said, text = verdict(tmp_path / "nanny_logs", capsys)
    if averages and not broadcasts:
        assert said.startswith("NOT HEALTHY: replicas_apart in 0.weight at step 0"), text
    else:
        assert said.startswith("HEALTHY"), text


def test_the_ranks_that_were_named_write_and_the_others_only_watch(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(ONE_STEPS.replace("if dist.get_rank() == 0:", "if True:"))
    torchrun(script, tmp_path, "--ranks", "1")
    assert [path.name for path in (tmp_path / "nanny_logs").glob("*.db")] == ["metrics.rank1.db"]
    said, text = verdict(tmp_path / "nanny_logs", capsys)
    assert said.startswith("HEALTHY"), text
    assert "1 of 2 on record" in text


ONE_STEPS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
net = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
for step in range(40):
    x = torch.randn(32, 16)
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x), x[:, :1]).backward()
    if dist.get_rank() == 0:  # WRONG
        optimizer.step()
dist.destroy_process_group()
"""


def test_a_script_in_which_one_rank_steps_is_told_by_the_console_the_folder_and_the_file(tmp_path, capsys):
    for name in ("wrong", "right"):
        (tmp_path / name).mkdir()
        script = tmp_path / name / "train.py"
        script.write_text(ONE_STEPS if name == "wrong" else ONE_STEPS.replace("if dist.get_rank() == 0:", "if True:"))
        console = torchrun(script, tmp_path / name)
        assert "nanny: rank 0 of 2 by itself: HEALTHY" in console
        assert ("replicas_apart: optimizer" in console) == (name == "wrong")
        for place in ("nanny_logs", "nanny_logs/metrics.db"):
            said, text = verdict(tmp_path / name / place, capsys)
            assert said.startswith("NOT HEALTHY: replicas_apart" if name == "wrong" else "HEALTHY"), text
            assert ("rank 1 made no optimizer step, and rank 0 did" in " ".join(text.split())) == (name == "wrong")
