"""What goes into a store comes out of it unchanged."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanny.core.finding import Finding, NannyError, Severity
from nanny.core.formats import HISTOGRAM_BINS
from nanny.core.step import GRADIENT_STATS, SAMPLE_STATS, RunInfo, Sample, Site
from nanny.store import reader
from nanny.store.encode import to_json
from nanny.store.packing import pack_sample, stat, unpack_sample
from nanny.store.writer import RunWriter

ROOT = Path(__file__).parents[2]


def make_sample(kind: str, step: int, stats: tuple[str, ...], matrix: np.ndarray, histograms: bytes = b"") -> Sample:
    return Sample(kind, step, stats, np.ascontiguousarray(matrix, "<f4").tobytes(), histograms)


def open_writer(folder: Path, **info: object) -> RunWriter:
    return RunWriter(folder, RunInfo(started=time.time(), **info))  # type: ignore[arg-type]


def same(a: object, b: object) -> bool:
    """Equality under which NaN equals itself."""
    return repr(a) == repr(b)


def test_a_run_is_read_back_as_it_introduced_itself(tmp_path):
    writer = open_writer(
        tmp_path, argv=("train.py", "--lr", "\udc80"), torch="2.13", world_size=8, rank=3, meta={"limit": math.inf}
    )
    writer.set_meta(amp_dtype="bfloat16", cards=2)
    writer.close()
    assert writer.path == tmp_path / "metrics.rank3.db"
    with reader.reading(writer.path) as db:
        run = reader.pick_run(db, None)
    assert (run.argv, run.torch, run.world_size, run.rank) == (("train.py", "--lr", "\udc80"), "2.13", 8, 3)
    assert (run.amp_dtype, run.meta, run.status, run.dropped) == ("bfloat16", {"limit": math.inf, "cards": 2}, "finished", 0)


def test_a_finding_comes_back_with_every_field(tmp_path):
    full = Finding(
        code="NAN",
        severity=Severity.ERROR,
        message="output has NaN",
        hint="lower the learning rate",
        site="layer.1",
        step=7,
        rank=2,
        file="model.py",
        line=3,
        column=4,
        end_line=5,
        end_column=6,
        cell=1,
        value=math.nan,
        limit=math.inf,
        evidence={"before": -math.inf, "values": [1.5, math.nan], "who": {"name": "relu"}, "seen": True, "none": None},
    )
    bare = Finding("SLOW", Severity.INFO, "nothing measured")
    writer = open_writer(tmp_path)
    writer.add_findings([full, bare])
    writer.close()
    with reader.reading(writer.path) as db:
        assert same(reader.findings(db, writer.run), [full, bare])


def test_evidence_may_hold_what_json_does_not_know(tmp_path):
    evidence = {"norm": np.float32(1.5), "shape": (2, 3), "rows": np.arange(2), "path": Path("a"), 3: {1}}
    writer = open_writer(tmp_path)
    writer.add_finding(Finding("X", Severity.INFO, "odd \udcff text", evidence=evidence))
    writer.close()
    with reader.reading(writer.path) as db:
        (finding,) = reader.findings(db, writer.run)
        (text,) = db.execute("SELECT evidence FROM finding").fetchone()
    assert finding.evidence == {"norm": 1.5, "shape": [2, 3], "rows": [0, 1], "path": "a", "3": [1]}
    assert json.loads(text, parse_constant=pytest.fail) == finding.evidence


@pytest.mark.parametrize("dumps", [lambda value, **_: json.JSONEncoder(separators=(",", ":")).encode(value).encode(), None])
def test_a_program_that_replaces_json_dumps_harms_no_record(tmp_path, monkeypatch, dumps):
    with monkeypatch.context() as patched:
        patched.setattr(json, "dumps", dumps)
        patched.setattr(json.JSONEncoder, "default", lambda self, value: "?")
        writer = open_writer(tmp_path, argv=("train.py", "a, b"), meta={"names": ["a", "b"]})
        writer.add_sites([Site("grad", "fc.weight", "float32", (8, 8))])
        writer.add_finding(Finding("X", Severity.INFO, "x", evidence={"path": tmp_path}))
        writer.close()
    with reader.reading(writer.path) as db:  # which says if a row is not as it was written
        run = reader.pick_run(db, None)
        assert (run.argv, run.meta["names"]) == (("train.py", "a, b"), ["a", "b"])
        assert reader.sites(db, run.id, "grad")[0].shape == (8, 8)
        assert [finding.evidence["path"] for finding in reader.findings(db, run.id)] == [str(tmp_path)]


def test_findings_keep_their_order(tmp_path):
    writer = open_writer(tmp_path)
    for step in (3, 1, 2, None):
        writer.add_finding(Finding("C0", Severity.ERROR, "m", step=step))
    writer.close()
    with reader.reading(writer.path) as db:
        assert [finding.step for finding in reader.findings(db, writer.run)] == [3, 1, 2, None]


def test_scalars_keep_nan_and_infinity_and_the_newest_value(tmp_path):
    writer = open_writer(tmp_path)
    for step, loss in enumerate([1.0, math.inf, math.nan, -math.inf]):
        writer.add_scalars(np.int64(step), {"loss": loss})
    writer.add_scalars(0, {"loss": 2.0, "scale": 65536.0})
    writer.close()
    with reader.reading(writer.path) as db:
        found = reader.scalars(db, writer.run)
        assert list(found) == ["loss", "scale"] == reader.scalar_names(db, writer.run)
        steps, values = found["loss"]
        assert (steps.dtype, values.dtype, steps.tolist()) == (np.int64, np.float64, [0, 1, 2, 3])
        np.testing.assert_array_equal(values, [2.0, math.inf, math.nan, -math.inf])
        assert list(reader.scalars(db, writer.run, ["scale", "unheard of"])) == ["scale"]
        assert reader.scalars(db, writer.run, ["loss"], first=1, last=2)["loss"][0].tolist() == [1, 2]


def test_samples_come_back_bit_for_bit(tmp_path):
    random = np.random.default_rng(0)
    expected = random.integers(0, 2**32, (6, len(SAMPLE_STATS), 5), dtype=np.uint32).view(np.float32)
    expected[3:, -3:] = 0  # healthy from here on
    writer = open_writer(tmp_path)
    writer.add_sites([Site("output", f"layer.{i}", "bfloat16", (4, i)) for i in range(5)])
    for step, matrix in enumerate(expected):
        writer.add_sample(make_sample("output", 10 * step, SAMPLE_STATS, matrix))
    writer.close()
    with reader.reading(writer.path) as db:
        assert reader.sites(db, writer.run, "output")[4] == Site("output", "layer.4", "bfloat16", (4, 4))
        for row, name in enumerate(SAMPLE_STATS):
            steps, matrix = reader.samples(db, writer.run, "output", name)
            assert steps.tolist() == [0, 10, 20, 30, 40, 50]
            assert matrix.view(np.uint32).tolist() == expected[:, row].view(np.uint32).tolist()
        at = reader.sample_at(db, writer.run, "output", 40)
        assert at is not None
        assert all((at[name].view(np.uint32) == expected[4, row].view(np.uint32)).all() for row, name in enumerate(SAMPLE_STATS))
        assert reader.sample_at(db, writer.run, "output", 41) is None
        assert reader.samples(db, writer.run, "output", "min", first=11, last=30)[0].tolist() == [20, 30]
        assert reader.steps(db, writer.run) == (0, 50)


def test_sites_met_later_are_told_from_measured_nan(tmp_path):
    writer = open_writer(tmp_path)
    writer.add_sites([Site("grad", "a")])
    writer.add_sample(make_sample("grad", 0, GRADIENT_STATS, np.array([[8], [math.nan], [0], [0]])))
    writer.add_sites([Site("output", "x"), Site("grad", "b")])
    writer.add_sample(make_sample("grad", 1, GRADIENT_STATS, np.array([[8, 4], [2, 3], [0, 0], [0, 0]])))
    writer.close()
    with reader.reading(writer.path) as db:
        assert reader.kinds(db, writer.run) == ["grad", "output"]
        assert [site.name for site in reader.sites(db, writer.run, "grad")] == ["a", "b"]
        np.testing.assert_array_equal(reader.samples(db, writer.run, "grad", "norm")[1], [[math.nan, math.nan], [2, 3]])
        np.testing.assert_array_equal(reader.samples(db, writer.run, "grad", "count")[1], [[8, 0], [8, 4]])
        np.testing.assert_array_equal(reader.samples(db, writer.run, "grad", "max")[1], [[0, math.nan], [0, 0]])
        assert np.isnan(reader.samples(db, writer.run, "grad", "mean")[1]).all()
        assert reader.samples(db, writer.run, "unheard of", "mean")[1].shape == (0, 0)


def test_histograms_come_back_and_take_little_space(tmp_path):
    counts = np.zeros((50, HISTOGRAM_BINS), "<u2")
    counts[:, 100:120] = np.random.default_rng(0).integers(0, 65536, (50, 20))
    writer = open_writer(tmp_path)
    writer.add_sites([Site("output", f"{i}") for i in range(50)])
    writer.add_sample(make_sample("output", 0, ("count",), np.ones((1, 50))))
    writer.add_sample(make_sample("output", 5, ("count",), np.ones((1, 50)), counts.tobytes()))
    writer.close()
    with reader.reading(writer.path) as db:
        ((step, found),) = reader.histograms(db, writer.run, "output")
        (size,) = db.execute("SELECT length(data) FROM histogram").fetchone()
    assert (step, found.dtype) == (5, np.uint16)
    np.testing.assert_array_equal(found, counts)
    assert size < counts.nbytes / 8


def test_sql_reads_single_values_of_packed_samples(tmp_path):
    writer = open_writer(tmp_path)
    writer.add_sites([Site("grad", "a"), Site("grad", "b")])
    writer.add_sample(make_sample("grad", 3, GRADIENT_STATS, np.array([[8, 4], [0.5, math.inf], [0, 0], [-1, math.nan]])))
    writer.close()
    with reader.reading(writer.path) as db:
        rows = db.execute("SELECT step, site, count, norm, min, max, mean FROM measured ORDER BY site").fetchall()
        assert rows == [(3, "a", 8.0, 0.5, 0.0, -1.0, None), (3, "b", 4.0, math.inf, 0.0, None, None)]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            db.execute("DELETE FROM sample")


def test_dumps_are_listed(tmp_path):
    writer = open_writer(tmp_path)
    writer.add_dump(4, "layer.1", "dumps/4.safetensors", "ab12")
    writer.close()
    with reader.reading(writer.path) as db:
        assert reader.dumps(db, writer.run) == [reader.DumpRow(4, "layer.1", "dumps/4.safetensors", "ab12")]


def test_runs_share_a_file_without_mixing(tmp_path):
    for value in (1.0, 2.0):
        writer = open_writer(tmp_path)
        writer.add_scalars(0, {"loss": value})
        writer.close("crashed" if value == 1.0 else "finished")
    with reader.reading(tmp_path / "metrics.db") as db:
        assert [(run.id, run.status) for run in reader.runs(db)] == [(1, "crashed"), (2, "finished")]
        assert reader.pick_run(db, None).id == 2
        assert [reader.scalars(db, run)["loss"][1].tolist() for run in (1, 2)] == [[1.0], [2.0]]
        with pytest.raises(NannyError, match=r"no run 3.*: 1, 2"):
            reader.pick_run(db, 3)


def test_a_clean_close_leaves_one_file_that_a_read_only_disk_can_serve(tmp_path):
    writer = open_writer(tmp_path)
    writer.add_scalars(0, {"loss": 1.0})
    assert {file.name for file in tmp_path.iterdir()} > {"metrics.db"}
    writer.close()
    writer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.db"]
    db = sqlite3.connect(f"{writer.path.as_uri()}?mode=ro&immutable=1", uri=True)
    assert db.execute("SELECT status, value FROM run JOIN scalar ON run = run.id").fetchall() == [("finished", 1.0)]
    db.close()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", "finished"),
        ("raise ValueError('loss is NaN')", "crashed"),
        ("os._exit(0)", "interrupted"),
        ("raise KeyboardInterrupt", "interrupted"),
    ],
)
def test_a_run_that_nobody_closed_still_says_how_it_ended(tmp_path, end, status):
    script = f"""
