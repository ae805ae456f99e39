"""Chinese is complete: every sentence that a rule, a hazard, a cause or a view can say has its line in the one catalogue."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from runs.query_recordings import SICK, record

import nanny
from nanny.check.config import Config, known_codes
from nanny.check.files import check_paths
from nanny.cli import main
from nanny.core.finding import Finding, Severity
from nanny.core.numbers import factor
from nanny.examine.hazards import kinds
from nanny.show.pages import Page, all_pages
from nanny.show.rule_text import SECTIONS, chinese_rules, section_of
from nanny.show.translation import translate, words_of

SOURCE = Path(nanny.__file__).parent
SPEAKERS = (
    "monitor/rules", "examine/hazards", "diagnose/causes", "diagnose/describe.py", "diagnose/verdict.py", "diagnose/text.py",
    "runs/text", "check/rules", "check/settings", "check/chains.py", "diff/judge.py", "diff/page.py", "tensor/judge.py",
    "tensor/page.py", "diff/settings.py", "diagnose/first_nonfinite.py", "diagnose/trials.py", "examine/again.py",
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
        if re.match(r"\[\w+\.", english):  # asked for by name
            rows = {"{rows}": "{value}", "{places}": "{count}"}  # Chinese counts without a plural
            wanted = {rows.get(gap, gap) for gap in re.findall(r"\{\w+\}", english)}
            assert set(re.findall(r"\{\w+\}", chinese)) == wanted, english
            continue
        gaps = re.findall(r"\{\d\}", english)
        assert gaps == [f"{{{i}}}" for i in range(len(gaps))], english
        assert sorted(re.findall(r"\{\d\}", chinese)) == gaps, english


def sections(page: Page) -> list[tuple[str, str]]:
    """The sections of a page by their English names, each with its code."""
    english = {chinese: name for name, chinese in SECTIONS.items()}
    return [(english.get(name, name), code) for name, _, code in map(section_of, page.text.split("\n\n"))]


def test_every_rule_has_a_chinese_page_with_all_its_sections_and_the_same_code():
    chinese = all_pages("zh")
    rules = [page for page in all_pages().values() if not page.family]
    assert len(rules) > 100
    assert [page.code for page in rules if sections(chinese[page.code]) != sections(page)] == []
    said = [(page.code, section_of(block)) for page in rules for block in chinese[page.code].text.split("\n\n")]
    wrong = [(code, name) for code, (name, prose, code_lines) in said if not (prose or code_lines) or english_in(prose)]
    plain = [(code, name) for code, (name, prose, _) in said if prose and not re.search("[\u4e00-\u9fff]", prose)]
    assert wrong + plain == []


def test_the_chinese_pages_are_of_rules_and_sections_that_exist():
    pages = {code: page for code, page in all_pages().items() if not page.family}
    assert set(chinese_rules()) <= set(pages)
    known = {code: {name for name, _ in sections(page)} for code, page in pages.items()}
    assert [(code, name) for code, said in chinese_rules().items() for name in said if name not in known[code]] == []


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


SHORT = re.compile(r"[A-Za-z]+(?:,? [a-z]+){2,}")  # a message of the checker may be three words long
NAMES = re.compile(r"[\w.]+\(.*?\)|\w+(?:\.\w+)+")


@pytest.mark.slow
def test_nothing_that_the_checker_says_of_its_fixtures_stays_english(tmp_path):
    shutil.copytree(Path(__file__).parents[1] / "check" / "fixtures" / "bad", tmp_path / "bad")
    found = check_paths([str(tmp_path / "bad")], Config(select=known_codes(["ALL"], "")), 1).findings
    said = {text for one in found for text in (one.message, one.hint, *(link.what for link in one.chain))}
    assert len(said) > 300
    shown = {text: NAMES.sub("", CODE.sub("", translate(text.replace(str(tmp_path), "code"), "zh"))) for text in said}
    assert [text for text, chinese in shown.items() if SHORT.search(chinese)] == []


def test_the_checker_speaks_chinese_to_people_and_english_to_programs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    script = tmp_path / "train.py"
    script.write_text("import torch\nwith torch.autocast(dtype=torch.float16):\n    pass\n")
    asked = ["check", str(script), "--no-cache", "--output-format"]
    assert main([*asked, "text", "--explain"]) == 1
    said = capsys.readouterr().out
    assert "调用 autocast 时没有给设备类型：会抛出 TypeError" in said
    assert "原因: `torch.cuda.amp.autocast()` 知道自己的设备" in said
    assert "修复: 先写设备类型" in said
    assert "在 1 个文件中发现 1 个错误。" in said
    assert [words for line in said.splitlines() for words in english_in(line)] == []
    assert main([*asked, "concise"]) == 1
    assert "REGION_NO_DEVICE 调用 autocast 时没有给设备类型" in capsys.readouterr().out
    for form in ("json", "sarif", "github"):
        assert main([*asked, form]) == 1
        assert capsys.readouterr().out.isascii(), form
    assert main([*asked, "text", "--lang", "en"]) == 1
    assert capsys.readouterr().out.isascii()


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
    assert [words for line in said.splitlines() for words in re.findall("[a-z]{2,} [a-z]{2,}", CODE.sub("", line))] == []


def test_a_chinese_locale_is_enough(tmp_path, capsys, monkeypatch):
    store = record(tmp_path, BROKEN)
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    main(["summary", "--db", str(store)])
    assert "不健康" in capsys.readouterr().out
    main(["summary", "--db", str(store), "--format", "json"])
    assert "NOT HEALTHY" in capsys.readouterr().out  # JSON is for programs


@pytest.mark.parametrize("ratio", [1.05, 0.8, 3.0, 0.2, math.inf, math.nan])
def test_how_much_larger_is_said_in_chinese_to_the_last_word(ratio):
    said = translate(f"The runs PART FIRST at step 5: the loss is {factor(ratio)} in B (A 1.02, B 1.09)", "zh")
    assert re.findall("[a-z]{2,}", said) == []


def test_a_chain_that_names_a_hazard_has_no_english_in_it():
    said = {kind.name: translate(f"unit: {kind.name} in sum -> wrong gradients", "zh") for kind in kinds.entries().values()}
    assert len(said) > 20
    assert [name for name, text in said.items() if name in text or "unit：" not in text or "sum" not in text] == []


def test_no_space_is_left_between_two_chinese_words():
    said = translate("step 40: the first infinity comes out of `bmm` in `blocks.2.attn` (float16)", "zh")
    assert said.startswith("第 40 步：首个无穷由 `blocks.2.attn`")


def test_the_word_of_the_verdict_is_the_same_in_a_sentence_and_alone():
    for word, chinese in words_of("verdict", "zh").items():
        assert translate(f"{word}: no cause is proved by what was seen", "zh").startswith(f"{chinese}：")


def test_a_layer_that_is_called_like_a_word_of_the_page_keeps_its_name():
    assert set(words_of("page", "en")) == set(words_of("page", "zh"))
    assert words_of("page", "zh")["loss"] == "损失"
    assert translate("NAN_OUTPUT in close at step 3, 95 % sure", "zh") == "NAN_OUTPUT：close，第 3 步，把握 95 %"


@pytest.mark.parametrize(
    "said",
    [
        "  setup     2.88k parameters, of which none was seen to train, train mode, fp16 in 3 of 3 modules",
        "the fp16 gradients of 7 of 7 modules are below 6.1e-05, where bits are lost, 7 of them all 0 (no GradScaler)",
        "below 3e-8 fp16 stores 0",
        "run 1, rank 0 of 2 in nanny_logs/metrics.db (bfloat16, torch 2.13.0, finished): ddp.py",
        "NOT HEALTHY: data_nan in data:input at step 40 on rank 1, 95 % sure.",
        "The runs PART FIRST at step 0: the output of blocks.1.attn.out is 16 % smaller in B (A 0.177, B 0.148)",
        "  - from step 7 on the loss is 8.5 % smaller in B (A 0.552, B 0.505), but they come back together by step 119",
        "the loss of A, the reference, is not finite from step 40 on: B cannot part from it behind that",
        "  skipped   no steps",
        "step 32: sum gives 360,124 in FP32, beyond 65,504 of fp16: 95.3 % of its 64 results become infinite",
        "sum over dim=0 in FP32: 98 % of the mass of the sum is swallowed by a bf16 accumulator, its result is 12 % off",
        "the whole gradient is 41 % off (a change of one rounding moves it by 2 %), most of it in 0.weight (43 %)",
    ],
)
def test_what_real_runs_say_is_translated_whole_or_not_at_all(said):
    """Half a sentence in the other language is worse than none: two English words in a row are too many."""
    assert re.findall("[a-z]{2,} [a-z]{2,}", translate(said, "zh")) == []


@pytest.mark.parametrize(
    ("text", "chinese"),
    [
        (
            "6 gradients of outputs would lose energy: 4 loses 75 % of its energy to zero; no loss scale can help",
            "6 个输出梯度会",
        ),
        (
            "1 gradient of an output would lose energy: 4 loses 75 % of its energy to zero; no loss scale can help",
            "1 个输出梯度会",
        ),
        ("This BF16 run WOULD NOT SURVIVE in FP16, because:", "因为："),
        ("This FP16 run went wrong in FP16.", "出了问题。"),
        (
            "`a`, `b` and 2 more (4 tensors, 5248 elements): no gradient in 10 optimizer steps; its module never runs",
            "5248 个元素",
        ),
        ("no errors, 3 warnings, no notes", "0 个错误"),
    ],
)
def test_what_stands_in_a_gap_is_chinese_too(text, chinese):
    said = translate(text, "zh")
    assert chinese in said
    assert re.findall(r"\b(?:of|no|tensors|because|gradient)\b", said) == []
