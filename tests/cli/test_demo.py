"""The demo is the first thing a newcomer types: it must work anywhere and tell the truth."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch

from nanny import cli
from nanny.cli import demo


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        assert cli.main(["demo"]) == 0
    assert torch.get_num_threads() == threads
    return folder, out.getvalue()


def test_low_precision_is_seen_to_harm_and_the_hint_to_mend(told):
    losses = [float(x) for x in re.findall(r"final loss in \w+[^:]*: ([\d.]+)", told[1])]
    exact, low, mended = losses
    assert low > 2 * exact
    assert mended < exact


def test_the_verdict_blames_the_two_axes(told):
    assert "SCALE_IMBALANCE" in told[1]
    assert re.search(r"summed over dim=2 in bf16", told[1])


def test_the_recorded_run_names_the_layer_that_overflowed(told):
    folder, _ = told
    logs = folder / "demo" / "nanny_logs"
    assert logs.is_dir()
    assert re.search(r"OVERFLOW .* energy", told[1])


def test_the_cause_is_named_with_its_numbers_and_the_way_out(told):
    assert re.search(r"product_overflow_fp16: energy", told[1])
    assert re.search(r"in FP32 the same result reaches 6\d,\d{3}", told[1])


def test_the_demo_ends_with_a_page_and_the_line_to_serve_it(told):
    folder, text = told
    page = (folder / "demo" / "report.html").read_text(encoding="utf-8")
    assert "energy" in page
    assert "demo/report.html" in text
    assert "nanny ui --db demo/nanny_logs" in text


def test_a_mistake_of_the_loop_is_told_in_full_precision(told):
    assert "GRADIENT_NEVER_CLEARED" in told[1].partition("zero_grad was forgotten")[2]


def test_the_demo_shows_a_fix_as_a_patch(told):
    _, text = told
    assert "+        scaler.unscale_(optimizer)" in text.splitlines()


def test_commands_that_the_demo_names_work(told, monkeypatch, capsys):
    folder, text = told
    monkeypatch.chdir(folder)
    (tensor_command,) = re.findall(r"nanny (tensor .*)", text)
    assert cli.main(tensor_command.split()) == 1
    for command in re.findall(r"nanny ((?:summary|alerts|layer|stats) .*--db demo/nanny_logs)", text):
        assert cli.main(command.split()) in (0, 1), command
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_made_is_told_in_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "demo")]) == 2
    assert "name another folder with --out" in capsys.readouterr().err


def test_the_breaking_run_breaks_only_after_a_healthy_start(tmp_path, capsys):
    demo.watch_it_break(tmp_path, steps=60)
    losses = re.findall(r"loss (\S+)  loss scale", capsys.readouterr().out)
    assert len(losses) == 3
    assert all(float(loss) < 10 for loss in losses)
