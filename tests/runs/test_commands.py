"""Every query command on recorded runs, as processes, as a user types them."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shlex
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanny import cli
from nanny.core.finding import Finding, Severity
from nanny.store.reader import reading, runs
from runs.query_recordings import CULPRIT, HEALTHY, SICK, WARNED, Recipe, many_layers, nanny, record


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with nanny_logs/metrics.db: run 1 healthy, run 2 sick."""
    folder = tmp_path_factory.mktemp("query")
    record(folder / "nanny_logs", HEALTHY)
    record(folder / "nanny_logs", SICK)
    return folder


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 300 layers with long names, one of which is out of line."""
    folder = tmp_path_factory.mktemp("wide")
    layers = many_layers(300)
    layers["transformer.encoder.layer.217.attention.output.dense_projection"] = (13.5, -8.0)
    record(folder / "nanny_logs", Recipe(layers=layers, steps=12, trace_every=4, amp_dtype="float16"))
    return folder


def strict(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"bare {word} in JSON")

    return json.loads(text, parse_constant=refuse)


COMMANDS = {
    "summary": [],
    "alerts": [],
    "stats": ["--step", "20"],
    "layer": ["head.softmax"],
    "runs": [],
    "compare": ["1", "2"],
    "whatif": ["--dtype", "fp16"],
    "sql": ["SELECT step, site, norm FROM measured WHERE kind = 'output'"],
}


def test_the_three_documented_calls_work_verbatim(logs: Path) -> None:
    summary = nanny("summary", "--db", "nanny_logs/metrics.db", cwd=logs)
    alerts = nanny("alerts", "--db", "nanny_logs/metrics.db", "--severity", "ERROR", cwd=logs)
    stats = nanny("stats", "--db", "nanny_logs/metrics.db", "--step", "20", cwd=logs)
    assert [p.returncode for p in (summary, alerts, stats)] == [0, 0, 0]
    assert "NOT HEALTHY" in summary.stdout.splitlines()[0]
    assert "NAN_OUTPUT" in alerts.stdout
    assert "HEADROOM" not in alerts.stdout
    assert "head.softmax" in stats.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_in_text_within_100_columns(name: str, logs: Path) -> None:
    done = nanny(name, *COMMANDS[name], cwd=logs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.strip()
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_in_strict_json(name: str, logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, *COMMANDS[name], "--db", str(logs / "nanny_logs"), "--format", "json"]) == 0
    assert strict(capsys.readouterr().out)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_in_csv_with_as_many_cells_as_columns(
    name: str, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, *COMMANDS[name], "--db", str(logs / "nanny_logs"), "--format", "csv"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) > 1
    assert {len(row) for row in rows} == {len(rows[0])}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_in_markdown(name: str, logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, *COMMANDS[name], "--db", str(logs / "nanny_logs"), "--format", "markdown"]) == 0
    assert "| --- |" in capsys.readouterr().out.replace("---:", "---")


def test_no_query_command_imports_torch(logs: Path) -> None:
    calls = [[name, *rest] for name, rest in COMMANDS.items()] + [["snapshot", "copy.db"], ["export", "-o", "out"], ["tail"]]
    script = f"""
import sys
from nanny import cli
codes = [cli.main(call) for call in {calls!r}]
assert codes == [0] * {len(calls)}, codes
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=logs, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_dash_m_nanny_is_the_same_command(logs: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "nanny", "runs"], cwd=logs, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "2 runs in 1 file" in done.stdout


def test_db_may_stand_before_the_command_and_name_a_folder(logs: Path) -> None:
    before = nanny("--db", logs / "nanny_logs", "summary", cwd=logs.parent)
    after = nanny("summary", "--db", logs / "nanny_logs" / "metrics.db", cwd=logs.parent)
    assert before.returncode == after.returncode == 0
    assert before.stdout.splitlines()[:5] == after.stdout.splitlines()[:5]


# summary


