"""`nanny tensor --format html`: the report on one tensor, with its range drawn against the formats'. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.finding import Severity
from ..core.formats import TARGETS, format_of
from ..core.numbers import short
from ..show.figures import CLAIM, OWN, QUIET, VIRIDIS, frame
from ..show.html import Section, document, finding_lines
from ..show.tables import Line
from .records import Dimension, TensorReport, Tiles
from .text import (
    indices_table,
    loudest_text,
    ranges_table,
    reductions_table,
    resolution_text,
    tile_lines,
    value_lines,
    verdict,
)

BARS = 26  # pixels of a format's bar
HISTOGRAM = 260  # of the histogram above them, and of all around


def render_tensor_page(report: TensorReport, lang: str | None = None) -> str:
    figures: dict[str, Any] = {}
    healthy = (report.worst or Severity.INFO) <= Severity.INFO
    if report.values.absmin is not None:
        figures["range"] = _range_figure(report)
    for d in report.dimensions:
        figures[f"dim{d.dim}"] = _profile(d)
    drawn = "range" if "range" in figures else ""
    sections = [_findings(report), Section("Range", _lines(value_lines(report)), [ranges_table(report, lang)], drawn)]
    sections.append(Section("Resolution", _lines(resolution_text(report))))
    sections += [_dimension(d) for d in report.dimensions]
    if report.tiles is not None:
        figures["tiles"] = _tiles_figure(report.tiles)
        sections.append(Section("Tiles", _lines(tile_lines(report.tiles, report.target)), (), "tiles"))
    if report.reductions:
        advice = _lines([r.advice for r in report.reductions if r.advice])
        sections.append(Section("Reductions, against float64", advice, [reductions_table(report, lang)]))
    if report.notes:
        sections.append(Section("Notes", _lines(report.notes)))
    shape = " x ".join(map(str, report.shape)) or "a single value"
    name = f"{report.name}: " if report.name else ""
    sections[2:] = [replace(section, folded=healthy) for section in sections[2:]]
    return document(f"{name}{report.source} {shape}, {verdict(report.findings, report.target)}", sections, figures, lang)


def _findings(report: TensorReport) -> Section:
    healthy = [] if (report.worst or Severity.INFO) > Severity.INFO else [Line(verdict(report.findings, report.target), "good")]
    return Section("Verdict", [*healthy, *(line for finding in report.findings for line in finding_lines(finding))])


def _lines(texts: Sequence[str]) -> list[Line]:
    return [Line(text) for text in texts]


def _range_figure(report: TensorReport) -> Any:
    """The tensor's magnitudes by binary order; below, each format from its subnormals to its largest."""
    import plotly.graph_objects as go

    names = list(reversed(TARGETS))
    formats = [format_of(name) for name in names]
    figure = go.Figure()
    normal = [math.log2(f.max) - f.min_exponent for f in formats]
    figure.add_bar(y=names, x=normal, base=[f.min_exponent for f in formats], orientation="h", name="full resolution",
                   marker={"color": [OWN if name == report.target else QUIET for name in names]}, hoverinfo="none")  # fmt: skip
    low = [f.min_exponent - f.significand + 1 for f in formats]
    figure.add_bar(y=names, x=[f.min_exponent - at for f, at in zip(formats, low)], base=low, orientation="h", name="subnormal",
                   marker={"color": "rgba(127,127,127,0.25)", "pattern": {"shape": "/"}}, hoverinfo="none")  # fmt: skip
    v = report.values
    assert v.absmin is not None
    orders = {int(order): count for order, count in report.exponents.items() if order.lstrip("-").isdecimal()}
    total = sum(orders.values())
    figure.add_bar(x=[order + 0.5 for order in orders], y=[count / total for count in orders.values()], width=1, yaxis="y2",
                   name="values of the tensor", marker={"color": CLAIM}, hovertemplate="%{y:.2%}<extra></extra>")  # fmt: skip
    for value, label in ((v.absmax, "largest"), (v.low_quantile, "1 % below")):
        if value:
            at = math.log2(value)
            figure.add_shape(type="line", x0=at, x1=at, yref="paper", y0=0, y1=1, line={"color": CLAIM, "width": 2})
            figure.add_annotation(x=at, yref="paper", y=1, yanchor="bottom", text=f"{label} {short(value)}", showarrow=False)
    left = min(
        *(f.min_exponent - f.significand - 1 for f in formats if f.min_exponent > -126), math.floor(math.log2(v.absmin)) - 2
    )
    right = max(20, math.ceil(math.log2(v.absmax)) + 2)
    figure.update_layout(barmode="overlay", **frame(HISTOGRAM + BARS * len(names), top=34, left=80))
    upper = {"domain": [0.6, 1], "tickformat": ".0%", "nticks": 3}
    figure.update_layout(
        yaxis={"domain": [0, 0.56]}, yaxis2=upper, showlegend=True, legend={"orientation": "h", "y": -0.22, "x": 0}
    )
    figure.update_xaxes(range=[left, right], title_text="magnitude (2 to the power of)", zeroline=False)
    return figure


def _dimension(d: Dimension) -> Section:
    table = replace(indices_table(d), title="loudest, and quietest")
    return Section(f"Dimension {d.dim}, {d.size} indices", [Line(f"the {loudest_text(d)}")], [table], f"dim{d.dim}")


def _profile(d: Dimension) -> Any:
    """The rms of up to 64 stretches; a stretch of zeros has no line, and a mark of its own."""
    import plotly.graph_objects as go

    width = d.size / len(d.heat)
    at = [(i + 0.5) * width - 0.5 for i in range(len(d.heat))]
    figure = go.Figure(go.Scatter(
        x=at, y=[h if h > 0 else None for h in d.heat], mode="lines+markers", line={"shape": "hvh", "color": OWN},
        marker={"size": 5}, hovertemplate="around %{x:.0f}: rms %{y:.3g}<extra></extra>",
    ))  # fmt: skip
    silent = [x for x, h in zip(at, d.heat) if h == 0]
    if silent and len(silent) < len(d.heat):
        floor = min(h for h in d.heat if h > 0)
        figure.add_scatter(x=silent, y=[floor] * len(silent), mode="markers", marker={"symbol": "circle-open", "color": QUIET},
                           hovertemplate="around %{x:.0f}: all zero<extra></extra>")  # fmt: skip
    figure.update_layout(**frame(200))
    figure.update_yaxes(type="log", exponentformat="power", title_text="rms", nticks=5)
    figure.update_xaxes(title_text="index", zeroline=False)
    return figure


def _tiles_figure(t: Tiles) -> Any:
    import plotly.graph_objects as go

    levels = [[math.log2(v) if v > 0 else None for v in row] for row in t.heat]
    scale = [(i / (len(VIRIDIS) - 1), colour) for i, colour in enumerate(VIRIDIS)]
    figure = go.Figure(go.Heatmap(z=levels, colorscale=scale, colorbar={"title": {"text": "rms, 2 to the power of"}},
                                  hovertemplate="tile row %{y}, column %{x}: 2**%{z:.1f}<extra></extra>"))  # fmt: skip
    figure.update_layout(**frame(120 + 18 * len(t.heat)))
    figure.update_yaxes(autorange="reversed", title_text="tile row")
    return figure
