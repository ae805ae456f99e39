"""`nanny rule CODE`: what a finding or a cause means, why it matters and what to write instead; `--all` for every page.

Pages come from several sources (the checker's rules, the monitor's, the knowledge base of causes, which is also in Chinese:
`nanny rule CAUSE --lang zh`); a new kind of page is one more function in SOURCES.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any

from ..core.finding import NannyError, Severity
from .term import DEFAULT_WIDTH, width_of

SECTIONS = ("Why", "Example", "Use instead", "When not", "Fix", "In settings files")
_ITEM = re.compile(r"(?:[-*]|\d+\.) +")
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):[ \t]*(.*)$")

SYNTAX_ERROR = """A file that Python cannot read, so nothing in it was checked.

Why: a file that is skipped without a word looks like a file without mistakes.

Example:
    print "loss", loss

Use instead:
    print("loss", loss)

When not: a template or a test file that is broken on purpose: name it under `exclude` or `per-file-ignores` in
`[tool.nanny]` of pyproject.toml.
"""


@dataclass(frozen=True)
class Page:
    code: str
    severity: Severity
    text: str  # first line: what it is; then the sections
    by: str  # the command that reports it
    family: str = ""  # of a cause; rules have none

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def kind(self) -> str:
        return self.family or self.severity.name.lower()


def checker_pages() -> Iterator[Page]:
    """The checker's rules; one that also looks at settings files tells so in a section of its own."""
    from ..check import settings_rules  # noqa: F401  (enters its rules)
    from ..check.registry import all_rules, rules_on

    in_settings = {rule.code: rule for rule in rules_on("settings")}
    for code, rule in all_rules().items():
        more = f"\n\nIn settings files: {in_settings[code].doc}" if code in in_settings else ""
        yield Page(code, rule.severity, rule.doc + more, "nanny check")
    yield Page("SYNTAX_ERROR", Severity.ERROR, cleandoc(SYNTAX_ERROR), "nanny check")


def monitor_pages() -> Iterator[Page]:
    """The rules that judge a run."""
    from ..monitor.registry import all_rules

    for rule in all_rules().values():
        yield Page(rule.code, rule.severity, cleandoc(rule.doc), "nanny run")


def tensor_pages() -> Iterator[Page]:
    from ..tensor.judge import RULES

    for rule in RULES.values():
        yield Page(rule.code, rule.severity, cleandoc(rule.doc), "nanny tensor")


def diff_pages() -> Iterator[Page]:
    from ..diff.pages import PAGES

    for code, (severity, text) in PAGES.items():
        yield Page(code, severity, cleandoc(text), "nanny diff")


def cause_pages(lang: str = "en") -> Iterator[Page]:
    """The knowledge base: what a diagnosis may name."""
    from ..diagnose.knowledge import causes

    for cause in causes(lang).values():
        yield Page(cause.name, Severity.ERROR, f"{cause.title}\n\n{cause.body.rstrip()}", "nanny diagnose", cause.family)


def op_pages() -> Iterator[Page]:
    from ..ops.judge import PAGES

    for code, (severity, text) in PAGES.items():
        yield Page(code, severity, cleandoc(text), "nanny trace")


SOURCES: tuple[Callable[[], Iterable[Page]], ...] = (
    checker_pages,
    monitor_pages,
    tensor_pages,
    diff_pages,
    op_pages,
    cause_pages,
)


def all_pages(lang: str = "en") -> dict[str, Page]:
    """Every page by its name; the first source that has a name gives its page. What is not translated is in English."""
    pages: dict[str, Page] = {}
    for source in SOURCES:
        for page in source():
            pages.setdefault(page.code, page)
    translated = {} if lang == "en" else {page.code: page for page in cause_pages(lang)}
    return dict(sorted((pages | translated).items()))


def checker_codes() -> tuple[str, ...]:
    from ..check import settings_rules  # noqa: F401  (enters its rules)
    from ..check.registry import all_rules

    return (*all_rules(), "SYNTAX_ERROR")


def page_of(name: str, lang: str = "en") -> Page:
    """The one page of this name."""
    pages = all_pages(lang)
    found = pages.get(name.strip().upper()) or pages.get(name.strip().lower())
    if found is None:
        raise NannyError(f"no rule or cause is called {name!r}{nearest(name, pages)}; `nanny rule` lists all")
    return found


def all_names() -> list[tuple[str, str]]:
    """Every page by its name and what it is about."""
    return [(page.code, page.title) for page in all_pages().values()]


def nearest(wrong: str, known: Iterable[str]) -> str:
    """`, did you mean 'HALF_CALL'?`, or nothing."""
    from difflib import get_close_matches

    names = {name.upper(): name for name in known}
    found = get_close_matches(wrong.upper(), list(names), n=1, cutoff=0.5)
    return f", did you mean {names[found[0]]!r}?" if found else ""


def page_text(page: Page, width: int = DEFAULT_WIDTH) -> str:
    text = page.text if re.search(r"[\u4e00-\u9fff]", page.text) else reflowed(page.text, width)
    return f"{page.code} ({page.kind}, {page.by})\n\n{text}"


