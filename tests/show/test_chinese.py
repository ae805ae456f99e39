"""Chinese is complete: every sentence that a rule, a hazard, a cause or a view can say has its line in the one catalogue."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from runs.query_recordings import SICK, record

import nanny
from nanny.cli import main
from nanny.core.finding import Finding, Severity
from nanny.show.translation import translate

SOURCE = Path(nanny.__file__).parent
SPEAKERS = (
    "monitor/rules", "examine/hazards", "diagnose/causes", "diagnose/describe.py", "diagnose/verdict.py", "diagnose/text.py",
    "runs/text",
)  # fmt: skip
ENGLISH = re.compile(r"[A-Za-z]+(?:,? [a-z]+){3,}")
CODE = re.compile(r"`[^`]*`|nanny [a-z].*|--\w+")


def english_in(text: str) -> list[str]:
    """Runs of four English words or more: a sentence, not a name."""
    return ENGLISH.findall(CODE.sub("", text))


def sentences(path: Path) -> Iterator[str]:
    """Texts of a source file with their gaps filled, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in docs or id(node) in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "{" not in node.value:
            yield node.value


def test_every_sentence_has_a_line_in_the_catalogue():
    files = [file for name in SPEAKERS for file in sorted((SOURCE / name).glob("*.py")) or [SOURCE / name]]
    said = {text for file in files for text in sentences(file) if english_in(text)}
    assert len(said) > 150
    assert sorted(text for text in said if english_in(translate(text, "zh"))) == []


def test_the_catalogue_is_of_pairs_with_the_same_gaps():
    lines = resources.files("nanny.show").joinpath("assets/zh.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert len({english for english, _ in pairs}) == len(pairs)
    for english, chinese in pairs:
        gaps = re.findall(r"\{\d\}", english)
        assert gaps == [f"{{{i}}}" for i in range(len(gaps))], english
        assert sorted(re.findall(r"\{\d\}", chinese)) == gaps, english


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("loss nan", "损失 nan"),
        ("the loss is NaN; the first bad number came out of `bmm`, which reaches 68,930 in FP32; fp16 ends at 65,504",
         "损失为 NaN；首个坏值由 `bmm` 产生，在 FP32 下达到 68,930；fp16 到 65,504 为止"),
        ("`0.weight`, `0.bias` is not finite, so the output holds 512 NaN of 512 values",
         "`0.weight`, `0.bias` 非有限，因此输出的 512 个值中有 512 NaN"),
        ("a sentence of a user's own rule", "a sentence of a user's own rule"),
        ("blocks.1.attn", "blocks.1.attn"),
    ],
)  # fmt: skip
def test_a_sentence_is_put_together_clause_by_clause(english, chinese):
    assert translate(english, "zh") == chinese
    assert translate(english, "en") == english


FOUND = (
    Finding(
        "OVERFLOW", Severity.ERROR,
        "the loss is NaN; the first bad number came out of `bmm`, which reaches 68,930 in FP32; fp16 ends at 65,504",
        "find what grows without bound or is divided by zero in the named module; add an eps inside the root or the logarithm.",
        site="head.softmax", step=20, evidence={"passed_on": ["head.out"]},
    ),
    Finding("SCALE_LOW", Severity.WARNING, "loss scale is 64, the first steps passed at 4096", site="scaler", step=12),
)  # fmt: skip
BROKEN = dataclasses.replace(SICK, findings=FOUND)


@pytest.mark.parametrize(
    "command",
    ["summary", "alerts", "diagnose", "stats", "layer head.softmax", "runs", "whatif --dtype bf16", "compare 1 2", "tail"],
)
def test_what_the_commands_say_is_chinese_where_it_is_asked_for(command, tmp_path, capsys):
    store = record(tmp_path, BROKEN)
    record(tmp_path, dataclasses.replace(BROKEN, seed=1))
    main([*command.split(), "--db", str(store), "--lang", "zh"])
    said = capsys.readouterr().out
    assert re.search("[\u4e00-\u9fff]{3}", said)
    assert [words for line in said.splitlines() for words in english_in(line)] == []


def test_a_chinese_locale_is_enough(tmp_path, capsys, monkeypatch):
    store = record(tmp_path, BROKEN)
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    main(["summary", "--db", str(store)])
    assert "不健康" in capsys.readouterr().out
    main(["summary", "--db", str(store), "--format", "json"])
    assert "NOT HEALTHY" in capsys.readouterr().out  # JSON is for programs
