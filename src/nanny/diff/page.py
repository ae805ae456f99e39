"""`nanny diff --format html`: how the error grows through the model, and whose it is. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.finding import Severity
from ..core.numbers import shorten
from ..show.figures import BAD, CLAIM, OWN, QUIET, frame
from ..show.html import Section, document, finding_lines
from ..show.tables import Line, Table, report_lines
from .records import MODEL, CallDiff, DiffReport, GradDiff
from .text import (
    advice_text,
    bad_counts,
    calls_table,
    gradient_tables,
    if_comparable,
    lists_of,
    notes_of,
    operations_table,
    result_lines,
    verdict,
)

NAMES_SHOWN = 60  # beside a figure; more would cover each other, and are shown under the pointer
NAME_WIDTH = 44
MOST_CALLS = 400
MOST_GRADIENTS = 200
MOST_OPERATIONS = 60
OWN_AND_INHERITED = "own: what a module adds on exact inputs; inherited: what the error of its inputs became"


def render_diff(report: DiffReport, lang: str | None = None) -> str:
    figures: dict[str, Any] = {}
    calls, operations = calls_table(report, most=MOST_CALLS), operations_table(report, MOST_OPERATIONS)
    sections = [_verdict(report, lang)]
    if report.advice is not None:
        sections.append(Section("Advice", [Line(advice_text(report.advice), "strong")], code=report.advice.code))
    if report.calls:
        owns = [call.own.rel_l2 if call.own else None for call in report.calls]
        figures["calls"] = _errors_figure(report.calls, owns, report.floor)
        _name_culprit(figures["calls"], report)
        sections.append(Section("Error through the model", [Line(OWN_AND_INHERITED, "quiet")], (), "calls"))
        sections.append(_of_table(calls))
    if report.gradients:
        figures["gradients"] = _errors_figure(report.gradients)
        tables = [table for table in gradient_tables(report, MOST_GRADIENTS) if table.rows]
        sections.append(Section("Gradients of parameters", (), tables, "gradients"))
    sections += [Section(title, [Line(line) for line in lines]) for title, lines in lists_of(report)]
    sections += [_of_table(operations)] if operations.rows else []
    if notes := notes_of(report):
        sections.append(Section("Notes", [Line(note) for note in notes]))
    healthy = (report.worst or Severity.INFO) <= Severity.INFO
    # of a healthy model the curve of the error is enough; what stands under it is opened by who wants it
    rest = [replace(section, folded=healthy and section.figure != "calls") for section in sections[1:]]
    return document(f"{report.model}: {verdict(report)}", [sections[0], *rest], figures, lang)


def _of_table(table: Table) -> Section:
    return Section(table.title, (), [replace(table, title="")])


def _verdict(report: DiffReport, lang: str | None) -> Section:
    lines = [line for finding in report.findings for line in finding_lines(finding)]
    if (report.worst or Severity.INFO) == Severity.INFO:
        lines.insert(0, Line(verdict(report), "good"))
    if report.failure is not None:
        failure = report.failure
        lines.append(Line(f"raised in the {failure.precision} run, in {failure.site}: {failure.message}", "error"))
    return Section("Verdict", [*lines, *report_lines(result_lines(report), lang)])


def _errors_figure(found: Sequence[CallDiff | GradDiff], owns: Sequence[float | None] = (), floor: float = 0.0) -> Any:
    from plotly.graph_objects import Figure

    names = [one.name for one in found]
    figure = Figure()
    _add_line(figure, names, [one.error.rel_l2 for one in found], "error", OWN, "lines+markers")
    if owns:
        _add_line(figure, names, owns, "own", CLAIM, "markers")
    _add_spoiled(figure, found)
    if floor > 0:
        figure.add_scatter(x=[-0.5, len(found) - 0.5], y=[floor] * 2, mode="lines", line={"color": QUIET, "dash": "dash"},
                           name="what rounding explains at this depth", hoverinfo="skip")  # fmt: skip
    shows_names = len(names) <= NAMES_SHOWN
    figure.update_layout(**frame(470 if shows_names else 320, top=30))
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.12, "x": 0})
    if shows_names:
        labels = [_plain(shorten(name, NAME_WIDTH)) for name in names]
        figure.update_xaxes(tickvals=list(range(len(names))), ticktext=labels, tickangle=-55, automargin=True)
    figure.update_xaxes(zeroline=False)
    figure.update_layout(yaxis={"type": "log", "exponentformat": "power", "title": {"text": "relative error"}, "nticks": 7})
    return figure


def _add_line(figure: Any, names: Sequence[str], values: Sequence[float | None], name: str, colour: str, mode: str) -> None:
    """On a logarithmic axis; an exact zero and what is not finite have no place on it."""
    shown = [value if value is not None and 0 < value < math.inf else None for value in values]
    symbol = "circle" if name == "error" else "diamond"
    figure.add_scatter(x=list(range(len(names))), y=shown, mode=mode, name=name, line={"color": colour},
                       marker={"color": colour, "symbol": symbol, "size": 7}, customdata=[[_plain(n)] for n in names],
                       hovertemplate=f"%{{customdata[0]}}<br>{name} %{{y:.3g}}<extra></extra>")  # fmt: skip


def _add_spoiled(figure: Any, found: Sequence[CallDiff | GradDiff]) -> None:
    """NaN and infinities that the reference does not have: crosses at the upper edge."""
    at = [i for i, item in enumerate(found) if item.error.spoiled]
    if at:
        texts = [[_plain(f"{found[i].name}: {bad_counts(found[i]) or 'not finite'}")] for i in at]
        figure.add_scatter(x=at, y=[1.0] * len(at), yaxis="y2", mode="markers", name="not finite", customdata=texts,
                           marker={"symbol": "x", "color": BAD, "size": 10},
                           hovertemplate="%{customdata[0]}<extra></extra>")  # fmt: skip
        figure.update_layout(yaxis2={"overlaying": "y", "range": [0, 1.03], "visible": False, "fixedrange": True})


def _name_culprit(figure: Any, report: DiffReport) -> None:
    """The first call that a finding blames: an arrow with its name."""
    blamed = next((f.site for f in report.findings if f.severity >= Severity.WARNING), None)
    at = next((i for i, call in enumerate(report.calls) if blamed in (call.name, call.site or MODEL)), None)
    if at is None:
        return
    call = report.calls[at]
    error = if_comparable(call, call.error.rel_l2) or (call.own.rel_l2 if call.own else None)
    at_top = call.error.spoiled or not error or error == math.inf
    place = {"yref": "paper", "y": 0.95, "ay": 30} if at_top else {"y": math.log10(error or 1), "ay": -30}
    figure.add_annotation(x=at, text=_plain(f"◆ {shorten(call.name, NAME_WIDTH)}"), showarrow=True, arrowhead=2, ax=0,
                          font={"color": BAD, "size": 13}, arrowcolor=BAD, **place)  # fmt: skip


def _plain(text: str) -> str:
    """Plotly reads a little HTML in its texts; a layer's name is none."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
