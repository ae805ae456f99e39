"""`nanny rule CODE`: what a finding means, why it matters and what to write instead; `--all` for every page.

Pages come from several sources (the checker's rules, the monitor's); a new kind of page is one more function in SOURCES.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import cleandoc

from .records import NannyError, Severity

SECTIONS = ("Why", "Example", "Use instead", "When not", "Fix", "In settings files")
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

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0]


def checker_pages() -> Iterator[Page]:
    """The checker's rules; one that also looks at settings files tells so in a section of its own."""
    from .check import settings_rules  # noqa: F401  (enters its rules)
    from .check.registry import all_rules, rules_on

    in_settings = {rule.code: rule for rule in rules_on("settings")}
    for code, rule in all_rules().items():
        more = f"\n\nIn settings files: {in_settings[code].doc}" if code in in_settings else ""
        yield Page(code, rule.severity, rule.doc + more, "nanny check")
    yield Page("SYNTAX_ERROR", Severity.ERROR, cleandoc(SYNTAX_ERROR), "nanny check")


def monitor_pages() -> Iterator[Page]:
    """The rules that judge a run."""
    from .judge.registry import all_rules

    for rule in all_rules().values():
        yield Page(rule.code, rule.severity, cleandoc(rule.doc), "nanny run")


def tensor_pages() -> Iterator[Page]:
    from .judge.tensor_rules import RULES

    for rule in RULES.values():
        yield Page(rule.code, rule.severity, cleandoc(rule.doc), "nanny tensor")


def diff_pages() -> Iterator[Page]:
    from .judge.diff_pages import PAGES

    for code, (severity, text) in PAGES.items():
        yield Page(code, severity, cleandoc(text), "nanny diff")


SOURCES: tuple[Callable[[], Iterable[Page]], ...] = (checker_pages, monitor_pages, tensor_pages, diff_pages)


def all_pages() -> dict[str, Page]:
    """Every page by code; the first source that has a code gives its page."""
    pages: dict[str, Page] = {}
    for source in SOURCES:
        for page in source():
            pages.setdefault(page.code, page)
    return dict(sorted(pages.items()))


def checker_codes() -> tuple[str, ...]:
    from .check import settings_rules  # noqa: F401  (enters its rules)
    from .check.registry import all_rules

    return (*all_rules(), "SYNTAX_ERROR")


def page_of(name: str, lang: str = "en") -> Page:
    """The one page of this name."""
    del lang
    pages = all_pages()
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

    found = get_close_matches(wrong.upper(), list(known), n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}?" if found else ""


def page_text(page: Page) -> str:
    return f"{page.code} ({page.severity.name.lower()}, {page.by})\n\n{page.text}"


def page_markdown(page: Page) -> str:
    """The sections in bold, indented code fenced."""
    out = [f"## {page.code}", "", f"*{page.severity.name.lower()}, reported by `{page.by}`*", ""]
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
    """All pages as one document, with a table in front."""
    pages = all_pages().values()
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


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(list(argv))
    pages = all_pages()
    if options.all:
        print(_shown(list(pages.values()), options.format, whole=True))
    elif not options.codes:
        print(_overview(pages.values()) if options.format == "text" else _shown(list(pages.values()), options.format))
    else:
        chosen = [page for code in options.codes for page in _find(code, pages)]
        print(_shown(chosen, options.format))
    return 0


def _find(code: str, pages: dict[str, Page]) -> list[Page]:
    """The page of a code, or all pages of a family (`SCALER`)."""
    wanted = code.strip().upper()
    if wanted in pages:
        return [pages[wanted]]
    family = [page for name, page in pages.items() if wanted and name.startswith(f"{wanted.rstrip('_')}_")]
    if not family:
        raise NannyError(f"no rule is called {code!r}{nearest(wanted, pages)}; `nanny rule` lists all")
    return family


def _shown(pages: Sequence[Page], form: str, whole: bool = False) -> str:
    if form == "json":
        from .show.jsontext import to_text

        rows = [{"code": p.code, "severity": p.severity, "title": p.title, "by": p.by, "text": p.text} for p in pages]
        return to_text(rows)
    if form == "markdown":
        return rules_page().rstrip() if whole else "\n\n".join(map(page_markdown, pages))
    return "\n\n\n".join(map(page_text, pages))


def _overview(pages: Iterable[Page]) -> str:
    rows = [(page.code, page.severity.name.lower(), page.title) for page in pages]
    wide = max(len(code) for code, _, _ in rows)
    lines = [f"{code:<{wide}}  {severity:<7}  {title}" for code, severity, title in rows]
    return "\n".join([*lines, "", "nanny rule CODE explains one of them."])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nanny rule", description="Explain the code of a finding.")
    parser.add_argument("codes", nargs="*", metavar="CODE", help="a code, or the beginning of several (SCALER)")
    parser.add_argument("--all", action="store_true", help="every page")
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    return parser
