"""Tables and answers of the query commands as text, markdown, csv and JSON.

A command returns one `Answer`; `render_answer(answer, "markdown", ...)` turns it into any of the four formats.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.numbers import short, shorten
from ..core.plain_json import to_text
from ..core.terminal import visible
from .term import DEFAULT_WIDTH, columns_of, paint, wrap
from .translation import translate

FORMATS = ("text", "json", "csv", "markdown")
NARROWEST = 16, 8  # columns of an elastic cell, before and after others are left out


def plain(value: Any) -> str:
    """How a value looks in a cell when its column says nothing else."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return short(value) if value is None or isinstance(value, (int, float)) else str(value)


@dataclass(frozen=True)
class Column:
    name: str  # in csv
    title: str = ""  # in text and markdown, if another
    show: Callable[[Any], str] = plain
    elastic: bool = False  # shortened in the middle where the line is too long
    says: bool = False  # holds words, not names: these have a Chinese


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    most: int | None = None  # rows shown in text and markdown; csv has all
    rest: str = "rows"  # what the rows beyond are called when they are counted
    styles: Sequence[str] = ()  # of each row, for the terminal
    more: str = "… and {0} more {1}"
    narrow: str = "… too narrow for: {0} (--format csv shows all)"

    @property
    def shown(self) -> Sequence[Sequence[Any]]:
        return self.rows if self.most is None else self.rows[: self.most]

    @property
    def left_out(self) -> int:
        return len(self.rows) - len(self.shown)


@dataclass(frozen=True)
class Line:
    text: str
    style: str = ""
    indent: int = 0  # of the lines it is wrapped into
    whole: bool = False  # source code, or said in the reader's language: never wrapped, nor translated


@dataclass(frozen=True)
class Answer:
    """What a command found out. Text and markdown show `lines`, `tables` and the commands to type next; JSON shows `data`."""

    lines: Sequence[Line] = ()
    tables: Sequence[Table] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    next: Sequence[str] = ()
    flat: Table | None = None  # what csv shows; the first table if there is no better one
    exit_code: int = 0


def render_answer(answer: Answer, form: str, width: int = DEFAULT_WIDTH, colour: bool = False, lang: str = "en") -> str:
    """Text and markdown in the reader's language; JSON and csv are for programs."""
    if form == "json":
        return to_text(answer.data) if answer.data else ""
    if form == "csv":
        table = answer.flat or (answer.tables[0] if answer.tables else None)
        return csv_text(table) if table else ""
    if lang != "en":
        answer = _translate(answer, lang)
    if form == "markdown":
        return _markdown(answer)
    return _text(answer, width, colour, lang)


def _translate(answer: Answer, lang: str) -> Answer:
    lines = [translate_line(line, lang) for line in answer.lines]
    return replace(answer, lines=lines, tables=[translate_table(table, lang) for table in answer.tables])


_LABEL = re.compile(" *[^:：`]+(: |：)")


def translate_line(line: Line, lang: str | None) -> Line:
    if line.whole or lang != "zh":
        return line
    text, label = translate(line.text, lang), _LABEL.match(line.text)
    heading = _LABEL.match(text) if label is not None and label.end() == line.indent else None  # what hangs behind a label
    return replace(line, text=text, indent=line.indent if heading is None else columns_of(heading[0]))


def translate_table(table: Table, lang: str | None) -> Table:
    columns = tuple(_translate_column(column, lang) for column in table.columns)
    rest, more, narrow = (translate(text, lang) for text in (table.rest, table.more, table.narrow))
    return replace(table, columns=columns, title=translate(table.title, lang), rest=rest, more=more, narrow=narrow)


def _translate_column(column: Column, lang: str | None) -> Column:
    show = (lambda value: translate(column.show(value), lang)) if column.says else column.show
    return replace(column, title=translate(column.title or column.name, lang), show=show)


def csv_text(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows([["" if value is None else value for value in row] for row in table.rows])
    return out.getvalue().rstrip("\n")


def table_text(table: Table, width: int = DEFAULT_WIDTH, colour: bool = False) -> str:
    """Columns side by side within `width`: elastic ones give way first, then the last ones are left out, and named."""
    cells = [_heads(table), *_cells(table)]
    widths = [max(columns_of(row[i]) for row in cells) for i in range(len(table.columns))]
    elastic = [column.elastic for column in table.columns]
    kept = list(range(len(widths)))
    for narrowest in NARROWEST:
        _squeeze(widths, kept, elastic, width, narrowest)
        if narrowest == NARROWEST[0]:
            while len(kept) > 2 and _total(widths, kept) > width:
                kept.remove(next((i for i in reversed(kept) if not elastic[i]), kept[-1]))
    right = [_is_number_column(table, i) for i in range(len(table.columns))]
    styles = ["strong", *table.styles]
    lines = []
    for number, row in enumerate(cells):
        parts = [_pad(shorten(row[i], widths[i]), widths[i], right[i]) for i in kept]
        lines.append(paint("  ".join(parts).rstrip(), styles[number] if number < len(styles) else "", colour))
    missing = ", ".join(cells[0][i] for i in range(len(widths)) if i not in kept)
    narrow = wrap(table.narrow.format(missing), width, 2) if missing else []
    rest = [line for text in _rest(table) for line in wrap(text, width, 2)]
    return "\n".join([*([table.title] if table.title else []), *lines, *rest, *narrow])


def _pad(cell: str, width: int, right: bool) -> str:
    space = " " * max(width - columns_of(cell), 0)
    return space + cell if right else cell + space


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[i] for i in kept) + 2 * (len(kept) - 1)


