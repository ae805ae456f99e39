"""Lines, tables and figures as one HTML page that opens anywhere: style, script and figures inside, nothing fetched from outside.

    document(title, sections, figures, lang)         a page of text, tables and figures: `nanny diff` and `nanny tensor`

Names of layers come from users: here they pass through `html.escape` or JSON with every `<` spelt out, and the script only ever
sets text. A content security policy with a nonce stands behind both. The page on a run (`web.page`) is made of the same elements.
"""

from __future__ import annotations

import base64
import html
import json
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from ..core.command_line import LANGUAGES
from ..core.finding import Finding, NannyError
from ..core.plain_json import finite
from .figures import figure_json
from .findings import STYLES, place
from .tables import Line, Table, translate_line, translate_table
from .term import whole_shares
from .translation import translate, translate_figure


@dataclass(frozen=True)
class Section:
    """A heading with what stands under it: lines, code to copy, tables, and a figure by its name in `figures`.

    It can be folded; `folded` says how it opens. Tables are sorted by a click on a column.
    """

    title: str
    lines: Sequence[Line] = ()
    tables: Sequence[Table] = ()
    figure: str = ""
    code: str = ""
    folded: bool = False


def asset(name: str, package: str = "nanny.show") -> str:
    """A file that comes with a package: a script, a style, a template."""
    return resources.files(package).joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def document(
    title: str, sections: Sequence[Section], figures: Mapping[str, Any], lang: str | None = None, nonce: str | None = None
) -> str:
    """A self-contained page of sections. `figures` maps names to Plotly figures; without any, plotly.js is left out."""
    nonce = nonce or secrets.token_urlsafe(16)
    check_language(lang)
    drawn = {name: translate_figure(figure_json(figure), lang) for name, figure in figures.items()}
    title = translate(title, lang)
    script = script_element("\n".join([asset("loader.js"), asset("document.js")]), nonce)
    parts = {
        "lang": lang or "en",
        "policy": policy_element(nonce),
        "title": html.escape(title),
        "style": asset("page.css"),
        "body": f"<h1>{html.escape(title)}</h1>" + "".join(_section(section, lang) for section in sections),
        "scripts": "\n".join([json_element("figures", drawn, nonce), plotly_element() if drawn else "", script]),
    }
    return fill_template(asset("document.html"), parts)


def finding_lines(finding: Finding) -> list[Line]:
    """What, where, and what to do."""
    where = place(finding)
    return [
        Line(f"{finding.severity.name} {finding.code}{f' in {where}' if where else ''}", STYLES[finding.severity]),
        Line(finding.message),
        *([Line(f"fix: {finding.hint}", "strong")] if finding.hint else []),
    ]


def plotly_source() -> str:
    """plotly.js as the Python package carries it; served as `plotly.js` by the live page."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def policy(nonce: str, *, live: bool) -> str:
    """The content security policy: scripts only with the nonce, requests only to the own server. Plotly sets styles inline."""
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action {connect}"
    )


def check_language(lang: str | None) -> str | None:
    if lang is not None and lang not in LANGUAGES:
        raise NannyError(f"no strings in {lang!r}; --lang takes one of: {', '.join(LANGUAGES)}")
    return lang


def json_for_script(value: Any) -> str:
    """JSON that may stand inside a script element: no `<` in it can end the element or start a comment."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def script_element(text: str, nonce: str) -> str:
    return f'<script nonce="{nonce}">{text}</script>'


def policy_element(nonce: str) -> str:
    return f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy(nonce, live=False))}">'


def json_element(name: str, value: Any, nonce: str) -> str:
    return f'<script nonce="{nonce}" type="application/json" id="{name}">{json_for_script(value)}</script>'


@lru_cache(maxsize=1)
def plotly_element() -> str:
    """plotly.js, deflated: 1.9 MB of the page instead of 4.8, and the words are painted before any of it is parsed."""
    return packed_element("plotly", plotly_source())


def packed_element(name: str, text: str) -> str:
    """Text, deflated: no byte of it can be read as markup."""
    packed = base64.b64encode(zlib.compress(text.encode(), 6)).decode("ascii")
    return f'<script type="application/octet-stream" id="{name}">{packed}</script>'


def fill_template(template: str, parts: Mapping[str, str]) -> str:
    """Splits the template at its marks once, so that a mark inside what is filled in stays as it is."""
    out, rest = [], template
    while "{{" in rest:
        head, _, tail = rest.partition("{{")
        name, _, rest = tail.partition("}}")
        out += [head, parts[name]]
    return "".join([*out, rest])


def _section(section: Section, lang: str | None) -> str:
    spoken = [translate_line(line, lang) for line in section.lines if line.text]
    lines = "".join(f'<p class="{_style(line.style)}">{html.escape(whole_shares(line.text.strip()))}</p>' for line in spoken)
    figure = f'<div class="figure" data-figure="{html.escape(section.figure)}"></div>' if section.figure else ""
    code = f'<pre tabindex="0"><code>{html.escape(section.code)}</code></pre>' if section.code else ""
    tables = "".join(_table(translate_table(table, lang)) for table in section.tables)
    title = html.escape(translate(section.title, lang))
    opened = "" if section.folded else " open"
    return f"<section><details{opened}><summary><h2>{title}</h2></summary>{lines}{code}{figure}{tables}</details></section>"


def _table(table: Table) -> str:
    titles = [html.escape(column.title or column.name) for column in table.columns]
    heads = "".join(f'<th scope="col"><button>{title}</button></th>' for title in titles)
    styles = list(table.styles) or [""] * len(table.rows)
    rows = "".join(
        f'<tr class="{_style(style)}">'
        + "".join(f"<td{_sorted_by(value)}>{html.escape(column.show(value))}</td>" for column, value in zip(table.columns, row))
        + "</tr>"
        for row, style in zip(table.shown, styles)
    )
    rest = f'<p class="quiet">… {table.left_out} {html.escape(table.rest)}</p>' if table.left_out else ""
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    return f'<div class="scroll"><table>{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{rest}'


def _sorted_by(value: object) -> str:
    """What a cell is sorted by: a number by its value, however it is shown."""
    if value is None:
        return ' data-value=""'
    return f' class="number" data-value="{float(value)!r}"' if isinstance(value, (int, float)) else ""


def _style(name: str) -> str:
    return name if name in ("error", "warning", "good", "strong", "quiet") else ""
