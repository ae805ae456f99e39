"""What README and docs/ say holds: links lead somewhere, commands parse, code compiles and runs, both languages say the same."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from nanny import cli
from nanny.core.command_line import Parser
from nanny.core.finding import NannyError

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("skills/*/SKILL.md")]
)
# generated, or for those who go deep: English only
ENGLISH = {"architecture", "causes", "check-triage", "commands", "limits", "numerics", "performance", "schema"}
SITE = [page for page in PAGES if page.startswith(("README", "docs/"))]
CHINESE = [page for page in PAGES if page.endswith(".zh-CN.md")]
RECIPES = {"CONTRIBUTING.md"}  # its code is run by test_contributing.py
SNIPPETS = {"docs/rules.md", "docs/rules.zh-CN.md"}  # each shows a mistake; tests/check holds whole programs


class Block(NamedTuple):
    language: str
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@functools.cache
def parts(page: str) -> tuple[list[str], list[Block]]:
    """The lines of prose, and the blocks of code, fenced or indented (those have no language)."""
    prose: list[str] = []
    blocks: list[Block] = []
    fence = ""
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        opened = re.match(r"\s*(```+)(\w*)", line)
        if fence:
            if line.strip() == fence:
                fence = ""
            else:
                blocks[-1].lines.append(line)
        elif opened:
            fence = opened[1]
            blocks.append(Block(opened[2] or "text", []))
        elif line.startswith("    ") and (not prose[-1] or prose[-1] == "<code>"):
            if prose[-1] != "<code>":
                blocks.append(Block("", []))
                prose.append("<code>")
            blocks[-1].lines.append(line[4:])
        elif not line and prose and prose[-1] == "<code>":
            blocks[-1].lines.append("")
        else:
            prose.append(line)
    return prose, blocks


def blocks_in(page: str, *languages: str) -> list[str]:
    return [block.text for block in parts(page)[1] if block.language in languages]


def inline_code(page: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", "\n".join(parts(page)[0]))


def links(page: str) -> list[str]:
    prose = re.sub(r"`[^`]*`", "", "\n".join(parts(page)[0]))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"[a-z]+:", link)]


@functools.cache
def anchors(page: str) -> set[str]:
    heads = [re.sub(r"^#+ +", "", line) for line in parts(page)[0] if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    lost = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(os.path.relpath(target, ROOT))):
            lost.append(link)
    assert lost == []


def in_blocks(page: str) -> list[str]:
    """Each command of a code block, without the comment and the launcher before it."""
    found = []
    for text in blocks_in(page, "", "text", "bash", "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            if match := re.match(r"\s*(?:torchrun .* -m |python -m |uvx --from \S+ )?(nanny [a-z].*)", line):
                found.append(match[1])
    return found


def words_of(command: str) -> list[str]:
    """Without what is said about it beside it, and without the pipe that takes it on."""
    return shlex.split(re.sub(r"\s[>|].*| {5,}.*", "", command), comments=True)[1:]


class ParsedError(Exception):
    """The command would begin its work here."""


def complaint(words: list[str], whole: bool) -> str:
    """What the parser of the command says against it; without `whole`, missing arguments are no mistake."""
    name = next((word for i, word in enumerate(words) if not word.startswith("-") and words[i - 1] != "--db"), "")
    if not name or name.isupper() or "--help" in words:
        return ""
    if name not in cli.COMMANDS:
        return f"no command {name}"
    asked: list[Any] = []
    parse_args = Parser.parse_args

    def stop(parser: Parser, *args: Any) -> None:
        asked.append(parser)
        parse_args(parser, *args)
        raise ParsedError

    with mock.patch.object(Parser, "parse_args", stop):
        try:
            cli.run_command(words)
        except ParsedError:
            return ""
        except NannyError as error:
            if whole or not asked or not re.search("are required|expected one argument", str(error)):
                return str(error)
    unknown = [word for word in words if re.match("--?[a-z]", word) and word not in asked[0]._option_string_actions]
    return f"no flag {unknown}" if unknown else ""


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_as_the_parser_knows_them(page: str) -> None:
    told = [(command, complaint(words_of(command), whole=True)) for command in in_blocks(page)]
    told += [(code, complaint(words_of(code), whole=False)) for code in inline_code(page) if re.match(r"nanny [a-z-]", code)]
    assert [(command, why) for command, why in told if why] == []


def test_the_parser_is_really_asked() -> None:
    assert "--nothing" in complaint(["summary", "--nothing"], whole=True)
    assert "--nothing" in complaint(["check", "--nothing"], whole=False)
    assert "required" in complaint(["check", "--fix"], whole=True)
    assert complaint(["check", "--fix"], whole=False) == ""
    assert complaint(["sumary"], whole=False) == "no command sumary"


@pytest.mark.parametrize("page", PAGES)
def test_settings_of_clients_can_be_read(page: str) -> None:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    for text in blocks_in(page, "json"):
        json.loads(text)
    for text in blocks_in(page, "toml"):
        toml.loads(text)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in SNIPPETS])
def test_python_compiles(page: str) -> None:
    for number, text in enumerate(blocks_in(page, "python")):
        compile(text, f"{page}, block {number}", "exec")


PRELUDE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled=False)
loader = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]
x = loader[0][0]
def train_step(batch):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
def train(model):
    for batch in loader:
        train_step(batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in {*SNIPPETS, *RECIPES, *CHINESE} and blocks_in(page, "python")]
)
def test_python_runs(page: str, tmp_path: Path) -> None:
    for text in blocks_in(page, "python"):
        done = subprocess.run([sys.executable, "-c", PRELUDE + text], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stderr}"


def structure(page: str) -> dict[str, list[Any]]:
    """What is the same in every language: levels of headings, shapes of tables, commands, code without its comments."""
    prose, blocks = parts(page)
    tables: list[list[int]] = []
    for before, line in zip(["", *prose], prose):
        if line.startswith("|"):
            if not before.startswith("|"):
                tables.append([])
            tables[-1].append(len(re.findall(r"(?<!\\)\|", line)) - 1)
    code = [re.sub(r" *(#|//).*", "", block.text) for block in blocks if block.language not in ("", "text")]
    return {
        "headings": [len(line.split(" ")[0]) for line in prose if re.match(r"#+ ", line)],
        "tables": tables,
        "commands": [" ".join(words_of(command)) for command in in_blocks(page)],
        "fenced code": code,
        "links": sorted({link.replace(".zh-CN", "").partition("#")[0] for link in links(page) if ".png" not in link} - {""}),
    }


@pytest.mark.parametrize("chinese", CHINESE)
def test_both_languages_show_the_same(chinese: str) -> None:
    english, translated = structure(chinese.replace(".zh-CN", "")), structure(chinese)
    for part in english:
        assert translated[part] == english[part], part


def test_every_page_for_users_is_in_both_languages() -> None:
    english = {page.removesuffix(".md") for page in SITE if not page.endswith(".zh-CN.md")}
    deep = {f"docs/{name}" for name in ENGLISH}
    assert sorted(english - deep) == sorted(page.removesuffix(".zh-CN.md") for page in CHINESE)


def test_the_site_shows_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    assert {page.removeprefix("docs/") for page in SITE if "docs/" in page} <= {*re.findall(r"([\w.-]+\.md)$", nav, re.MULTILINE)}


@pytest.mark.parametrize("page", SITE)
def test_names_of_findings_exist(page: str) -> None:
    known = {*re.findall(r"^## (\w+)$", (ROOT / "docs/rules.md").read_text(encoding="utf-8"), re.MULTILINE)}
    families = {code.split("_")[0] for code in known}
    named = {code for code in inline_code(page) if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", code) and code.split("_")[0] in families}
    assert named <= known


@pytest.mark.slow
@pytest.mark.parametrize(("page", "lang"), [("README.md", "en"), ("README.zh-CN.md", "zh")])
def test_the_readme_shows_what_the_commands_print(page: str, lang: str, tmp_path: Path) -> None:
    """Line by line; numbers may differ from machine to machine."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")

    def masked(text: str) -> list[str]:
        return [re.sub(r"[\d.,]+(e\d+)?", "#", line).strip() for line in text.splitlines() if line.strip()]

    def said(*words: str) -> list[str]:
        command = [sys.executable, "-m", "nanny", *words]
        environment = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        return masked(done.stdout + done.stderr)

    def quoted(start: str) -> list[str]:
        text = next(text for text in blocks_in(page, "") if start in text)
        return masked(text[text.index(start) :])

    shown = [line for text in blocks_in(page, "") for line in masked(text)]
    checked = said("check", "examples/two_mistakes.py", "--lang", lang)
    first = checked.index(next(line for line in checked if "SCALER_CLIP_BEFORE_UNSCALE" in line))
    assert [line for line in checked[first : first + 8] if line not in shown] == []
    ran = said("run", "--lang", lang, "examples/unscaled_attention.py")
    last = max(number for number, line in enumerate(ran) if line.startswith("nanny: "))
    assert len(ran[last + 1 :]) > 10
    assert [line for line in ran[last + 1 :] if line not in shown] == []
    assert [line for line in quoted("attention_logit_overflow_fp16: ") if line not in ran] == []

    shutil.copy(ROOT / "examples/two_mistakes.py", tmp_path / "train.py")
    said("check", "--fix", "train.py")
    ran = said("run", "--lang", lang, "train.py")
    assert [line for line in quoted("norm_square_overflow_fp16: ") if line not in ran] == []
