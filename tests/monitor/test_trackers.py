"""The program's own tracker is told; it is neither begun nor ended nor renumbered, and nothing that it does can hurt the run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from training import Apply, mlp, train

from nanny import NannyWarning

CURVES = {"loss", "grad_norm", "lr", "step_ms", "traced", "unchanged_share", "update_ratio", "weight_norm"}


def broken() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), Apply(lambda x: torch.log(x - 100)), nn.Linear(16, 1))


@pytest.mark.slow
def test_no_tracker_is_imported():
    program = (
        "import sys, torch\nfrom nanny import MixedPrecisionNanny\nm = torch.nn.Linear(2, 1)\n"
        "with MixedPrecisionNanny(m, output_dir=None, live=False, strict=True) as n:\n"
        "    with n.step(0): m(torch.ones(1, 2)).sum().backward()\n"
        "print([x for x in ('wandb', 'mlflow', 'trackio', 'aim', 'tensorboard', 'opentelemetry') if x in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_tensorboard_is_told_steps_findings_and_the_verdict(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    train(broken(), steps=3)
    writer.close()
    train(mlp(), steps=2)  # a writer that is closed stays closed
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert {f"nanny/{name}" for name in ("loss", "grad_norm", "lr")} <= set(seen.Tags()["scalars"])
    assert [event.step for event in seen.Scalars("nanny/grad_norm")] == [0, 1, 2]
    told = {tag: seen.Tensors(f"nanny/{tag}/text_summary")[-1].tensor_proto.string_val[0] for tag in ("findings", "verdict")}
    assert told["verdict"].startswith(b"NOT HEALTHY: undefined_operation")
    assert b"step 0: " in seen.Tensors("nanny/findings/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.slow
def test_opentelemetry_has_a_gauge_for_each_number_and_an_event_for_each_finding(monkeypatch):
    from opentelemetry import _logs, metrics
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader, exporter = InMemoryMetricReader(), InMemoryLogRecordExporter()
    logs = LoggerProvider()
    logs.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)  # set in earnest, they are there until the process ends
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    monkeypatch.setattr(_logs, "get_logger", logs.get_logger)
    train(mlp(), steps=3)
    gauges = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    assert {gauge.name for gauge in gauges} == {f"nanny.{name}" for name in CURVES}
    train(broken(), steps=2)
    events = [one.log_record for one in exporter.get_finished_logs()]
    found = next(one for one in events if one.event_name == "nanny.finding" and one.attributes["nanny.severity"] == "ERROR")
    assert (found.attributes["nanny.code"], found.attributes["nanny.step"]) == ("NAN", 0)
    verdicts = [one.attributes["nanny.word"] for one in events if one.event_name == "nanny.verdict"]
    assert (verdicts[0], verdicts[-1]) == ("HEALTHY", "NOT HEALTHY")


@pytest.mark.slow
def test_prometheus_is_served_the_gauges_by_the_exporter_of_opentelemetry(monkeypatch):
    exporter = pytest.importorskip("opentelemetry.exporter.prometheus")
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import REGISTRY, generate_latest

    reader = exporter.PrometheusMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    train(mlp(), steps=3)
    page = generate_latest(REGISTRY).decode()
    provider.shutdown()
    lines = [line for line in page.splitlines() if line.startswith("nanny_")]
    assert {line.partition("{")[0] for line in lines} == {f"nanny_{name}" for name in CURVES}
    assert next(float(line.split()[-1]) for line in lines if line.startswith("nanny_lr{")) > 0


def test_a_tracker_that_fails_is_told_nothing_more_and_the_run_goes_on(monkeypatch):
    class Run:
        calls = 0

        def define_metric(self, *_, **__):
            pass

        def log(self, *_, **__):
            Run.calls += 1
            raise ConnectionError("no network")

    class FakeModule:
        run = Run()

    monkeypatch.setitem(sys.modules, "wandb", FakeModule)
    with pytest.warns(NannyWarning, match="wandb did not take what the nanny had to tell"):
        assert train(mlp(), steps=4) == []
    assert Run.calls == 1


@pytest.mark.slow
def test_wandb_gets_it_all_and_the_program_keeps_its_numbering(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="test")
    train(broken(), steps=4, before_step=lambda step: run.log({"mine": step}, step=step))
    assert "nanny/grad_norm" in dict(run.summary)
    assert run.summary["nanny/verdict"].startswith("NOT HEALTHY")
    assert any(key.startswith("nanny/finding/NAN") for key in dict(run.summary))
    run.log({"mine": 4}, step=4, commit=True)  # it would be dropped, had the count gone on
    assert run.summary["mine"] == 4
    assert wandb.run is run
    run.finish()
    wandb.teardown()  # its service writes the file a little later
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*.wandb"))
    assert all(word in written for word in (b"nanny/grad_norm", b"nanny/step", b"nanny/verdict", b"NOT HEALTHY"))


@pytest.mark.slow
def test_mlflow_gets_it_all(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())  # what the small package has, too
    with mlflow.start_run() as run:
        train(broken(), steps=4)
        assert mlflow.active_run().info.run_id == run.info.run_id
        mlflow.flush_async_logging()
    client = mlflow.MlflowClient()
    assert [m.step for m in client.get_metric_history(run.info.run_id, "nanny/grad_norm")] == [0, 1, 2, 3]
    tags = client.get_run(run.info.run_id).data.tags
    assert tags["nanny.verdict"].startswith("NOT HEALTHY")
    assert any(key.startswith("nanny.finding.NAN") for key in tags)
    assert mlflow.active_run() is None


@pytest.mark.slow
def test_trackio_gets_it_all_and_the_program_keeps_its_numbering(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    from trackio.context_vars import current_run
    from trackio.sqlite_storage import SQLiteStorage

    run = trackio.init(project="test", embed=False)
    trackio.log({"mine": 0.0})
    train(broken(), steps=30)
    trackio.log({"mine": 1.0})
    assert current_run.get() is run
    trackio.finish()
    rows = SQLiteStorage.get_logs("test", run.name)
    assert [row["step"] for row in rows if "mine" in row] == [0, 1]  # it would be 30, had the count gone on
    assert [row["step"] for row in rows if "nanny/grad_norm" in row] == list(range(30))
    assert any(str(row.get("nanny/finding")).startswith("NAN") for row in rows)
    assert [row["nanny/verdict"] for row in rows if "nanny/verdict" in row][-1].startswith("NOT HEALTHY")


@pytest.mark.slow
def test_aim_gets_it_all(tmp_path):
    aim = pytest.importorskip("aim")
    run = aim.Run(repo=str(tmp_path), system_tracking_interval=None, capture_terminal_logs=False)
    train(broken(), steps=3)
    assert {metric.name for metric in run.metrics()} >= {"nanny/grad_norm", "nanny/lr"}
    assert run["nanny.verdict"].startswith("NOT HEALTHY")
    assert any(str(key).startswith("nanny.finding.NAN") for key in run.meta_run_attrs_tree.collect())
    run.track(1.0, name="mine", step=3)  # still open
    run.close()
    train(mlp(), steps=2)  # one that is closed stays closed
