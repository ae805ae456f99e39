"""Malformed input to every command: one sentence and exit code 2, or an answer; never a traceback, a wait or a raw character.

`python -m fuzz.measure SEED COUNT` in tests/ counts them for any seed.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanny import cli
from nanny.core.terminal import complain, one_sentence, say, visible, visible_lines

from .calls import Case, Playground, ask, draw_case, parser_of, raw_characters, run_many, without_servers_and_scripts
from .files import ODD_TEXT, make_whole_files

QUICK, THOROUGH, PARTS = 100, 10_000, 20
SLOW_TO_LOAD = {"plot", "report", "demo", "doctor", "diff"}


@pytest.fixture(scope="module")
def playground(tmp_path_factory) -> Playground:
    whole = tmp_path_factory.mktemp("whole")
    make_whole_files(whole)
    return Playground(whole, tmp_path_factory.mktemp("spoilt"))


def assert_none(wrong: list) -> None:
    shown = [f"{number} {ascii(case.argv)[:300]} [{case.spoilt}]: {outcome.trouble[:600]}" for number, case, outcome in wrong[:5]]
    assert not wrong, f"{len(wrong)} went wrong:\n" + "\n".join(shown)


@pytest.mark.landing
def test_some_malformed_inputs(playground):
    assert_none(run_many(playground, 1, QUICK, sorted(set(cli.COMMANDS) - SLOW_TO_LOAD)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_malformed_inputs(playground, part):
    assert_none(run_many(playground, 1000 + part, THOROUGH // PARTS))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(rng=st.randoms(use_true_random=False))
def test_inputs_that_hypothesis_draws_and_shrinks(playground, rng: Random):
    with without_servers_and_scripts(), playground.fresh() as folder:
        case = draw_case(rng, folder)
        assert ask(case, folder).trouble == "", case


def test_every_command_of_the_table_is_asked():
    assert all(parser_of(command)._actions for command in cli.COMMANDS)


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize(
    "words",
    [
        *(("check", "x.py"), ("check", "x.ipynb"), ("check", "x.json"), ("check", "train.py", "--baseline", "x.json")),
        *(("tensor", "x.pt"), ("tensor", "x.npy"), ("tensor", "x.safetensors"), ("run", "x.py"), ("trace", "x.py")),
        *(("diff", "--model", "x.py"), ("diff", "--model", "train.py", "--input", "x.pt"), ("summary", "--db", "x.db")),
        ("ui", "--db", "x.db"),
    ],
)
def test_what_is_no_regular_file_is_not_waited_for(playground, words, kind):
    with without_servers_and_scripts(), playground.fresh() as folder:
        for name in {word for word in words if word.startswith("x.")}:
            if kind == "fifo":
                os.mkfifo(folder / name)
            else:
                (folder / name).symlink_to("/dev/zero")
        outcome = ask(Case(words), folder, seconds=10)
    assert outcome.trouble == ""
    assert outcome.code in (0, 2)  # 0: skipped among the files of a check, with a note
    assert "nanny: " in outcome.err


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1e999", "x", ""])
@pytest.mark.parametrize("words", [("sql", "SELECT 1", "--timeout"), ("tail", "--interval")])
def test_a_time_without_end_is_refused(playground, words, value):
    outcome = ask(Case((*words[:-1], f"{words[-1]}={value}")), playground.whole)
    assert (outcome.code, outcome.trouble) == (2, "")
    assert "number of seconds" in outcome.err


# the one function


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=50))
def test_no_text_steers_the_terminal(text):
    text += "".join(ODD_TEXT[:18])
    for shown in (visible(text), visible_lines(text), one_sentence(text)):
        assert raw_characters(shown) == set()
        shown.encode()
    assert visible_lines(text).count("\n") == text.count("\n")
    assert "\n" not in visible(text)


def test_ordinary_names_stay_as_they_are():
    for name in ("encoder.layer.3", "café", "层.注意力", "a b", "日本　語", "\u00a0", "Ω≈ç"):
        assert visible(name) == name


def test_own_colours_stay_and_others_go():
    text = "\x1b[31;1mERROR\x1b[0m \x1b[2J\x1b[5m"
    assert visible_lines(text, colour=True) == "\x1b[31;1mERROR\x1b[0m \\x1b[2J\\x1b[5m"
    assert raw_characters(visible_lines(text)) == set()


def test_a_sentence_keeps_its_end_where_it_says_what_to_do(capsys):
    complain(f"{'x' * 100_000}: no such file; name another")
    said = capsys.readouterr().err
    assert len(said) < 2100
    assert said.endswith("name another\n")


def test_what_an_encoding_lacks_is_spelt_out(tmp_path: Path):
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        say("naïve …", stream)
    assert (tmp_path / "out").read_text() == "na\\xefve \\u2026\n"


def test_names_of_others_are_visible_wherever_they_are_printed(tmp_path, capsys, monkeypatch):
    """A tensor's key, a layer's name, a value of a query, a file's name: in every format for people."""
    import torch
    from runs.query_recordings import Recipe, record

    monkeypatch.chdir(tmp_path)
    odd = "layer\x1b[31m\u202e\u200b"
    torch.save({odd: torch.tensor([1.0, math.nan, 7e4]), "b": torch.ones(2)}, "x.pt")
    record(tmp_path / "nanny_logs", Recipe({odd: (0.0, -8.0), "b": (0.0, -8.0)}, steps=3, nan_output=(0, odd)))
    (tmp_path / f"{odd}.py").write_text("import torch\nx = torch.ones(3).half().log()\n")
    calls = [("tensor", "x.pt"), ("tensor", f"x.pt:{odd}"), ("tensor", f"x.pt:{odd}", "--format", "html"), ("check", ".")]
    calls += [(name, "--format", form) for name in ("summary", "stats", "runs") for form in ("text", "markdown", "csv")]
    calls += [("layer", odd), ("sql", f"SELECT name AS '{odd}' FROM site"), ("sql", "SELECT name FROM site", "--format", "csv")]
    for call in calls:
        cli.main(list(call))
        said = capsys.readouterr()
        assert raw_characters(said.out + said.err) == set(), call


def test_every_odd_text_can_be_the_name_of_a_command(capsys):
    for text in ODD_TEXT:
        assert cli.main([text]) in (0, 2)
    assert raw_characters(capsys.readouterr().err) == set()