def summary_of(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert cli.main(["summary", "--db", str(folder), "--format", "json", *more]) == 0
    found = strict(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_summary_names_the_producer_before_the_symptom_of_the_same_step(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = summary_of(logs / "nanny_logs", capsys)
    assert found["healthy"] is False
    assert (found["culprit"]["code"], found["culprit"]["site"], found["culprit"]["step"]) == ("NAN_OUTPUT", "head.softmax", 20)
    assert found["culprit"]["value"] == "NaN"
    assert found["counts"] == {"error": 2, "warning": 1, "info": 0}


def test_summary_says_what_to_do_who_passed_it_on_and_what_to_type(logs: Path) -> None:
    text = nanny("summary", cwd=logs).stdout
    assert "fix: compute the softmax in FP32" in text
    assert "passed on by 1 layer: head.out" in text
    assert "at step 20 (4 times, last at step 23) in head.softmax" in text
    assert "warned before: HEADROOM at step 10" in text
    assert "nanny layer head.softmax" in text
    assert "1.7 % of the training time" in text
    assert "2 steps (5 %), the last at 4" in text
    assert "!" in text, "a NaN loss must show in the curve"


def test_summary_of_a_healthy_run_is_healthy_and_exits_0(logs: Path) -> None:
    done = nanny("summary", "--run", "1", cwd=logs)
    assert done.returncode == 0
    assert done.stdout.startswith("HEALTHY: no numerical trouble in 40 steps")


def test_a_nan_loss_without_any_finding_is_not_called_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, replace(HEALTHY, loss_is_nan_from=30))
    found = summary_of(tmp_path, capsys)
    assert found["healthy"] is False
    assert "step 30" in found["verdict"]


def test_a_run_without_a_step_gets_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, replace(HEALTHY, steps=0))
    assert summary_of(tmp_path, capsys)["healthy"] is None


def test_an_info_finding_does_not_make_a_run_sick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, replace(HEALTHY, findings=(Finding("SCALE_LOW", Severity.INFO, "scale 64", step=3),)))
    assert summary_of(tmp_path, capsys)["healthy"] is True


def test_summary_tells_which_rank_was_first_and_ignores_an_older_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = Finding("OLD", Severity.ERROR, "of yesterday", site="x", step=0)
    for rank in (0, 1):
        record(tmp_path, replace(HEALTHY, rank=rank, world_size=2, started=1000.0, findings=(old,)))
    record(tmp_path, replace(HEALTHY, world_size=2, findings=(replace(CULPRIT, step=25),)))
    record(tmp_path, replace(HEALTHY, rank=1, world_size=2, findings=(replace(CULPRIT, step=22, site="stem"),)))
    found = summary_of(tmp_path, capsys)
    assert (found["culprit"]["rank"], found["culprit"]["step"], found["culprit"]["site"]) == (1, 22, "stem")
    assert found["ranks_on_record"] == 2
    assert found["counts"]["error"] == 2


def test_what_warned_before_may_have_warned_on_another_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, replace(HEALTHY, world_size=2, findings=(replace(CULPRIT, step=25),)))
    record(tmp_path, replace(HEALTHY, rank=1, world_size=2, findings=(WARNED,)))
    assert cli.main(["summary", "--db", str(tmp_path)]) == 0
    assert "warned before: HEADROOM at step 10" in capsys.readouterr().out


# alerts


def codes_of(args: list[str], logs: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["alerts", "--db", str(logs / "nanny_logs"), "--format", "json", *args]) == 0
    return [finding["code"] for finding in strict(capsys.readouterr().out)["findings"]]


