"""A job as a dataset: every answer is the one that its rank files give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanny import cli
from nanny.core.finding import Finding, Severity
from nanny.core.step import GRADIENT_STATS, SAMPLE_STATS, RunInfo, Sample, Site
from nanny.monitor.command import ranks_that_write
from nanny.store.packing import BITS, pack_bits
from nanny.store.writer import RunWriter
from runs.query_recordings import CULPRIT, HEALTHY, WARNED, record

duckdb = pytest.importorskip("duckdb")
WORLD = 5


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`files` and `dataset` of one job: rank 3 is first in trouble, rank 1 and 4 later."""
    folder = tmp_path_factory.mktemp("job")
    found = {
        1: (replace(CULPRIT, step=30),),
        3: (WARNED, replace(CULPRIT, step=22, site="stem")),
        4: (replace(CULPRIT, step=31),),
    }
    for rank in range(WORLD):
        record(folder / "files", replace(HEALTHY, rank=rank, world_size=WORLD, findings=found.get(rank, ())))
    assert cli.main(["export", "--format", "parquet", "--db", str(folder / "files"), "-o", str(folder / "dataset")]) == 0
    return folder


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    cli.main([*words, "--format", "json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_summary_is_that_of_the_files(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, dataset = (ask(capsys, "summary", "--db", str(job / name)) for name in ("files", "dataset"))
    assert dataset["run"].pop("file") == str(job / "dataset")
    assert files["run"].pop("file") != dataset["run"].get("file")
    assert dataset == files
    assert dataset["culprit"]["rank"] == 3
    assert dataset["ranks_on_record"] == WORLD
    cli.main(["summary", "--db", str(job / "dataset")])
    text = capsys.readouterr().out
    assert "5 of 5 on record, 3 with warnings or errors" in text
    assert "rank 3 was the first" in text


def test_the_alerts_are_those_of_the_files(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, dataset = (ask(capsys, "alerts", "--db", str(job / name)) for name in ("files", "dataset"))
    assert dataset == files
    assert {finding["rank"] for finding in dataset["findings"] if "rank" in finding} == {1, 3, 4}


def test_only_the_ranks_that_matter_are_opened(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 2, 4):  # nobody needs these files for the summary
        (job / "dataset" / "run=1" / f"rank={rank}" / "kind=store" / "metrics.db").rename(job / f"kept{rank}")
    try:
        assert ask(capsys, "summary", "--db", str(job / "dataset"))["culprit"]["rank"] == 3
    finally:
        for rank in (1, 2, 4):
            (job / f"kept{rank}").rename(job / "dataset" / "run=1" / f"rank={rank}" / "kind=store" / "metrics.db")


def test_the_tables_are_for_any_engine(job: Path) -> None:
    files = f"{job}/dataset/*/*/kind=stats_grad/*.parquet"
    query = "SELECT count(*), count(DISTINCT rank), count(DISTINCT site) FROM read_parquet(?, hive_partitioning = true)"
    assert duckdb.execute(query, [files]).fetchone() == (WORLD * 40 * len(HEALTHY.layers), WORLD, len(HEALTHY.layers))


def test_two_runs_of_a_dataset_are_compared(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "other", replace(HEALTHY, final_loss=1.5))
    target = str(job / "dataset")
    cli.main(["export", "--format", "parquet", "--db", str(tmp_path / "other"), "-o", target, "--as", "7"])
    capsys.readouterr()
    found = ask(capsys, "compare", "1", "7", "--db", target)
    assert found["first"]["name"] == "loss"


@pytest.mark.parametrize("kind", ["files", "dataset"])
def test_the_loss_of_all_ranks_is_compared_not_that_of_the_lowest(
    kind: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(WORLD):  # the lowest is as in the other job
        more = {"final_loss": 1.5} if rank else {}
        record(tmp_path / "files", replace(HEALTHY, rank=rank, world_size=WORLD, **more))
    places = [str(job / "files"), str(tmp_path / "files")]
    if kind == "dataset":
        for number, place in zip(("21", "22"), places):
            cli.main(["export", "--format", "parquet", "--db", place, "-o", str(tmp_path / "dataset"), "--as", number])
        places = [f"{tmp_path / 'dataset'}:21", f"{tmp_path / 'dataset'}:22"]
    capsys.readouterr()
    assert ask(capsys, "compare", *places)["first"]["name"] == "loss"


def test_a_url_will_do(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "--format", "parquet", "--db", str(job / "files"), "-o", "memory://jobs"]) == 0
    capsys.readouterr()
    assert ask(capsys, "summary", "--db", "memory://jobs")["culprit"]["rank"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--db", "memory://nothing"], "holds no runs"),
        (["--db", "nosuch://x"], "cannot be opened"),
        (["--db", "http://[::1"], "cannot be"),  # opened, where nothing is installed that goes there; else read
        (["--db", "DATASET", "--run", "9"], "has no run 9; it has 1"),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(
    words: list[str], said: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["summary", *(str(job / "dataset") if word == "DATASET" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def record_replica(folder: Path, rank: int, world: int, flipped: dict[int, int]) -> None:
    """Two parameters at two traced steps; `flipped`: step -> what is added to the bits of the second one."""
    info = RunInfo(1000.0, world_size=world, rank=rank, meta={"replicas": [list(range(world))], "shards": {}})
    writer = RunWriter(folder, info)
    for kind in ("weight", "grad"):
        writer.add_sites([Site(kind, name, "float32", (4,)) for name in ("a", "b")])
    for step in (0, 10):
        words = np.array([step + 1, 7 + flipped.get(step, 0)], np.int64)
        for kind, stats in (("weight", SAMPLE_STATS), ("grad", GRADIENT_STATS)):
            columns = {name: np.ones(2) for name in stats} | pack_bits(words, [1, 1])
            data = np.array([columns[name] for name in (*stats, *BITS)], "<f4").tobytes()
            writer.add_sample(Sample(kind, step, (*stats, *BITS), data))
        writer.add_scalars(step, {"loss": 1.0, "updates": float(step)})
    writer.close()


def test_a_rank_that_differs_is_found_among_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        record_replica(tmp_path / "files", rank, 4, {10: 1} if rank == 2 else {})
    cli.main(["export", "--format", "parquet", "--db", str(tmp_path / "files"), "-o", str(tmp_path / "dataset")])
    capsys.readouterr()
    files, dataset = (ask(capsys, "summary", "--db", str(tmp_path / name)) for name in ("files", "dataset"))
    assert dataset["verdict"] == files["verdict"]
    assert "replicas_apart in b at step 10" in dataset["verdict"]
    assert dataset["culprit"]["evidence"]["ranks"] == [2]


def test_who_writes() -> None:
    assert ranks_that_write("0,7,64-71", 100) == {0, 7, *range(64, 72)}
    assert ranks_that_write("sample:4", 4096) == {0, 1024, 2048, 3072}
    assert ranks_that_write("sample:8", 2) == {0, 1}


@pytest.mark.parametrize("words", ["x", "3-1", "sample:0", "sample:x", "", "1,,2"])
def test_ranks_that_are_none_are_refused_before_the_script_starts(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    assert cli.main(["run", "--ranks", words, str(script)]) == 2
    assert "write 0,7,64-71 or sample:32" in capsys.readouterr().err


def test_findings_keep_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placed = Finding("NAN", Severity.ERROR, "bad", site="x", step=3, file="train.py", line=12, evidence={"seen": float("nan")})
    for rank in range(3):
        record(tmp_path / "files", replace(HEALTHY, rank=rank, world_size=3, findings=(placed,)))
    cli.main(["export", "--format", "parquet", "--db", str(tmp_path / "files"), "-o", str(tmp_path / "dataset")])
    capsys.readouterr()
    files, dataset = (ask(capsys, "alerts", "--db", str(tmp_path / name)) for name in ("files", "dataset"))
    assert dataset == files


def test_the_checksums_of_parameters_are_read_only_where_ranks_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        record_replica(tmp_path / "files", rank, 3, {})
    dataset = tmp_path / "dataset"
    cli.main(["export", "--format", "parquet", "--db", str(tmp_path / "files"), "-o", str(dataset)])
    for path in dataset.glob("run=1/*/kind=checksums/part.parquet"):
        path.write_bytes(b"not read")
    for path in dataset.glob("run=1/rank=[12]/kind=run/part.parquet"):
        path.write_bytes(b"not read")
    capsys.readouterr()
    assert ask(capsys, "summary", "--db", str(dataset))["verdict"].startswith("HEALTHY")
