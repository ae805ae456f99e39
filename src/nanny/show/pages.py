"""The page of every code and cause: what it means, why it matters and what to write instead, gathered from all rooms.

`page_of(name)` finds one, `page_text` and `page_markdown` show it. Another room with pages is one more line in _ROOMS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import cleandoc

from ..core.finding import NannyError, Severity
from ..core.numbers import nearest
from .rule_text import SECTION, chinese_text
from .term import DEFAULT_WIDTH, wrap
from .translation import translate

_ITEM = re.compile(r"(?:[-*]|\d+\.) +")


@dataclass(frozen=True)
class Page:
    code: str
    severity: Severity
    text: str  # first line: what it is; then the sections
    by: str  # the command that reports it
    family: str = ""  # of a cause; rules have none
    lang: str = "en"

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def kind(self) -> str:
        return self.family or self.severity.name.lower()


# Where the codes of a room have their pages, and the command that reports them; the first that has a name gives its page.
_ROOMS = {
    "nanny.runs.ranks": "nanny summary",
    "nanny.tensor.judge": "nanny tensor",
    "nanny.diff.judge": "nanny diff",
    "nanny.ops.judge": "nanny trace",
    "nanny.diagnose.policy_mismatch": "check_policy_mismatch",
}


def rule_pages() -> Iterator[Page]:
    """What a finding's code means."""
    from ..check.pages import checker_pages
    from ..monitor.registry import all_rules

    for code, (severity, text) in checker_pages().items():
        yield Page(code, severity, text, "nanny check")
    for rule in all_rules().values():
        yield Page(rule.code, rule.severity, rule.doc, "nanny run")
    for room, command in _ROOMS.items():
        for code, (severity, text) in import_module(room).PAGES.items():
            yield Page(code, severity, cleandoc(text), command)


def cause_pages(lang: str = "en") -> Iterator[Page]:
    """The knowledge base: what a diagnosis may name."""
    from ..diagnose.knowledge import causes

    for cause in causes(lang).values():
        text = f"{cause.title}\n\n{cause.body.rstrip()}"
        yield Page(cause.name, Severity.ERROR, text, "nanny diagnose", cause.family, lang)


def all_pages(lang: str = "en") -> dict[str, Page]:
    """Every page by its name."""
    pages: dict[str, Page] = {}
    for page in rule_pages():
        pages.setdefault(page.code, page)
    if lang == "zh":
        pages = {code: replace(page, text=chinese_text(code, page.text), lang="zh") for code, page in pages.items()}
    return dict(sorted([*pages.items(), *((page.code, page) for page in cause_pages(lang))]))


def page_named(name: str, pages: Mapping[str, Page]) -> Page | None:
    """The one of this name, however it is written."""
    from ..diagnose.knowledge import current_name

    bare = name.strip()
    names = (bare, bare.upper(), bare.lower(), current_name(bare.lower()))
    return next((pages[one] for one in names if one in pages), None)


def page_of(name: str, lang: str = "en") -> Page:
    pages = all_pages(lang)
    found = page_named(name, pages)
    if found is None:
        raise NannyError(f"no rule or cause is called {name!r}{nearest(name, pages)}; `nanny rule` lists all")
    return found


def all_names() -> list[tuple[str, str]]:
    """Every page by its name and what it is about."""
    return [(page.code, page.title) for page in all_pages().values()]


def page_text(page: Page, width: int = DEFAULT_WIDTH) -> str:
    return f"{page.code} ({page.kind}, {page.by})\n\n{reflow(page.text, width, page.lang)}"


def reflow(text: str, width: int, lang: str = "en") -> str:
    """Paragraphs within `width` columns; code, tables and blank lines as they are. Chinese has no space to join lines with."""
    out: list[str] = []
    paragraph: list[str] = []
    fenced = False

    def finish() -> None:
        if paragraph:
            indent = _ITEM.match(paragraph[0])
            out.extend(wrap(" ".join(paragraph), width, indent.end() if indent else 0))
            paragraph.clear()

    for line in text.splitlines():
        fence = line.startswith("```")
        if fenced or fence or not line.strip() or line.startswith(("    ", "|", "#")):
            finish()
            out.append(line)
        else:
            if SECTION.match(line) or _ITEM.match(line) or lang == "zh":
                finish()
            paragraph.append(line.strip() if paragraph else line.rstrip())
        fenced ^= fence
    finish()
    return "\n".join(out)


def page_markdown(page: Page) -> str:
    """Of a rule: the sections in bold, indented code fenced. A cause's page is Markdown already."""
    out = [f"## {page.code}", "", f"*{page.kind}, {translate(f'reported by `{page.by}`', page.lang)}*", ""]
    if page.family:
        return "\n".join([*out, re.sub(r"^## ", "### ", page.text, flags=re.MULTILINE)])
    fenced = False
    for line in page.text.splitlines():
        is_code = line.startswith("    ") or (fenced and not line.strip())
        if is_code and not fenced:
            out += ["```python"] if not out[-1] else ["", "```python"]
        elif fenced and not is_code:
            while not out[-1]:
                out.pop()
            out += ["```", ""]
        fenced = is_code
        section = SECTION.match(line)
        if section and not is_code:
            out.append(f"**{section[1]}{section[2]}** {section[3]}".rstrip())
        else:
            out.append(line[4:] if is_code else line)
    return "\n".join([*out, "```"] if fenced else out).rstrip()
