"""The knowledge base: one page per cause that a diagnosis may name, in English and Chinese, beside this file.

A page begins with `# cause: one sentence`, `Family: ...` and `Fix: ...` (Chinese: `类别: ...`, `修复: ...`): the remedy that a
diagnosis, a hazard or a rule of the monitor shows stands there and nowhere else. Then come the same sections in the same order,
two of them with a program: the one that fails, the repaired one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...core.command_line import LANGUAGES
from ...core.finding import NannyError

SECTIONS = {
    "en": ("Mechanism", "How it shows", "Numbers", "Fails", "Repaired", "Confirm", "Sources"),
    "zh": ("机制", "表现", "数字", "出错的代码", "修好的代码", "确认", "来源"),
}

_HERE = Path(__file__).parent
_HEAD = re.compile(r"# (?P<name>\w+): (?P<title>.+)\n+(?:Family|类别): *(?P<family>\w+)\n+")
_FIX = re.compile(r"(?:Fix|修复): *(?P<text>.+?)\n\n", re.DOTALL)
_CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CausePage:
    name: str
    family: str
    title: str  # what happens, in one sentence
    text: str  # all of the page, in Markdown
    body: str  # the remedy and the sections
    remedy: str  # what to change, on one line

    def sections(self) -> dict[str, str]:
        parts = re.split(r"^## (.+)$", self.body, flags=re.MULTILINE)
        return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2])}

    def programs(self) -> tuple[str, ...]:
        """The Python blocks: the one that fails, the repaired one."""
        return tuple(_CODE.findall(self.text))


@cache
def causes(language: str = "en") -> dict[str, CausePage]:
    """Every page by the name of its cause."""
    if language not in LANGUAGES:
        raise NannyError(f"the knowledge base has no language {language!r}; use one of: {', '.join(LANGUAGES)}")
    return {path.stem: _read(path) for path in sorted((_HERE / language).glob("*.md"))}


def _read(path: Path) -> CausePage:
    text = path.read_text(encoding="utf-8")
    head = _HEAD.match(text)
    if head is None:
        raise ValueError(f"{path} does not begin with '# cause: sentence' and 'Family: ...'")
    body = text[head.end() :]
    fix = _FIX.match(body)
    if fix is None:
        raise ValueError(f"{path} has no paragraph 'Fix: ...' (修复: ...) behind its family")
    return CausePage(head["name"], head["family"], head["title"], text, body, " ".join(fix["text"].split()))


FORMER_NAMES = {"bf16_update_lost": "update_lost"}  # in records and scripts of before


def current_name(cause: str) -> str:
    """Of a cause by a former name, or without its format: `exp_overflow` is `exp_overflow_fp16`."""
    name = FORMER_NAMES.get(cause, cause)
    return f"{name}_fp16" if name not in causes() and f"{name}_fp16" in causes() else name


def remedy_of(cause: str, language: str = "en") -> str:
    """What to change, as the page of the cause has it; "" for what has no page."""
    page = causes(language).get(current_name(cause))
    return page.remedy if page is not None else ""


def confirm_of(cause: str, language: str = "en") -> str:
    """The experiment that proves it, as the page of the cause has it."""
    page = causes(language).get(current_name(cause))
    said = "" if page is None else page.sections().get(SECTIONS[language][5], "").partition("\n\n")[0]
    return ("" if language == "zh" else " ").join(said.split("\n"))