@pytest.mark.parametrize(
    ("filters", "codes"),
    [
        ([], ["HEADROOM", "NAN_OUTPUT", "LOSS_NAN"]),
        (["--severity", "error"], ["NAN_OUTPUT", "LOSS_NAN"]),
        (["--code", "headroom"], ["HEADROOM"]),
        (["--step", ":10"], ["HEADROOM"]),
        (["--step", "20"], ["NAN_OUTPUT", "LOSS_NAN"]),
        (["--step", "11:19"], []),
        (["--layer", "head.*"], ["HEADROOM", "NAN_OUTPUT"]),
        (["--layer", "head"], ["HEADROOM", "NAN_OUTPUT"]),
        (["--limit", "1"], ["HEADROOM"]),
    ],
)
def test_alerts_filters(filters: list[str], codes: list[str], logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert codes_of(filters, logs, capsys) == codes


def test_alerts_keeps_non_finite_evidence(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["alerts", "--db", str(logs / "nanny_logs"), "--format", "json", "--code", "NAN_OUTPUT"]) == 0
    (finding,) = strict(capsys.readouterr().out)["findings"]
    assert finding["evidence"]["worst"] == "Infinity"


@pytest.mark.parametrize(("fail_on", "run", "code"), [("error", 2, 1), ("warning", 2, 1), ("warning", 1, 0), ("info", 1, 0)])
def test_alerts_fails_a_build_only_when_asked(fail_on: str, run: int, code: int, logs: Path) -> None:
    assert nanny("alerts", "--run", run, "--fail-on", fail_on, cwd=logs).returncode == code
    assert cli.main(["alerts", "--run", str(run), "--db", str(logs / "nanny_logs")]) == 0


def test_the_same_hint_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = tuple(replace(WARNED, step=step) for step in range(8))
    record(tmp_path, replace(HEALTHY, findings=again))
    cli.main(["alerts", "--db", str(tmp_path)])
    text = capsys.readouterr().out
    assert text.count("HEADROOM at step") == 8
    assert text.count("fix: use bf16") == 1


# stats and layer


def test_stats_puts_what_is_not_finite_first_and_leaves_out_what_was_not_called(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["stats", "--db", str(logs / "nanny_logs"), "--step", "20", "--kind", "output", "--format", "json"])
    rows = strict(capsys.readouterr().out)["kinds"]["output"]
    assert rows[0]["layer"] == "head.softmax"
    assert rows[0]["note"] == "3 NaN, 1 +Inf"
    assert rows[0]["max"] == "NaN"
    assert "never_called" not in [row["layer"] for row in rows]


def test_stats_at_a_step_that_was_not_traced_shows_gradients_and_says_where_to_look(logs: Path) -> None:
    done = nanny("stats", "--step", "17", cwd=logs)
    assert done.returncode == 0
    assert "gradients of parameters" in done.stdout
    assert "not sampled at this step" in done.stdout
    assert "10, 20" in done.stdout


def test_stats_of_300_layers_stays_readable_and_counts_the_rest(wide: Path) -> None:
    done = nanny("stats", "--step", "8", "--kind", "output", cwd=wide)
    lines = done.stdout.splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) <= 100
    table = next(i for i, line in enumerate(lines) if line.startswith("layer"))
    assert ".217." in lines[table + 1], "the layer close to overflow stands first"
    assert "bits to overflow" in lines[table + 1]
    assert "and 288 more layers" in done.stdout


def test_layer_shows_history_findings_and_how_close_it_came(logs: Path) -> None:
    text = nanny("layer", "head.softmax", cwd=logs).stdout
    assert "ERROR NAN_OUTPUT at step 20" in text
    assert "not finite at 2 steps" in text
    assert "bits below the end of fp16" in text
    assert "!!" in text


