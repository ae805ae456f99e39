"""The text of a rule's page by its sections, and in Chinese: prose from `assets/rules_zh.txt`, examples as they are."""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from importlib import resources

from .translation import translate

SECTIONS = {
    "Why": "原因", "Example": "示例", "Use instead": "改用", "When not": "例外", "Fix": "修复", "In settings files": "配置文件中",
}  # fmt: skip
SECTION = re.compile(rf"^({'|'.join(SECTIONS)}|{'|'.join(SECTIONS.values())})([:：])[ \t]*(.*)$")


@lru_cache(maxsize=1)
def chinese_rules() -> dict[str, dict[str, str]]:
    """Code -> what its page says by section in `assets/rules_zh.txt`; what it finds stands under no name."""
    text = resources.files("nanny.show").joinpath("assets/rules_zh.txt").read_text(encoding="utf-8")
    said: dict[str, dict[str, str]] = {}
    for line in filter(None, text.splitlines()):
        if line.startswith("## "):
            said[line[3:]] = page = {}
        elif not line.startswith("#"):
            section, prose, _ = section_of(line)
            page[section] = prose
    return said


def section_of(block: str) -> tuple[str, str, str]:
    """Of a block of a page: the name of its section, its prose in one line, and its code."""
    lines = block.splitlines()
    prose = " ".join(itertools.takewhile(lambda line: not line.startswith("    "), lines))
    code = "\n".join(itertools.dropwhile(lambda line: not line.startswith("    "), lines))
    named = SECTION.match(prose)
    return (named[1], named[3], code) if named else ("", prose, code)


def chinese_text(code: str, text: str) -> str:
    """The text of a rule's page with its prose in Chinese and its examples as they are."""
    said = chinese_rules().get(code, {})
    out = []
    for number, block in enumerate(text.split("\n\n")):
        section, prose, example = section_of(block)
        name = f"{SECTIONS[section]}：" if section else ""
        chinese = said.get(section, "") if section or number == 0 else ""
        out.append("\n".join(filter(None, (name + (chinese or translate(prose, "zh")), example))))
    return "\n\n".join(out)


def why_of(code: str, text: str, lang: str) -> str:
    """The reason that the text of a rule's page gives, in one line."""
    why = next((prose for name, prose, _ in map(section_of, text.split("\n\n")) if name == "Why"), "")
    return chinese_rules().get(code, {}).get("Why", why) if lang == "zh" else why
