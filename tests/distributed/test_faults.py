"""The planted faults of tests/distributed/programs/faults.py are diagnosed in two processes, and their repaired twins are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanny import cli

from .job import run_job
from .programs.faults import CAUSES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["ddp", "fsdp", "tp", "pipeline"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], str]:
    folder = tmp_path_factory.mktemp(f"faults_{request.param}")
    return folder, run_job("faults", 2, folder, request.param), request.param


def verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    cli.main(["summary", "--db", str(folder), "--format", "json"])
    return str(json.loads(capsys.readouterr().out)["verdict"])


def test_every_weight_is_what_it_would_have_been_unwatched(job):
    assert [name for result in job[1] for name, same in result.items() if not same] == []


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_fault_is_diagnosed(job, cause, capsys):
    said = verdict(job[0] / f"{cause}_planted", capsys)
    assert f": {cause} " in said
    if cause == "activation_overflow_fp16" and job[2] != "pipeline":  # a stage has names of its own
        assert " in blocks.2" in said
    if job[2] in ("ddp", "fsdp"):  # elsewhere ranks share one batch, and a fault may lie in the stage of one of them
        assert (" on rank 1" in said) == (cause == "data_nan")


@pytest.mark.parametrize("cause", CAUSES)
def test_its_repaired_twin_is_not(job, cause, capsys):
    assert verdict(job[0] / f"{cause}_repaired", capsys).startswith("HEALTHY")


def test_a_later_stage_does_not_take_what_it_was_given_for_a_batch(job, capsys):
    if job[2] != "pipeline":
        pytest.skip("no stages")
    cli.main(["alerts", "--db", str(job[0] / "data_nan_planted"), "--format", "json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert 1 not in {f.get("rank") for f in found if f["code"] == "INPUT_NONFINITE"}
    assert any(f.get("rank") == 1 and "from the stage before it" in f["message"] for f in found)