import os, time
from nanny.core.step import RunInfo
from nanny.store.writer import RunWriter
writer = RunWriter({str(tmp_path)!r}, RunInfo(started=time.time()))
writer.add_scalars(0, {{"loss": 1.0}})
writer.flush()
writer.add_scalars(1, {{"loss": 1.0}})
{end}
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
    with reader.reading(tmp_path / "metrics.db") as db:
        assert reader.pick_run(db, None).status == status
        assert reader.steps(db, 1) == (0, 0 if "_exit" in end else 1)


def test_nothing_in_the_store_imports_torch():
    code = "import sys, nanny.store.writer, nanny.store.reader, nanny.store.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0


floats = st.floats(width=32) | st.just(0.0)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(floats, min_size=n, max_size=n), min_size=1, max_size=6)))
def test_packing_keeps_every_bit_of_every_statistic(rows):
    names = tuple(f"s{i}" for i in range(len(rows)))
    sample = make_sample("output", 0, names, np.array(rows, "<f4"))
    layout_rows, zeros, crc, data = pack_sample(sample)
    unpacked = unpack_sample(data, sample.sites, layout_rows, zeros, crc)
    assert unpacked is not None
    assert b"".join(unpacked[name].tobytes() for name in names) == sample.data
    for i, name in enumerate(names):
        for position, value in enumerate(rows[i]):
            assert same(stat(data, sample.sites, layout_rows, zeros, name, position), value)
    assert stat(data, sample.sites, layout_rows, zeros, "s0", sample.sites) is None


def test_json_is_the_same_whether_everything_in_it_is_plain_or_not():
    known = {"counts": {1: 2, "a": (1.5, None, True)}, "site": Site("grad", "fc", shape=(2, 3)), "all": {4}, "deep": np.arange(3)}
    odd = {**known, "loss": math.nan, "norms": [math.inf, -math.inf, np.float32(0.5)]}
    expected = {"counts": {"1": 2, "a": [1.5, None, True]}, "all": [4], "deep": [0, 1, 2]}
    expected["site"] = {"kind": "grad", "name": "fc", "dtype": "", "shape": [2, 3]}
    assert json.loads(to_json(known)) == expected
    assert json.loads(to_json(odd)) == {**expected, "loss": "NaN", "norms": ["Infinity", "-Infinity", 0.5]}
    assert json.loads(to_json({(1, 2): "a key that is no text"})) == {"(1, 2)": "a key that is no text"}
