"""DistributedDataParallel under the nanny: the same bits, the first rank in trouble, replicas that drift apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanny import cli
from nanny.runs.opening import open_job
from nanny.runs.summary import summarize

from .job import run_job, said_by
from .programs.ddp import BAD

pytestmark = pytest.mark.slow

HEALTHY = ("healthy", "healthy_bf16", "bucket_views", "unused", "accumulated", "local_steps", "stepped_on_one_and_sent")


@pytest.fixture(scope="module", params=[2, 4])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp(f"ddp{request.param}")
    return folder, run_job("ddp", request.param, folder)


def summary(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """As data, and as people read it."""
    cli.main(["summary", "--db", str(folder / name), "--format", "json"])
    data = json.loads(capsys.readouterr().out)
    cli.main(["summary", "--db", str(folder / name)])
    return data, capsys.readouterr().out


def test_every_weight_is_what_it_would_have_been_unwatched(job):
    assert [name for result in job[1] for name, seen in result.items() if not seen["same"]] == []


def test_nothing_is_sent_between_ranks_that_the_program_does_not_send(job):
    for name, seen in ((name, seen) for result in job[1] for name, seen in result.items()):
        assert seen["asked"][0] > 0, name
        assert seen["asked"][0] == seen["asked"][1], name


@pytest.mark.parametrize("name", ["healthy", "accumulated"])
def test_the_gradients_are_those_of_all_ranks_together(job, name):
    with open_job(str(job[0] / name), None) as (sources, notes):
        steps, norms = summarize(sources, notes).lead.curves["grad_norm"]
    truth = job[1][0][name]
    assert norms[: len(truth["in_one_process"])].tolist() == pytest.approx(truth["in_one_process"], rel=1e-5)
    assert [truth["norms"][step] for step in steps] == pytest.approx(norms.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_is_called_healthy(job, name, capsys):
    data, text = summary(job[0], name, capsys)
    assert data["verdict"].startswith("HEALTHY"), text


def test_replicas_that_agree_are_said_to_agree(job, capsys):
    _, text = summary(job[0], "healthy", capsys)
    assert "6 parameters alike on all ranks, bit by bit, last compared at step 8" in text
    _, text = summary(job[0], "local_steps", capsys)
    assert "last compared at step 0" in text  # from the first update on they are meant to differ


def test_ranks_that_are_given_the_same_batches_are_told(job, capsys):
    data, text = summary(job[0], "same_batches", capsys)
    assert "same_batch_again in data" in data["verdict"], text
    assert "ranks train on the same batches" in text


@pytest.mark.parametrize(
    ("name", "code", "cause"),
    [
        ("bad_batch", "INPUT_NONFINITE", "data_nan"),
        ("hidden_batch", "NAN", "data_nan"),
        ("bad_backward", "NAN", "singular_gradient"),
    ],
)
def test_the_rank_is_named_that_was_bad_before_all_were(job, name, code, cause, capsys):
    data, text = summary(job[0], name, capsys)
    assert f"{cause} in" in data["verdict"], text
    assert f"at step {BAD} on rank 1" in data["verdict"], text
    assert "rank 1 was the first" in text
    assert f"ERROR {code} at step {BAD} on rank 1" in text
    cli.main(["alerts", "--db", str(job[0] / name), "--format", "json"])
    others = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["step"] == BAD and f.get("rank") not in (1, None)]
    assert {f["rank"] for f in others} == set(range(len(job[1]))) - {1}
    assert all("met those of another rank" in f["message"] for f in others)


@pytest.mark.parametrize(
    ("name", "step", "site", "what"),
    [
        ("bypassed", 0, "0.weight", "gradients after reduction"),
        ("clipped_on_one", 8, "0.weight", "weights"),
        ("changed_on_one", 8, "2.bias", "weights"),
        ("first_is_synced", 1, "0.weight", "weights"),
        ("criterion_outside", 1, "criterion.weight", "weights"),
    ],
)
def test_replicas_that_drift_apart_are_named_by_parameter_step_and_rank(job, name, step, site, what, capsys):
    data, text = summary(job[0], name, capsys)
    assert f"replicas_apart in {site} at step {step}" in data["verdict"], text
    finding = next(line for line in text.splitlines() if "ERROR RANKS_APART" in line)
    assert f"at step {step}" in finding
    assert what in " ".join(text.split())
    if name.endswith("on_one") and len(job[1]) > 2:
        assert "rank 1 differs" in text
    assert cli.main(["diagnose", "--db", str(job[0] / name)]) == 1
    assert "replicas_apart" in capsys.readouterr().out


def test_an_optimizer_that_steps_on_one_rank_only_parts_the_replicas(job, capsys):
    data, text = summary(job[0], "stepped_on_one", capsys)
    assert "replicas_apart in optimizer at step 0" in data["verdict"], text
    others = ", ".join(map(str, range(1, len(job[1]))))
    assert f"{others} made no optimizer step, and rank 0 did" in " ".join(text.split())


def test_the_file_of_the_first_rank_answers_for_all_and_that_of_another_says_whose_it_is(job, capsys):
    whole, _ = summary(job[0], "stepped_on_one", capsys)
    first, _ = summary(job[0], "stepped_on_one/metrics.db", capsys)
    assert first["verdict"] == whole["verdict"]
    other, _ = summary(job[0], "stepped_on_one/metrics.rank1.db", capsys)
    assert other["notes"][0].startswith(f"this is rank 1 of {len(job[1])} alone")


def test_the_last_words_name_the_rank_they_are_of_and_the_folder_of_all(job):
    said = said_by(job[0], 0)
    assert f"nanny: rank 0 of {len(job[1])} by itself: HEALTHY" in said
    assert f"next: nanny summary --db {job[0] / 'healthy'}\n" in said
