"""Trainer, Lightning, Fabric and Accelerate in two processes: a bad record of one is named, and the healthy twin is silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanny import cli

from .job import run_job

pytestmark = pytest.mark.slow
BAD = 10  # step


@pytest.fixture(scope="module", params=["trainer", "lightning_fit", "fabric", "accelerated"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, run_job("frameworks", 2, folder, request.param)


def test_every_weight_is_what_it_would_have_been_unwatched_and_nothing_more_is_sent(job):
    assert [name for result in job[1] for name, good in result.items() if not all(good)] == []


@pytest.mark.parametrize("how", ["by_itself", "integration"])
def test_bad_data_on_one_rank_is_named_with_the_rank_and_a_healthy_job_is_not(job, how, capsys):
    verdicts = {}
    for fault in ("data", "no-data"):
        cli.main(["summary", "--db", str(job[0] / f"{fault}_{how}"), "--format", "json"])
        said = json.loads(capsys.readouterr().out)
        assert said["ranks_on_record"] == 2
        verdicts[fault] = said["verdict"]
    assert f"data_nan in data:input at step {BAD} on rank 1" in verdicts["data"]
    assert verdicts["no-data"].startswith("HEALTHY")
