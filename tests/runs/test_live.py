"""Query commands on a run that is still being written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nanny.core.step import RunInfo
from nanny.runs.opening import open_job
from nanny.runs.summary import summarize
from nanny.store.writer import RunWriter
from runs.query_recordings import CULPRIT, HEALTHY, nanny, record


@pytest.fixture
def live(tmp_path: Path) -> Iterator[RunWriter]:
    writer = RunWriter(tmp_path / "nanny_logs", RunInfo(time.time(), argv=("train.py",), amp_dtype="bfloat16"))
    for step in range(5):
        writer.add_scalars(step, {"loss": 1.0 / (step + 1)})
    writer.flush()
    yield writer
    writer.close()


def tail(folder: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "nanny.cli", "tail", "--interval", "0.1", *args]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)


def test_answers_inside_one_open_run_are_of_one_moment(live: RunWriter, tmp_path: Path) -> None:
    with open_job(str(tmp_path / "nanny_logs"), None) as (sources, _):
        assert summarize(sources).lead.steps == (0, 4)
        live.add_scalars(5, {"loss": float("nan")})
        live.add_finding(replace(CULPRIT, step=5))
        live.flush()
        later = summarize(sources)
        assert later.lead.steps == (0, 4)
        assert later.verdict.healthy
    with open_job(str(tmp_path / "nanny_logs"), None) as (sources, _):
        assert summarize(sources).lead.steps == (0, 5)
        assert not summarize(sources).verdict.healthy


def test_tail_follows_the_run_and_ends_with_it(live: RunWriter, tmp_path: Path) -> None:
    process = tail(tmp_path, "--format", "json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"step": 0, "loss": 1.0}
    live.add_scalars(5, {"loss": float("nan")})
    live.add_finding(CULPRIT)
    live.close("crashed")
    rest = [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
    assert {"step": 5, "loss": "NaN"} in rest
    assert [item["code"] for item in rest if "code" in item] == ["NAN_OUTPUT"]
    assert rest[-1] == {"status": "crashed"}
    assert process.returncode == 0


def test_tail_ends_quietly_with_ctrl_c(live: RunWriter, tmp_path: Path) -> None:
    process = tail(tmp_path)
    assert process.stdout is not None
    while "step 4" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.strip() == "next: nanny summary"


def test_tail_of_a_killed_run_does_not_wait_for_it(tmp_path: Path) -> None:
    script = f"""
import os, time
from nanny.core.step import RunInfo
from nanny.store.writer import RunWriter
writer = RunWriter({str(tmp_path / "nanny_logs")!r}, RunInfo(time.time()))
writer.add_scalars(0, {{"loss": 1.0}})
writer.flush()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    done = nanny("tail", cwd=tmp_path)
    assert done.returncode == 0
    assert "the run has been killed" in done.stdout


def test_summary_and_snapshot_work_while_training_writes(live: RunWriter, tmp_path: Path) -> None:
    assert nanny("summary", cwd=tmp_path).stdout.startswith("HEALTHY: no numerical trouble in 5 steps")
    assert nanny("snapshot", tmp_path / "copy.db", cwd=tmp_path).returncode == 0
    live.add_scalars(5, {"loss": 0.1})
    live.flush()
    copied = nanny("sql", "SELECT count(*) AS n FROM scalar", "--db", tmp_path / "copy.db", "--format", "csv", cwd=tmp_path)
    assert copied.stdout == "n\n5\n"
    now = nanny("sql", "SELECT count(*) AS n FROM scalar", "--format", "csv", cwd=tmp_path)
    assert now.stdout == "n\n6\n"


def test_a_snapshot_of_several_ranks_takes_all_of_them(tmp_path: Path) -> None:
    for rank in (0, 1):
        record(tmp_path / "nanny_logs", replace(HEALTHY, rank=rank, world_size=2, steps=3))
    assert nanny("snapshot", "copies", cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["metrics.db", "metrics.rank1.db"]
