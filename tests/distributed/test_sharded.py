"""FSDP2, tensor parallel and pipeline stages under the nanny: the same bits, and norms of the whole from the files of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanny import cli
from nanny.runs.opening import open_job
from nanny.runs.summary import summarize

from .job import run_job
from .programs.sharded import ALONE, CASES

pytestmark = pytest.mark.slow
LONG_ONES = ("fsdp_bf16", "fsdp_accumulated", "pipeline")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run_job("sharded", 2, folder)


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_what_it_would_have_been_unwatched(job, name):
    assert [rank[name]["same"] for rank in job[1]] == [True, True]
    assert [rank[name]["same_examined"] for rank in job[1]] == [True, True]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_gathered_that_the_program_does_not_gather(job, name):
    for alone, watched, examined in (rank[name]["asked"] for rank in job[1]):
        assert alone == watched == examined > 0


@pytest.mark.parametrize("name", CASES)
def test_shards_and_stages_are_no_replicas_that_differ(job, name, capsys):
    for folder in (name, f"{name}_examined"):
        cli.main(["summary", "--db", str(job[0] / folder), "--format", "json"])
        assert json.loads(capsys.readouterr().out)["verdict"].startswith("HEALTHY")


@pytest.mark.parametrize("name", LONG_ONES)
def test_nothing_is_told_of_200_healthy_steps(job, name, capsys):
    cli.main(["alerts", "--db", str(job[0] / f"{name}_long"), "--severity", "warning", "--format", "json"])
    assert json.loads(capsys.readouterr().out)["findings"] == []


@pytest.mark.parametrize("name", CASES)
def test_the_norm_of_all_parts_is_that_of_the_whole_gradient(job, name):
    with open_job(str(job[0] / name), None) as (sources, notes):
        summary = summarize(sources, notes)
    _, norms = summary.lead.curves["grad_norm"]
    assert norms.tolist() == pytest.approx(job[1][0][name]["norms"], rel=1e-5)
    if name in ALONE:
        assert norms.tolist() == pytest.approx(job[1][0][name]["in_one_process"], rel=1e-5)