def test_layer_knows_a_name_by_a_part_of_it_and_asks_when_it_could_be_several(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = ["--db", str(logs / "nanny_logs")]
    assert cli.main(["layer", "softmax.weight", *db]) == 0
    assert cli.main(["layer", "weight", *db]) == 2
    assert "could be stem.weight" in capsys.readouterr().err
    assert cli.main(["layer", "head.softmx", *db]) == 2
    assert "did you mean head.softmax" in capsys.readouterr().err


def test_odd_names_can_be_asked_for_and_are_quoted_in_what_is_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "blocks[0].<lambda> (x)"
    record(tmp_path, replace(HEALTHY, layers={name: (0, -8), "blocks": (0, -8)}))
    db = ["--db", str(tmp_path)]
    assert cli.main(["stats", "--kind", "output", "--layer", name, *db]) == 0
    offered = capsys.readouterr().out.splitlines()[-1]
    assert cli.main(shlex.split(offered)[2:]) == 0
    assert name in capsys.readouterr().out


# sql


def test_sql_reads_one_value_of_a_packed_sample(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = """SELECT stat(data, n, rows, zeros, 'nan', position) FROM sample JOIN layout ON layout.id = layout
               JOIN site USING (run, kind) WHERE run = 2 AND kind = 'output' AND step = 20 AND name = 'head.softmax'"""
    assert cli.main(["sql", query, "--db", str(logs / "nanny_logs"), "--format", "json"]) == 0
    assert strict(capsys.readouterr().out)["rows"] == [[3.0]]


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM finding",
        "DROP TABLE run",
        "UPDATE run SET status = 'finished'",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA user_version = 7",
        "ATTACH 'other.db' AS other",
        "CREATE TABLE t (x)",
        "VACUUM",
        "SELECT 1; DROP TABLE run",
        "SELECT load_extension('x')",
        "SELEC 1",
        "",
        "SELECT nothing FROM nowhere",
    ],
)
def test_sql_refuses_everything_but_reading_in_one_sentence(
    query: str, logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(logs)
    before = (logs / "nanny_logs" / "metrics.db").read_bytes()
    assert cli.main(["sql", query]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nanny: ")
    assert error.count("\n") == 1
    assert (logs / "nanny_logs" / "metrics.db").read_bytes() == before
    assert not (logs / "other.db").exists()


def test_sql_stops_a_query_that_takes_too_long(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    assert cli.main(["sql", endless, "--timeout", "0.2", "--db", str(logs / "nanny_logs")]) == 2
    assert "longer than 0.2 s" in capsys.readouterr().err


def test_sql_caps_its_rows_and_says_so(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", "SELECT step FROM scalar", "--limit", "5", "--db", str(logs / "nanny_logs"), "--format", "json"]) == 0
    found = strict(capsys.readouterr().out)
    assert len(found["rows"]) == 5
    assert found["cut"] is True


# snapshot and export


def test_a_snapshot_is_one_portable_file_with_the_same_runs(logs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    assert nanny("snapshot", copy, cwd=logs).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["copy.db"]
    with sqlite3.connect(copy) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with reading(copy) as db:
        assert [run.id for run in runs(db)] == [1, 2]
    assert nanny("summary", "--db", copy, cwd=tmp_path).stdout.startswith("NOT HEALTHY")


def test_a_snapshot_overwrites_only_when_told_and_never_the_store_itself(logs: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.db").write_text("mine")
    assert nanny("snapshot", tmp_path / "copy.db", cwd=logs).returncode == 2
    assert (tmp_path / "copy.db").read_text() == "mine"
    assert nanny("snapshot", tmp_path / "copy.db", "--force", cwd=logs).returncode == 0
    store = logs / "nanny_logs" / "metrics.db"
    before = store.read_bytes()
    assert nanny("snapshot", store, "--force", cwd=logs).returncode == 2
    assert store.read_bytes() == before


def test_export_writes_csv_that_holds_every_number(logs: Path, tmp_path: Path) -> None:
    done = nanny("export", "--format", "csv", "-o", tmp_path / "out", cwd=logs)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out" / "scalars.csv").open() as file:
        loss = {int(row["step"]): float(row["value"]) for row in csv.DictReader(file) if row["name"] == "loss"}
    assert len(loss) == 40
    assert math.isnan(loss[39])
    with (tmp_path / "out" / "stats_output.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["site"] for row in rows} == {"stem", "body.0", "head.softmax", "head.out"}
    assert [row["nan"] for row in rows if row["site"] == "head.softmax"] == ["0.0", "0.0", "3.0", "3.0"]


def test_export_to_parquet_reads_back(logs: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert nanny("export", "--format", "parquet", "-o", tmp_path, cwd=logs).returncode == 0
    folder = tmp_path / "run=2" / "rank=0"
    assert parquet.read_table(folder / "kind=stats_grad" / "part.parquet").num_rows == 5 * 40
    assert parquet.read_table(folder / "kind=findings" / "part.parquet").column("code").to_pylist() == [
        "LOSS_NAN",
        "HEADROOM",
        "NAN_OUTPUT",
    ]


def test_export_to_tensorboard_reads_back_without_hiding_a_nan(logs: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert nanny("export", "--format", "tensorboard", "-o", tmp_path, cwd=logs).returncode == 0
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("nanny/loss")] == list(range(40))
    largest = {event.step: event.value for event in events.Scalars("nanny/output/largest")}
    assert math.isfinite(largest[10])
    assert math.isnan(largest[20])
    assert "findings/NAN_OUTPUT" in events.Tags()["tensors"]


@pytest.mark.parametrize(("form", "package"), [("parquet", "pyarrow"), ("tensorboard", "tensorboard")])
def test_export_without_the_extra_names_it_in_one_sentence(form: str, package: str, logs: Path, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('not installed')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = nanny("export", "--format", form, "-o", tmp_path / "out", cwd=logs, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'precision-nanny[export]'" in done.stderr


# colour


def test_colour_is_used_only_when_forced_and_never_with_no_color(logs: Path) -> None:
    assert "\x1b[" in nanny("summary", cwd=logs, FORCE_COLOR="1", NO_COLOR="").stdout
    assert "\x1b[" not in nanny("summary", cwd=logs, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_output_survives_an_ascii_terminal(logs: Path) -> None:
    done = nanny("summary", cwd=logs, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.startswith("NOT HEALTHY")


def test_a_reader_that_has_seen_enough_is_no_error(logs: Path) -> None:
    command = f"'{sys.executable}' -m nanny.cli sql 'SELECT * FROM scalar' | head -1"
    done = subprocess.run(command, cwd=logs, shell=True, capture_output=True, check=False)
    assert done.stderr == b""


def test_a_folder_of_folders_lists_the_runs_of_all(tmp_path: Path) -> None:
    for name in ("a", "b", "deep/c"):
        record(tmp_path / name, HEALTHY)
    rows = json.loads(nanny("runs", "--db", tmp_path, "--format", "json", cwd=tmp_path).stdout)["runs"]
    assert {Path(row["file"]).parent.name for row in rows} == {"a", "b", "c"}


def test_tail_shows_as_many_past_steps_as_asked(tmp_path: Path) -> None:
    record(tmp_path, HEALTHY)
    said = nanny("tail", "--db", tmp_path, "--lines", 33, cwd=tmp_path).stdout
    assert said.count("loss ") == 33


def test_the_list_of_many_files_names_each_as_it_is_typed(tmp_path: Path) -> None:
    for name in ("lr_3e-4_fp16", "lr_1e-3_fp16"):
        record(tmp_path / name / "nanny_logs", replace(SICK, world_size=1))
    text = nanny("runs", "--db", ".", cwd=tmp_path).stdout
    assert {line.split()[0] for line in text.splitlines() if "_fp16" in line} == {"lr_3e-4_fp16", "lr_1e-3_fp16"}
    assert max(map(len, text.splitlines())) <= 100
    assert nanny("summary", "--db", "lr_3e-4_fp16", cwd=tmp_path).stdout.startswith("NOT HEALTHY")


def test_a_run_that_ended_without_a_step_is_not_to_be_followed(tmp_path: Path) -> None:
    record(tmp_path, replace(HEALTHY, steps=0))
    assert nanny("summary", "--db", ".", cwd=tmp_path).stdout.rstrip().endswith("next: nanny run --help")
