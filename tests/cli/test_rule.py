"""`nanny rule` explains every code, and the generated documents are up to date."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nanny import cli
from nanny.cli.explain import main, rules_page
from nanny.core.finding import NannyError
from nanny.diagnose.knowledge import causes
from nanny.show.pages import all_pages, page_markdown, page_text
from nanny.show.term import columns_of

ROOT = Path(__file__).parents[2]
SECTIONS = ("Why:", "Example:", "Use instead:", "When not:")
CHECKER = [page for page in all_pages().values() if page.by == "nanny check"]


def nanny_rule(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanny.cli", "rule", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("page", CHECKER, ids=lambda page: page.code)
def test_every_page_of_the_checker_is_complete(page):
    assert re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", page.code)
    assert page.title.endswith(".")
    missing = [section for section in SECTIONS if not re.search(rf"^{section}", page.text, re.MULTILINE)]
    assert missing == []


@pytest.mark.parametrize("page", all_pages().values(), ids=lambda page: page.code)
def test_code_fences_of_a_page_are_closed(page):
    assert page_markdown(page).count("```") % 2 == 0


def test_the_command_explains_a_code():
    done = nanny_rule("CONFIG_LOSS_SCALE")
    assert done.stdout.startswith("CONFIG_LOSS_SCALE (")
    assert "Why: " in done.stdout


def test_a_typing_mistake_gets_the_nearest_code():
    done = nanny_rule("config_los_scale")
    assert done.returncode == 2
    assert "did you mean 'CONFIG_LOSS_SCALE'?" in done.stderr


def test_a_family_gives_all_its_pages(capsys):
    text = shown(capsys, "config")
    assert "CONFIG_LOSS_SCALE (" in text
    assert "CONFIG_TRUE_HALF (" in text
    with pytest.raises(NannyError, match="no rule is called 'XYZ'"):
        main(["XYZ"])


def test_without_a_code_all_are_listed(capsys):
    lines = shown(capsys).splitlines()
    assert [line.split()[0] for line in lines[:-2] if not line.startswith(" ")] == sorted(all_pages(), key=in_the_list)


def in_the_list(code):
    page = all_pages()[code]
    return page.family, code


def test_text_fits_into_a_hundred_columns_and_code_stays_as_it_is(capsys):
    listed = shown(capsys).splitlines()
    assert max(map(len, listed)) <= 100
    whole = shown(capsys, "--all")
    prose = [line for line in without_code(whole) if " " in line.strip()]
    assert [line for line in prose if len(line) > 100] == []
    for page in all_pages().values():
        code = [line for line in page.text.splitlines() if line.startswith("    ")]
        assert set(code) <= set(whole.splitlines())


def without_code(text):
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith(("    ", "|", "#", "```")):
            yield line


def test_formats_of_all_pages(capsys):
    rows = json.loads(shown(capsys, "--all", "--format", "json"))
    assert [row["code"] for row in rows] == list(all_pages())
    assert shown(capsys, "--all", "--format", "markdown").startswith("# Rules\n")
    assert shown(capsys, "--all").count("Why: ") >= len(CHECKER)


def test_the_page_of_a_code_that_also_judges_settings_files_says_so():
    assert "In settings files: `fp16.enabled` and `bf16.enabled`" in all_pages()["CONFIG_FP16_AND_BF16"].text


def test_the_document_has_every_rule_once():
    assert rules_page().count("\n## ") == len([page for page in all_pages().values() if not page.family])


def test_a_cause_is_explained_in_both_languages(capsys):
    assert shown(capsys, "mask_inf_full_row").startswith("mask_inf_full_row (mask, nanny diagnose)\n\nA row of the softmax")
    assert "## 机制" in shown(capsys, "MASK_INF_FULL_ROW", "--lang", "zh")


def test_a_family_of_causes_gives_all_its_pages(capsys):
    text = shown(capsys, "scaler_misuse")
    assert "clip_before_unscale (scaler_misuse" in text
    assert "stale_inf_grads (scaler_misuse" in text


def test_the_locale_chooses_the_language_of_text_and_not_of_json(capsys, monkeypatch):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert "\n\n原因：固定缩放为 1" in shown(capsys, "CONFIG_LOSS_SCALE")
    assert "\n\n原因：固定缩放为 1" not in shown(capsys, "CONFIG_LOSS_SCALE", "--lang", "en")
    row = json.loads(shown(capsys, "CONFIG_LOSS_SCALE", "--format", "json"))[0]
    assert row["title"] == "A loss-scale setting makes no sense."
    assert shown(capsys).endswith("nanny rule CODE 解释其中一条。\n")


def test_the_list_of_causes_links_to_pages_that_exist():
    links = re.findall(r"\]\(\.\./(.+?)\)", (ROOT / "docs" / "causes.md").read_text(encoding="utf-8"))
    assert len(links) == 2 * len(causes())
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse words its help otherwise in other versions")
def test_generated_documents_are_up_to_date():
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()
    stale = [path.name for path, text in pages.items() if path.read_text() != text]
    assert stale == [], "type: make docs"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["nanny", "sum"], ["summary"]),
        (["nanny", "alerts", "--fail"], ["--fail-on"]),
        (["nanny", "whatif", "--dtype", "b"], ["bf16"]),
    ],
)
def test_bash_completes_commands_flags_and_choices(words, offered):
    script = ROOT / "src" / "nanny" / "cli" / "shells" / "nanny.bash"
    line = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_nanny; echo ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", line], capture_output=True, text=True).stdout.split() == offered


def test_a_mistyped_command_is_guessed(capsys):
    assert cli.main(["sumary"]) == 2
    assert "did you mean 'summary'?" in capsys.readouterr().err


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_page_fits_into_eighty_columns_but_for_code_and_tables(lang):
    wide, fenced = [], False
    for page in all_pages(lang).values():
        for line in page_text(page, 80).splitlines():
            fence = line.startswith("```")
            if not (fenced or fence or line.startswith(("    ", "|", "#"))) and columns_of(line) > 80:
                wide.append((page.code, line))
            fenced ^= fence
    assert wide == []
