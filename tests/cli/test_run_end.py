"""The last words of `nanny run`: the diagnosis itself and its picture, of the whole job."""

from __future__ import annotations

import dataclasses

import pytest
from runs.query_recordings import HEALTHY, SICK, record

from nanny.cli.run import tell_end
from nanny.core.finding import Finding, Severity
from nanny.diagnose.records import Diagnosis
from nanny.diagnose.text import diagnosis_block
from nanny.diagnose.verdict import Verdict
from nanny.monitor.live_log import closing_lines
from nanny.show.tables import lines_text


def test_a_sick_run_ends_with_what_was_seen_and_the_path_of_its_picture(tmp_path, capsys):
    store = record(tmp_path, SICK)
    tell_end(store, 1)
    said = capsys.readouterr().err
    assert "NOT HEALTHY" in said
    assert "NAN_OUTPUT in head.softmax at step 20" in said
    assert said.rstrip().endswith(f"picture: {tmp_path / 'run-1.svg'}")
    assert (tmp_path / "run-1.svg").read_text(encoding="utf-8").startswith("<svg")


def test_a_healthy_run_ends_without_a_picture(tmp_path, capsys):
    tell_end(record(tmp_path, HEALTHY), 1)
    assert capsys.readouterr().err == ""
    assert not list(tmp_path.glob("*.svg"))


def test_the_first_rank_ends_with_the_verdict_on_all(tmp_path, capsys):
    others = Finding("NAN", Severity.ERROR, "came from another rank", site="head", step=20, evidence={"from_others": True})
    store = record(tmp_path, dataclasses.replace(SICK, findings=(others,), loss_is_nan_from=None, nan_output=None, world_size=2))
    record(tmp_path, dataclasses.replace(SICK, rank=1, world_size=2))
    tell_end(store, 1)
    assert "NAN_OUTPUT in head.softmax at step 20" in capsys.readouterr().err


@pytest.mark.parametrize("colour", [True, False])
def test_the_remedy_and_the_source_line_stand_out_in_colour_only(colour):
    one = Diagnosis(
        cause="underflow", culprit="head", step=3, confidence=0.95, source="y = x / 1e9\n    ^^^^^^^", remedy="scale it"
    )
    text = lines_text(diagnosis_block(Verdict(False, "NOT HEALTHY", "", one), one), 80, colour)
    assert ("\x1b[32m   fix: scale it\x1b[0m" in text) is colour
    assert "      y = x / 1e9\n" in text


def test_where_there_are_several_ranks_the_last_verdict_is_the_one_of_all(tmp_path, capsys):
    """What one rank says of itself stands above; a reader must see which of the two counts."""
    store = record(tmp_path, dataclasses.replace(SICK, world_size=2))
    record(tmp_path, dataclasses.replace(SICK, rank=1, world_size=2))
    tell_end(store, 1)
    assert capsys.readouterr().err.lstrip().startswith("all 2 ranks: NOT HEALTHY")


@pytest.mark.parametrize("lowest", range(3))
def test_what_was_noticed_first_is_chinese_with_any_number_of_severities(lowest):
    findings = [Finding("OVERFLOW", severity, "m", site="op:bmm", step=42) for severity in list(Severity)[lowest:]]
    verdict = Verdict(False, "NOT HEALTHY", "", first=findings[-1])
    said = closing_lines(verdict, findings, "", "", "", lang="zh")[0]
    assert "第 42 步 OVERFLOW op:bmm；" in said
    assert [name for name in ("noticed", "error", "warning", "info") if name in said] == []


@pytest.mark.parametrize("last", ["metrics.db", "metrics.rank1.db"])
def test_one_rank_tells_once_all_have_ended(last, tmp_path, capsys):
    other = {"metrics.db": "metrics.rank1.db", "metrics.rank1.db": "metrics.db"}[last]
    for rank in (0, 1):
        record(tmp_path, dataclasses.replace(SICK, rank=rank, world_size=2))
    tell_end(tmp_path / last, 1)
    assert capsys.readouterr().err.lstrip().startswith("all 2 ranks: NOT HEALTHY")
    tell_end(tmp_path / other, 1)
    assert capsys.readouterr().err == ""


def test_a_rank_that_ends_before_another_leaves_the_last_word_to_it(tmp_path, capsys):
    store = record(tmp_path, dataclasses.replace(SICK, world_size=2))
    record(tmp_path, dataclasses.replace(SICK, rank=1, world_size=2, status="running"))
    tell_end(store, 1)
    assert capsys.readouterr().err == ""
    assert not list(tmp_path.glob("*.svg"))


@pytest.mark.parametrize(("lang", "said"), [("en", "steps to the wall at this rate"), ("zh", "步后越界")])
def test_a_healthy_run_that_grows_towards_the_end_of_its_format_ends_with_the_steps_that_are_left(lang, said, tmp_path, capsys):
    grows = dataclasses.replace(HEALTHY, amp_dtype="float16", steps=60, trace_every=10, grow={"head": 8.0})
    tell_end(record(tmp_path, grows), 1, lang)
    assert said in capsys.readouterr().err
    tell_end(record(tmp_path, dataclasses.replace(grows, grow={})), 2, lang)
    assert capsys.readouterr().err == ""
