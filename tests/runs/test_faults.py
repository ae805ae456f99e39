"""Files that are no store, and questions that have no answer: one sentence, exit code 2."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nanny import cli
from nanny.store.schema import SCHEMA_VERSION
from runs.query_recordings import HEALTHY, nanny, record

CALLS = {
    "summary": [],
    "alerts": [],
    "stats": ["--step", "1"],
    "layer": ["stem"],
    "runs": [],
    "compare": ["1", "2"],
    "whatif": ["--dtype", "fp16"],
    "export": ["-o", "out"],
    "snapshot": ["copy.db"],
    "sql": ["SELECT 1"],
    "tail": [],
}


def missing(path: Path) -> None:
    del path


def empty_file(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 64)


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE run (id INTEGER)")


def truncated(path: Path) -> None:
    store = record(path.parent / "whole", HEALTHY)
    path.write_bytes(store.read_bytes()[: 3 * 4096 + 100])


def without_its_last_page(path: Path) -> None:
    store = record(path.parent / "whole", HEALTHY)
    path.write_bytes(store.read_bytes()[:-4096])


def newer(path: Path) -> None:
    store = record(path.parent / "whole", HEALTHY)
    path.write_bytes(store.read_bytes())
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


@pytest.mark.parametrize("spoil", [missing, empty_file, garbage, foreign, truncated, without_its_last_page, newer])
def test_every_command_refuses_a_file_that_is_no_store_in_one_sentence(
    spoil: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.db"
    spoil(path)
    monkeypatch.chdir(tmp_path)
    for name, rest in CALLS.items():
        code = cli.main([name, *rest, "--db", str(path)])
        said = capsys.readouterr()
        assert code == 2, f"{name}: {said.out}"
        assert said.err.startswith("nanny: ")
        assert said.err.count("\n") == 1, said.err
        assert str(path) in said.err
        assert said.out == ""
    assert not (tmp_path / "copy.db").exists()


@pytest.mark.parametrize("name", CALLS)
def test_without_any_log_every_command_says_how_to_make_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([name, *CALLS[name]]) == 2
    assert "nanny run" in capsys.readouterr().err


def test_a_truncated_file_given_to_a_real_process_prints_no_traceback(tmp_path: Path) -> None:
    truncated(tmp_path / "metrics.db")
    done = nanny("summary", "--db", "metrics.db", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("asked")
    record(path, HEALTHY)
    record(path, HEALTHY)
    return path


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (["summary", "--run", "9"], "there is no run 9"),
        (["stats", "--step", "999"], "no statistics of step 999"),
        (["stats", "--step", "10", "--kind", "buffer"], "holds no 'buffer'"),
        (["stats", "--step", "10", "--layer", "nope*"], "no layer matches"),
        (["alerts", "--severity", "fatal"], "unknown severity"),
        (["alerts", "--step", "9:3"], "no range of steps"),
        (["alerts", "--step", "x"], "no range of steps"),
        (["alerts", "--code", "NANN"], "did you mean 'NAN'"),
        (["layer", "zzz"], "no layer 'zzz'"),
        (["layer", "stem", "--step", "500:"], "never measured"),
        (["whatif", "--dtype", "fp16", "--scale", "1000"], "not a power of two"),
        (["whatif", "--dtype", "fp16", "--scale", "-1"], "not a power of two"),
        (["whatif", "--dtype", "fp16", "--scale", "nan"], "not a power of two"),
        (["whatif", "--dtype", "fp16", "--layer", "nope"], "no layer matches"),
        (["compare", "1", "1"], "name two runs"),
        (["compare", "1", "7"], "there is no run 7"),
        (["compare", "1", "nowhere.db:2"], "no such file"),
        (["compare", "1", "2", "--run", "1"], "leave --run out"),
        (["sql", "SELECT 1", "--run", "1"], "WHERE run = 1"),
        (["snapshot", "/dev/null/x/copy.db"], "cannot write"),
        (["export", "-o", "/dev/null/x"], "cannot write"),
    ],
)
def test_a_question_without_an_answer_gets_one_sentence(
    call: list[str], part: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*call, "--db", str(folder)]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("call", ["stats --step x", "whatif", "whatif --dtype fp12", "layer", "summary --nope"])
def test_wrong_arguments_exit_with_2_and_one_sentence(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(call.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("nanny: ")
    assert said.err.count("\n") == 1
    assert f"`nanny {call.split()[0]} --help`" in said.err


def test_a_rank_that_cannot_be_read_is_a_note_not_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, replace(HEALTHY, world_size=2))
    garbage(tmp_path / "metrics.rank1.db")
    assert cli.main(["summary", "--db", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("HEALTHY")
    assert "metrics.rank1.db" in out
    assert cli.main(["runs", "--db", str(tmp_path)]) == 0