def reflowed(text: str, width: int) -> str:
    """Paragraphs within `width` columns; code, tables and blank lines as they are."""
    out: list[str] = []
    paragraph: list[str] = []
    fenced = False

    def finish() -> None:
        if paragraph:
            indent = _ITEM.match(paragraph[0])
            out.extend(
                textwrap.wrap(
                    " ".join(paragraph), width, subsequent_indent=" " * (indent.end() if indent else 0),
                    break_long_words=False, break_on_hyphens=False,
                )
            )  # fmt: skip
            paragraph.clear()

    for line in text.splitlines():
        fence = line.startswith("```")
        if fenced or fence or not line.strip() or line.startswith(("    ", "|", "#")):
            finish()
            out.append(line)
        else:
            if _SECTION.match(line) or _ITEM.match(line):
                finish()
            paragraph.append(line.strip() if paragraph else line.rstrip())
        fenced ^= fence
    finish()
    return "\n".join(out)


def page_markdown(page: Page) -> str:
    """Of a rule: the sections in bold, indented code fenced. A cause's page is Markdown already."""
    out = [f"## {page.code}", "", f"*{page.kind}, reported by `{page.by}`*", ""]
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
        section = _SECTION.match(line)
        if section and not is_code:
            out.append(f"**{section[1]}:** {section[2]}".rstrip())
        else:
            out.append(line[4:] if is_code else line)
    return "\n".join([*out, "```"] if fenced else out).rstrip()


def rules_page() -> str:
    """The pages of all rules as one document, with a table in front."""
    pages = [page for page in all_pages().values() if not page.family]
    table = [f"| [{p.code}](#{p.code.lower()}) | {p.severity.name.lower()} | {p.title} |" for p in pages]
    head = [
        "# Rules",
        "",
        "Generated by `make docs` from the rules themselves; `nanny rule CODE` shows the same in the terminal.",
        "",
        "| code | severity | finds |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *table, "", *(page_markdown(page) + "\n" for page in pages)])


def causes_page() -> str:
    """The causes by family, each with links to its page in both languages."""
    head = [
        "# Causes",
        "",
        "Generated by `make docs` from the knowledge base. These are the root causes that `nanny diagnose` names;",
        "`nanny rule CAUSE` shows a page in the terminal, `--lang zh` in Chinese. Each page has a program that fails",
        "and the repaired one; tests run both.",
    ]
    pages = sorted(cause_pages(), key=lambda page: (page.family, page.code))
    for family in dict.fromkeys(page.family for page in pages):
        head += ["", f"## {family}", "", "| cause | what happens | page |", "|---|---|---|"]
        for page in (p for p in pages if p.family == family):
            places = {"English": f"en/{page.code}.md", "中文": f"zh/{page.code}.md"}
            links = ", ".join(f"[{name}](../src/nanny/diagnose/knowledge/{place})" for name, place in places.items())
            head.append(f"| `{page.code}` | {page.title} | {links} |")
    return "\n".join(head) + "\n"


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(list(argv))
    pages = all_pages(options.lang)
    if options.all:
        print(_shown(list(pages.values()), options.format, whole=True))
    elif not options.codes:
        print(_overview(pages.values()) if options.format == "text" else _shown(list(pages.values()), options.format))
    else:
        chosen = [page for code in options.codes for page in _find(code, pages)]
        if options.lang != "en":
            _say_what_is_english(chosen)
        print(_shown(chosen, options.format))
    return 0


def _find(code: str, pages: dict[str, Page]) -> list[Page]:
    """The page of a code or cause, or all pages of a family (`SCALER`, `underflow`)."""
    wanted = code.strip().upper()
    for name in (wanted, wanted.lower()):
        if name in pages:
            return [pages[name]]
    begins = f"{wanted.rstrip('_')}_"
    family = [p for p in pages.values() if wanted and (p.code.upper().startswith(begins) or p.family.upper() == wanted)]
    if not family:
        raise NannyError(f"no rule is called {code!r}{nearest(wanted, pages)}; `nanny rule` lists all")
    return family


def _say_what_is_english(pages: Iterable[Page]) -> None:
    plain = [page.code for page in pages if not page.family]
    if plain:
        print(f"nanny: only causes have a Chinese page; in English: {', '.join(plain)}", file=sys.stderr)


def _shown(pages: Sequence[Page], form: str, whole: bool = False) -> str:
    if form == "json":
        from ..core.plain_json import to_text

        rows = [{"code": p.code, **_rank(p), "title": p.title, "by": p.by, "text": p.text} for p in pages]
        return to_text(rows)
    if form == "markdown":
        shown = [page for page in pages if page.family] if whole else pages
        texts = [page_markdown(page) for page in shown]
        return "\n\n".join([rules_page().rstrip(), "# Causes", *texts] if whole else texts)
    return "\n\n\n".join(page_text(page, width_of(sys.stdout)) for page in pages)


def _rank(page: Page) -> dict[str, Any]:
    return {"family": page.family} if page.family else {"severity": page.severity}


def _overview(pages: Iterable[Page]) -> str:
    """Rules first, then causes."""
    rows = [(page.code, page.kind, page.title) for page in sorted(pages, key=lambda page: (page.family, page.code))]
    wide, kinds = (max(len(row[column]) for row in rows) for column in (0, 1))
    indent, width = " " * (wide + kinds + 4), width_of(sys.stdout)
    lines = []
    for code, kind, title in rows:
        line = f"{code:<{wide}}  {kind:<{kinds}}  {title}"
        lines += [line] if not title.isascii() else textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False)
    return "\n".join([*lines, "", "nanny rule CODE explains one of them."])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nanny rule", description="Explain the code of a finding or the cause of a diagnosis.")
    parser.add_argument("codes", nargs="*", metavar="CODE", help="a code or cause, or what several begin with (SCALER)")
    parser.add_argument("--all", action="store_true", help="every page")
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="causes are explained in Chinese as well")
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    return parser
