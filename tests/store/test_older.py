"""A store that nanny 0.1 wrote (schema 2) answers as one of today, and stays as it is."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import sqlite3
from pathlib import Path

import pytest

from nanny import MixedPrecisionNanny, NannyError, cli
from nanny.store import reader

HERE = Path(__file__).parent


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.db"
    path.write_bytes(gzip.decompress((HERE / "stores/schema-2.db.gz").read_bytes()))
    return path


def test_every_number_is_the_one_that_was_written(store: Path) -> None:
    old = sqlite3.connect(store)
    with reader.reading(store) as db:
        for kind, n, data, rows in old.execute("SELECT kind, n, data, rows FROM sample JOIN layout ON layout.id = layout"):
            assert len(data) == 4 * n * len(rows.split()), kind
        written = old.execute("SELECT step, value FROM scalar WHERE name = 'loss' ORDER BY step").fetchall()
        steps, losses = reader.scalars(db, 1, ["loss"])["loss"]
        assert [(int(s), float(v)) for s, v in zip(steps, losses) if v == v] == [(s, v) for s, v in written if v is not None]
        assert len(steps) == len(written) == 30
        _, norms = reader.samples(db, 1, "grad", "norm")
        assert norms.shape[1] == len(reader.sites(db, 1, "grad")) == 4
    old.close()


@pytest.mark.parametrize("command", ["summary", "alerts", "diagnose", "stats", "runs --verify", "whatif --dtype bf16"])
def test_commands_answer(store: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = store.read_bytes()
    assert cli.main([*command.split(), "--db", str(store)]) in (0, 1)
    assert "older" not in capsys.readouterr().err
    assert store.read_bytes() == before
    assert [path.name for path in store.parent.iterdir()] == ["metrics.db"]


def test_the_run_is_told_as_today(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["summary", "--db", str(store), "--format", "json"])
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"].startswith("NOT HEALTHY: lr_too_high in optimizer.lr at step 1")


def test_a_new_run_goes_into_a_file_beside_it(store: Path) -> None:
    before = store.read_bytes()
    with pytest.warns(match="older nanny"):
        MixedPrecisionNanny(None, output_dir=store.parent, live=False).close()
    assert store.read_bytes() == before
    assert len(list(store.parent.glob("*.db"))) == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_one_gives_an_answer_or_one_sentence(store: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(store.read_bytes())
    for _ in range(200):
        data[rng.randrange(200, len(data))] = rng.randrange(256)
    store.write_bytes(data)
    with contextlib.suppress(NannyError), reader.reading(store) as db:
        reader.pick_run(db, None)
        reader.scalars(db, 1)
