"""What a reduction in 16 bits did to the sum of two ranks' gradients is told from their files; one that did little is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanny import cli
from nanny.runs.opening import open_job
from nanny.runs.ranks import reductions

from .job import run_job
from .programs.reduced import CASES

pytestmark = pytest.mark.slow
BAD = [name for name, (_, _, _, bad) in CASES.items() if bad]
GOOD = [name for name in CASES if name not in BAD]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("reduced")
    return folder, run_job("reduced", 2, folder)


def errors(folder: Path) -> list[float]:
    with open_job(str(folder), None) as (sources, _):
        groups = {s.run.rank: [frozenset(ranks) for ranks in s.run.meta.get("replicas") or ()] for s in sources}
        return [one.error for one in reductions(sources, groups)]


def test_every_weight_is_what_it_would_have_been_unwatched(job):
    assert [name for result in job[1] for name, same in result.items() if not same] == []


@pytest.mark.parametrize("name", BAD)
def test_a_sum_that_is_mostly_rounding_is_diagnosed(job, name, capsys):
    assert cli.main(["diagnose", "--db", str(job[0] / name)]) == 1
    assert "reduce_dtype_low_precision" in capsys.readouterr().out
    cli.main(["summary", "--db", str(job[0] / name), "--format", "json"])
    said = json.loads(capsys.readouterr().out)
    assert "reduce_dtype_low_precision in" in said["verdict"]
    assert min(errors(job[0] / name)) > 0.1


@pytest.mark.parametrize("name", GOOD)
def test_a_sum_that_is_right_is_not_told(job, name, capsys):
    cli.main(["summary", "--db", str(job[0] / name), "--format", "json"])
    assert "reduce_dtype" not in capsys.readouterr().out
    seen = errors(job[0] / name)
    assert all(error < 0.02 for error in seen)
    in_bf16 = "bf16" in name and name != "fsdp_bf16_accumulated"  # whose passes cannot be told apart
    assert len(seen) >= 4 or not in_bf16
