"""The query commands on runs that the real monitor recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from torch import nn
from torch.amp.grad_scaler import GradScaler
from training import Apply, mlp, train

from nanny import cli
from nanny.show.translation import with_label
from runs.query_recordings import nanny

STEPS = 24


def squares() -> nn.Sequential:
    """Its third layer leaves the range of fp16: 3000 squared is 9e6."""
    torch.manual_seed(0)
    large, squared, small = Apply(lambda x: x * 3000), Apply(lambda x: x * x), Apply(lambda x: torch.tanh(x * 1e-7))
    return nn.Sequential(nn.Linear(8, 16), large, squared, nn.Linear(16, 1), small)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs 1 to 4: healthy fp32, healthy bf16, an fp32 run that fp16 could not hold, and the same in fp16."""
    folder = tmp_path_factory.mktemp("monitored")
    store = folder / "nanny_logs"
    train(mlp(), steps=STEPS, interval=4, output_dir=store)
    train(mlp(), steps=STEPS, interval=4, output_dir=store, amp=torch.bfloat16)
    train(squares(), steps=STEPS, interval=4, output_dir=store)
    train(squares(), steps=STEPS, interval=4, output_dir=store, amp=torch.float16, scaler=GradScaler("cpu"))
    return folder


def asked(logs: Path, capsys: pytest.CaptureFixture[str], *call: str) -> dict[str, Any]:
    assert cli.main([*call, "--db", str(logs / "nanny_logs"), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_the_documented_calls_tell_the_culprit_of_a_real_run(logs: Path) -> None:
    summary = nanny("summary", "--db", "nanny_logs/metrics.db", cwd=logs)
    assert summary.stdout.startswith("NOT HEALTHY")
    assert "OVERFLOW at step 0" in summary.stdout
    assert "in 2\n" in summary.stdout, "the layer that squares"
    alerts = nanny("alerts", "--db", "nanny_logs/metrics.db", "--severity", "ERROR", cwd=logs)
    assert "OVERFLOW" in alerts.stdout
    stats = nanny("stats", "--db", "nanny_logs/metrics.db", "--step", "4", cwd=logs)
    assert stats.returncode == 0
    assert "not finite" in stats.stdout


@pytest.mark.parametrize("run", ["1", "2", "3"])
def test_healthy_real_runs_are_called_healthy(run: str, logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(logs, capsys, "summary", "--run", run)["healthy"] is True


def test_a_culprit_in_a_real_module_can_be_looked_at_with_the_command_that_is_offered(logs: Path) -> None:
    offered = [line for line in nanny("summary", cwd=logs).stdout.splitlines() if "nanny layer" in line]
    assert offered
    done = nanny(*offered[0].split("nanny ")[1].split(), cwd=logs)
    assert done.returncode == 0, done.stderr


def test_whatif_on_the_fp32_run_foretells_what_happened_in_fp16(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foretold = asked(logs, capsys, "whatif", "--dtype", "fp16", "--run", "3")
    happened = asked(logs, capsys, "summary", "--run", "4")
    assert foretold["survives"] is False
    assert foretold["layers"][0]["site"] == happened["culprit"]["site"] == "2"


def test_whatif_on_a_healthy_fp32_run_lets_it_pass(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(logs, capsys, "whatif", "--dtype", "fp16", "--run", "1")
    assert found["survives"] is True
    assert found["reasons"] == []
    assert 2.0**8 <= found["loss_scale"]["best"] <= 2.0**24


def test_healthy_fp32_and_bf16_do_not_part_and_the_broken_pair_parts_at_its_culprit(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(logs, capsys, "compare", "1", "2")["parts"] is False
    broken = asked(logs, capsys, "compare", "3", "4")
    assert (broken["first"]["kind"], broken["first"]["name"], broken["first"]["step"]) == ("output", "2", 0)


@pytest.mark.parametrize("call", [["runs"], ["layer", "0.weight"], ["sql", "SELECT * FROM measured LIMIT 3"], ["alerts"]])
def test_other_commands_answer_on_a_real_run(call: list[str], logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(logs, capsys, *call)


def test_a_real_run_exports_and_snapshots(logs: Path, tmp_path: Path) -> None:
    assert nanny("export", "-o", tmp_path / "out", cwd=logs).returncode == 0
    assert (tmp_path / "out" / "stats_output.csv").stat().st_size > 0
    assert nanny("snapshot", tmp_path / "copy.db", cwd=logs).returncode == 0
    assert nanny("tail", "--db", tmp_path / "copy.db", cwd=tmp_path).returncode == 0


def _shown(path: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter() if element.tag.endswith("}text")]


def test_the_card_shows_the_wall_its_number_and_the_way_out(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = str(logs / "nanny_logs")
    assert cli.main(["diagnose", "--db", db, "--format", "json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)
    assert cli.main(["card", "--db", db, "-o", str(tmp_path / "sick.svg")]) == 0
    words = _shown(tmp_path / "sick.svg")
    assert words[0] == "NOT HEALTHY"
    assert "fp16 ends at 65,504" in words
    assert any(word.startswith("FP32 has ") for word in words), "what the format could not hold"
    assert "step 0" in words
    line, _, carets = one["source"].partition("\n")
    assert not carets or line[carets.index("^") :].startswith("x * x")
    assert any("x * x" in word for word in words), "a long line is cut around what ran"
    assert one["remedy"].split()[0] in " ".join(words)


def test_card_and_summary_of_a_healthy_run_tell_its_clearance_in_both_languages(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = str(logs / "nanny_logs")
    for language, verdict, heading in (("en", "HEALTHY", "Clearance"), ("zh", "健康", "余量")):
        file = tmp_path / f"{language}.svg"
        assert cli.main(["card", "--db", db, "--run", "2", "--lang", language, "-o", str(file)]) == 0
        words = _shown(file)
        assert (words[0], heading in words) == (verdict, True)
        assert cli.main(["summary", "--db", db, "--run", "2", "--lang", language]) == 0
        assert f"    {with_label(heading, '', language)}" in capsys.readouterr().out, "the terminal says what the picture says"


def test_a_card_is_a_picture_of_the_promised_size_or_says_what_it_can_be(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = str(logs / "nanny_logs")
    assert cli.main(["card", "--db", db, "-o", str(tmp_path / "card.png")]) == 0
    with Image.open(tmp_path / "card.png") as picture:
        assert picture.size == (1200, 630)
    assert cli.main(["card", "--db", db, "-o", str(tmp_path / "card.gif")]) == 2
    assert "a card is an .svg or a .png" in capsys.readouterr().err