def _squeeze(widths: list[int], kept: Sequence[int], elastic: Sequence[bool], width: int, narrowest: int) -> None:
    """Takes what is too much from the widest elastic column, one character at a time."""
    too_much = _total(widths, kept) - width
    while too_much > 0:
        giving = [i for i in kept if elastic[i] and widths[i] > narrowest]
        if not giving:
            return
        widths[max(giving, key=lambda i: widths[i])] -= 1
        too_much -= 1


def _heads(table: Table) -> list[str]:
    return [visible(column.title or column.name) for column in table.columns]


def _cells(table: Table) -> list[list[str]]:
    return [[visible(column.show(value)) for column, value in zip(table.columns, row)] for row in table.shown]


def _is_number_column(table: Table, index: int) -> bool:
    values = [row[index] for row in table.rows if row[index] is not None]
    return bool(values) and all(isinstance(value, (int, float)) for value in values)


def _rest(table: Table) -> list[str]:
    return [table.more.format(table.left_out, table.rest)] if table.left_out else []


def _text(answer: Answer, width: int, colour: bool, lang: str) -> str:
    parts = []
    if answer.lines:
        parts.append(lines_text(answer.lines, width, colour))
    parts += [table_text(table, width, colour) for table in answer.tables if table.rows]
    if answer.next:
        name = "next:" if lang == "en" else "接下来："
        head, space = paint(name, "quiet", colour), " " * columns_of(name)
        parts.append("\n".join(f"{space if i else head} {command}" for i, command in enumerate(answer.next)))
    return "\n\n".join(parts)


def report_line(text: str, width: int, lang: str = "en") -> list[str]:
    """`label     what is said` in the reader's language: the label keeps its columns, and what is wrapped stands behind it."""
    label = re.match(r" *(?:- |\S+(?: \S+)? {2,})?", text)[0]  # type: ignore[index]
    name = translate(label.strip(), lang)
    head = " " * (len(label) - len(label.lstrip())) + name
    head += " " * max(len(label) - columns_of(head), 1 if name else 0)
    return wrap(head + translate(text[len(label) :], lang), width, len(label) or 2)


def titled_lines(title: str, texts: Sequence[str], width: int, lang: str = "en") -> str:
    """A heading with the lines of a report under it; nothing without any."""
    lines = [line for text in texts for line in report_line(f"  {text}", width, lang)]
    return "\n".join([translate(title, lang), *lines]) if lines else ""


def report_lines(texts: Sequence[str], lang: str | None) -> list[Line]:
    """The same for a page, which has no columns: nothing is wrapped, and nothing is translated again."""
    return [Line(report_line(text, len(text) * 4, lang or "en")[0], whole=True) for text in texts]


def lines_text(lines: Sequence[Line], width: int, colour: bool = False) -> str:
    return "\n".join(_wrap(line, width, colour) for line in lines)


def _wrap(line: Line, width: int, colour: bool) -> str:
    text = visible(line.text.replace("\n", " "))
    parts = [text] if line.whole or columns_of(text) <= width else wrap(text, width, line.indent)
    return "\n".join(paint(part, line.style, colour) for part in parts)


def _markdown(answer: Answer) -> str:
    parts = []
    if answer.lines:
        parts.append("  \n".join(_escape(visible(line.text.strip())) for line in answer.lines if line.text.strip()))
    for table in answer.tables:
        if table.rows:
            parts.append("\n".join([*([f"### {table.title}", ""] if table.title else []), *_markdown_table(table)]))
    return "\n\n".join(parts)


def _markdown_table(table: Table) -> list[str]:
    marks = ["---:" if _is_number_column(table, i) else "---" for i in range(len(table.columns))]
    rows = [[_escape(head) for head in _heads(table)], marks]
    rows += [[_escape(cell) for cell in row] for row in _cells(table)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [*lines, "", *_rest(table)] if table.left_out else lines


def _escape(text: str) -> str:
    """Layer names hold underscores and stars; pipes would split a cell."""
    for char in "\\|*_<`":
        text = text.replace(char, f"\\{char}")
    return text
