"""Bytes that change on the disk: what is read is what was written, or the damage is told in one sentence."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs.query_recordings import HEALTHY, SICK, record

from nanny import cli
from nanny.core.finding import NannyError
from nanny.core.step import RunInfo
from nanny.store import reader
from nanny.store.writer import RunWriter

PAGE = 4096
ROOT = Path(__file__).parents[1]
Answer = tuple[int, str, str]


def ask(path: Path, *words: str) -> Answer:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = cli.main([*words, "--db", str(path)])
    return code, out.getvalue(), errors.getvalue()


def flip(data: bytearray, chance: random.Random) -> bytearray:
    data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
    return data


def zero_page(data: bytearray, chance: random.Random) -> bytearray:
    at = PAGE * chance.randrange(len(data) // PAGE)
    data[at : at + PAGE] = bytes(PAGE)
    return data


def spoil_sector(data: bytearray, chance: random.Random) -> bytearray:
    at = 512 * chance.randrange(len(data) // 512)
    data[at : at + 512] = chance.randbytes(512)
    return data


def swap_pages(data: bytearray, chance: random.Random) -> bytearray:
    a, b = (PAGE * chance.randrange(len(data) // PAGE) for _ in "ab")
    data[a : a + PAGE], data[b : b + PAGE] = data[b : b + PAGE], data[a : a + PAGE]
    return data


def cut(data: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randrange(len(data))]


SPOIL = [flip, zero_page, spoil_sector, swap_pages, cut]
QUESTIONS = [
    ["summary"],
    ["summary", "--run", "1"],
    ["alerts", "--run", "1"],
    ["stats", "--run", "1"],
    ["layer", "stem"],
    ["whatif", "--dtype", "fp16", "--run", "1"],
    ["compare", "1", "2"],
    ["runs"],
    ["diagnose", "--run", "1"],
    ["sql", "SELECT run, name, step, value FROM scalar"],
    ["sql", "SELECT * FROM finding"],
    ["sql", "SELECT * FROM measured"],
]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    record(folder, SICK)
    return record(folder, HEALTHY).read_bytes()


def is_told(answer: Answer) -> bool:
    return answer[0] == 2 and answer[2].startswith("nanny: ") and answer[2].count("\n") == 1


def check(
    whole: bytes, folder: Path, spoil: Callable[[bytearray, random.Random], bytearray], seeds: range, questions: list[list[str]]
) -> None:
    path = folder / "metrics.db"
    path.write_bytes(whole)
    expected = [ask(path, *words) for words in questions]
    told = 0
    for seed in seeds:
        path.write_bytes(spoil(bytearray(whole), random.Random(seed)))
        for words, right in zip(questions, expected):
            answer = ask(path, *words)
            assert answer == right or is_told(answer), (seed, words, answer)
            told += answer != right
    assert told  # else nothing was spoilt that any question reads


@pytest.mark.parametrize("spoil", SPOIL)
def test_a_damaged_store_is_summarised_as_before_or_the_damage_is_told(whole, tmp_path, spoil):
    check(whole, tmp_path, spoil, range(12), [["summary", "--run", "1"], ["sql", "SELECT run, name, step, value FROM scalar"]])


@pytest.mark.slow
@pytest.mark.parametrize("spoil", SPOIL)
def test_every_question_to_300_damaged_stores_is_answered_as_before_or_the_damage_is_told(whole, tmp_path, spoil):
    check(whole, tmp_path, spoil, range(100, 400), QUESTIONS)


def killed_run(folder: Path) -> Path:
    """A run that died without a word: its last seconds are in the -wal file alone."""
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from nanny.store.writer import RunWriter
from runs.query_recordings import SICK, record
RunWriter.close = lambda writer, status: (writer.flush(), os._exit(0))
record(Path({str(folder)!r}), SICK)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    return folder / "metrics.db"


def spoilt_journals(folder: Path, seeds: range) -> Iterator[tuple[int, Path, Answer]]:
    dead = killed_run(folder / "dead")
    copy = folder / "copy"
    for seed in seeds:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(dead.parent, copy)
        wal = copy / "metrics.db-wal"
        chance = random.Random(seed)
        spoil = (lambda data, _: data) if seed == seeds[0] else chance.choice([flip, flip, zero_page, spoil_sector])
        wal.write_bytes(spoil(bytearray(wal.read_bytes()), chance))
        yield seed, copy / "metrics.db", ask(copy / "metrics.db", "summary")


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(300), marks=pytest.mark.slow)])
def test_what_a_damaged_journal_loses_is_told(tmp_path, seeds):
    (_, _, right), *others = spoilt_journals(tmp_path, seeds)
    assert right[0] == 0
    assert right[1].startswith("NOT HEALTHY")
    for seed, _, answer in others:
        assert answer == right or is_told(answer), (seed, answer)


def test_a_new_run_leaves_a_damaged_journal_alone(tmp_path):
    for seed, path, answer in spoilt_journals(tmp_path, range(4)):
        before = path.with_name("metrics.db-wal").read_bytes()
        said: list[str] = []
        writer = RunWriter(path.parent, RunInfo(started=1.0), on_warning=said.append)
        writer.close()
        if answer[0] == 0 or "last seconds" not in answer[2]:
            continue
        assert writer.path.name == "metrics.2.db", seed
        assert len(said) == 1
        assert "damaged" in said[0]
        assert path.with_name("metrics.db-wal").read_bytes() == before
        assert ask(path, "summary") == answer


def test_verify_counts_what_is_lost_and_the_rest_can_be_read(whole, tmp_path):
    path = tmp_path / "metrics.db"
    path.write_bytes(whole)
    code, out, _ = ask(path, "runs", "--verify")
    assert (code, out.count("whole")) == (0, 3)
    at = whole.index(b"3 of 256 outputs are NaN")
    path.write_bytes(whole[:at] + b"9" + whole[at + 1 :])
    code, out, _ = ask(path, "runs", "--verify")
    assert code == 1
    assert "1 of 3 findings" in out
    assert ask(path, "runs", "--verify", "--run", "2")[0] == 0
    code, out, errors = ask(path, "alerts", "--run", "1")
    assert code == 2
    assert "LOSS_NAN" in out
    assert "outputs are NaN" not in out
    assert "some of its findings were lost or changed" in errors
    with pytest.raises(NannyError, match="findings were lost"), reader.reading(path) as db:
        reader.findings(db, 1)
    assert ask(path, "summary", "--run", "2")[0] == 0
    assert ask(path, "sql", "pragma integrity_check")[:2] == (0, "integrity_check\nok\n")


def test_a_healthy_verdict_is_not_given_on_half_a_record(whole, tmp_path):
    path = tmp_path / "metrics.db"
    at = whole.rindex(b"step_ms")
    path.write_bytes(whole[: at + 8] + bytes([whole[at + 8] ^ 255]) + whole[at + 9 :])
    code, out, _ = ask(path, "summary")
    assert code == 2
    assert not out.startswith("HEALTHY")
