"""The demo is the first thing a newcomer types: it must work anywhere and tell the truth."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import re
import zlib
from pathlib import Path

import pytest

from nanny import cli
from nanny.cli import demo
from nanny.show.translation import translate


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        patch.setenv("LC_ALL", "C.UTF-8")
        assert cli.main(["demo"]) == 0
    return folder / "demo", out.getvalue()


@pytest.mark.landing
def test_the_source_shows_the_first_mistake_and_is_mended(told):
    folder, text = told
    before = text.partition("=== 2.")[0]
    assert "SCALER_CLIP_BEFORE_UNSCALE" in before
    assert "1 finding fixed" in before
    assert "scaler.unscale_(optimizer)" in (folder / "train.py").read_text()


def test_the_run_shows_the_second_with_its_line_and_a_remedy_that_was_tried(told):
    during = told[1].partition("=== 2.")[2].partition("=== 3.")[0]
    assert re.search(r"watching Sequential, 2\.31k parameters, float16 with GradScaler 1024, recording to nanny_logs", during)
    assert re.search(r"NOT HEALTHY: norm_square_overflow_fp16 in unit at step \d+ \(train\.py:15\)", during)
    assert re.search(r"tried on step \d+, it helps", during)


def test_the_mended_script_is_healthy_and_learns(told):
    first, second = (float(x) for x in re.findall(r"step 59  loss ([\d.]+)", told[1]))
    assert second < 0.5 * first
    assert "HEALTHY: no numerical trouble in 60 steps" in told[1].partition("=== 3.")[2]


def test_a_picture_and_a_page_are_written(told):
    folder, _ = told
    packed = (folder / "report.html").read_text(encoding="utf-8").partition('id="data">')[2].partition("<")[0]
    assert b"norm_square_overflow_fp16" in zlib.decompress(base64.b64decode(packed))
    assert (folder / "card.svg").read_text(encoding="utf-8").startswith("<svg")


def test_commands_that_the_demo_shows_are_those_of_a_user(told, monkeypatch, capsys):
    folder, text = told
    monkeypatch.chdir(folder)
    (summary,) = re.findall(r"^\$ nanny (summary .*)$", text, re.MULTILINE)
    assert cli.main(summary.split()) in (0, 1)
    assert capsys.readouterr().err == ""


def test_the_list_names_every_example_by_what_it_shows(capsys):
    assert cli.main(["demo", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in demo.examples_folder().glob("*.py"))
    assert all(len(line.split(maxsplit=1)[1]) > 30 for line in lines)


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        *((name, "torchrun") for name in ("ddp", "fsdp", "pipeline", "tensor_parallel", "deepspeed_engine")),
        *((f"{name}_loop", "python examples/") for name in ("gan", "fabric", "accelerate")),
        ("lightning_callback", "python examples/"),
        ("trl_sft", "python examples/"),
    ],
)
def test_an_example_that_is_run_otherwise_says_how(name, launcher, tmp_path, capsys):
    assert cli.main(["demo", name, "--out", str(tmp_path)]) == 0
    assert launcher in capsys.readouterr().out
    assert (tmp_path / name / f"{name}.py").is_file()
    assert not (tmp_path / name / "nanny_logs").exists()


def test_every_example_brings_its_fix_in_less_than_sixty_lines():
    for path in demo.examples_folder().glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 60, path.name
        assert path.stem == demo.STORY or text.count("--fixed") >= 2, path.name  # how to ask for it, and what it does


def test_a_name_with_a_typing_mistake_gets_the_nearest(capsys):
    assert cli.main(["demo", "lost_update"]) == 2
    assert "did you mean 'lost_updates'?" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_told_in_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "demo")]) == 2
    assert "name another folder with --out" in capsys.readouterr().err


def test_the_story_is_told_in_chinese_too():
    tree = ast.parse(Path(demo.__file__).read_text(encoding="utf-8"))
    told = [
        call.args[0].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("say", "chapter")
        and isinstance(call.args[0], ast.Constant)
    ]
    assert len(told) >= 8
    assert [text for text in told if translate(text, "zh") == text] == []
