"""Renderers on literal findings, of code and of a running model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from nanny.core.finding import Finding, Severity
from nanny.core.plain_json import render_json, render_jsonl, to_text
from nanny.show.findings import render_concise, render_text, summary
from nanny.show.reports import render_github, render_gitlab, render_junit
from nanny.show.sarif import render_sarif

LIVE = Finding(
    "GRAD_EXPLOSION", Severity.ERROR, "gradient norm 3e+05 is 40 times its median", "clip gradients",
    site="encoder.layer.3", step=120, rank=1, value=math.inf, limit=math.nan, evidence={"history": [1.0, -math.inf]},
)  # fmt: skip
CODE = Finding("NUM_X", Severity.WARNING, "seen", "do", file="a.py", line=2, column=5, end_line=2, end_column=8)
EVIL = Finding("NUM_X", Severity.INFO, "a\x1b[2J\0\ud800 <b>&\n::error::x", "h", file="é\x07,:%.py", line=1, column=1)


def test_a_finding_of_a_run_names_site_step_and_rank():
    text = render_text([LIVE])
    assert text.startswith("encoder.layer.3, step 120, rank 1: ERROR GRAD_EXPLOSION\n")
    assert "fix: clip gradients" in text
    assert render_concise([LIVE]).startswith("encoder.layer.3, step 120, rank 1: ERROR GRAD_EXPLOSION gradient norm")


def test_a_finding_without_any_place_is_shown_too():
    assert render_concise([Finding("X_Y", Severity.INFO, "m")]) == "INFO X_Y m"
    assert render_text([Finding("X_Y", Severity.INFO, "m")]) == "INFO X_Y\n  m"


def test_json_has_no_bare_nan():
    (row,) = json.loads(render_json([LIVE]), parse_constant=pytest.fail)
    assert (row["value"], row["limit"], row["evidence"]["history"][1]) == ("Infinity", "NaN", "-Infinity")
    assert json.loads(to_text({"a": (1, math.nan), "b": Severity.INFO, 3: {2.5, 1.5}})) == {
        "a": [1, "NaN"], "b": "INFO", "3": [1.5, 2.5],
    }  # fmt: skip
    assert render_jsonl([]) == ""


def test_every_renderer_takes_hostile_text():
    findings = [EVIL, LIVE, CODE]
    for text in (render_text(findings), render_concise(findings)):
        assert "\x1b" not in text
        assert "\0" not in text
    ElementTree.fromstring(render_junit(findings).encode("utf-8", "replace"))
    assert len(render_github(findings).split("\n")) == 3
    assert render_github([EVIL]).startswith("::notice file=é\x07%2C%3A%25.py,line=1")
    json.loads(render_gitlab(findings))
    schema = json.loads((Path(__file__).parents[1] / "data" / "sarif-2.1.0-rtm.4.json").read_text())
    jsonschema.Draft4Validator(schema).validate(json.loads(render_sarif(findings)))


@pytest.mark.parametrize(
    ("line", "column", "end", "caret"),
    [
        ("x = eps", 5, 8, "    ^^^"),
        ("\tx = eps", 6, 9, "        ^^^"),
        ("数 = eps", 5, 8, "     ^^^"),
        ("x = eps", 5, None, "    ^"),
        ("x = eps", 5, 500, "    ^^^"),
        ("x = eps", 50, 60, "       ^"),
        ("", 1, 2, "^"),
    ],
)
def test_the_caret_stands_under_the_code(line, column, end, caret):
    finding = Finding("N_X", Severity.ERROR, "m", file="a.py", line=1, column=column, end_line=1, end_column=end)
    rows = render_text([finding], {("a.py", None): [line]}).splitlines()
    assert rows[-1] == f"    | {caret}"


def test_a_very_long_line_is_cut_around_the_caret():
    line = "a" * 5000 + "BAD" + "b" * 5000
    finding = Finding("N_X", Severity.ERROR, "m", file="a.py", line=1, column=5001, end_line=1, end_column=5004)
    *_, shown, carets = render_text([finding], {("a.py", None): [line]}, width=80).splitlines()
    assert len(shown) <= 82
    assert shown[carets.index("^") : carets.rindex("^") + 1] == "BAD"


def test_a_line_that_is_not_in_the_file_gives_no_frame():
    assert "|" not in render_text([CODE], {("a.py", None): ["only one"]})


def test_summary_counts_in_words():
    assert summary([], 3) == "No findings in 3 files."
    assert summary([CODE, LIVE, EVIL, EVIL], 1) == "Found 1 error, 1 warning and 2 remarks in 1 file."


def test_a_finding_of_a_run_has_one_shape_whether_its_line_is_known_or_not():
    always = {"code", "severity", "message", "hint", "site", "step"}
    run = Finding("A", Severity.ERROR, "seen", site="optimizer", step=3)
    located = replace(run, file="train.py", line=7)
    source = Finding("B", Severity.ERROR, "written", file="train.py", line=7)
    bare, placed, written = json.loads(render_json([run, located, source]))
    assert set(bare) == always
    assert placed == bare | {key: placed[key] for key in written if key not in bare}
    assert (placed["step"], placed["site"]) == (3, "optimizer")
    assert (placed["filename"], placed["location"]) == ("train.py", {"row": 7, "column": 1})
    assert not {"site", "step"} & set(written)
