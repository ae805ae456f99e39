"""The page's figures, built with Plotly. Colours that follow light and dark mode, data and selection are filled in by the script.

A trace's `meta` names the data that belongs into it: a curve of the run (`loss`), of the run it is compared with (`other:loss`),
points that are not finite (`bad:loss`), or findings of one severity (`finding:error`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from ..core.formats import FORMATS, TARGETS, Format
from ..show.figures import BAD, NOTE, OTHER, OWN, SKIPPED, VIRIDIS, WARN, ZERO, figure_json, graph_objects

ROWS = ("loss", "grad_norm", "lr", "scale")
HEIGHTS = {"findings": 0.07, "loss": 0.34, "grad_norm": 0.27, "lr": 0.12, "scale": 0.20}
ON_LOG = ("grad_norm", "scale")

MARKS = {"error": ("x", BAD, 10), "warning": ("triangle-up", WARN, 10), "info": ("circle", NOTE, 6)}

# Levels of a heat map: what was not sampled is left out, zero and non-finite have colours outside of the scale.
LEVEL_ZERO, LEVEL_LOW, LEVEL_HIGH, LEVEL_BAD = 1, 8, 247, 255
LEVELS = {"zero": LEVEL_ZERO, "low": LEVEL_LOW, "high": LEVEL_HIGH, "bad": LEVEL_BAD}


def colour_scale() -> list[tuple[float, str]]:
    """Lavender for zero, viridis for values, red for what is not finite; on levels from 0 to LEVEL_BAD."""
    edges = (0.0, (LEVEL_LOW - 0.5) / LEVEL_BAD, (LEVEL_HIGH + 0.5) / LEVEL_BAD, 1.0)
    span = edges[2] - edges[1]
    values = [(edges[1] + span * i / (len(VIRIDIS) - 1), colour) for i, colour in enumerate(VIRIDIS)]
    return [(edges[0], ZERO), (edges[1], ZERO), *values, (edges[2], BAD), (edges[3], BAD)]


def page_figures(curves: Collection[str], compared: Collection[str] = ()) -> dict[str, Any]:
    """The three figures of a run that has these curves, beside one that has those."""
    return {"curves": figure_json(curve_figure(curves, compared)), "heat": figure_json(heat_figure()),
            "histogram": figure_json(histogram_figure())}  # fmt: skip


def curve_figure(curves: Collection[str], compared: Collection[str] = ()) -> Any:
    """One step axis; findings on top, then each curve that the run has."""
    go, subplots = _plotly()
    rows = [name for name in ROWS if name in curves or name in compared] or ["loss"]
    heights = [HEIGHTS[name] for name in ("findings", *rows)]
    figure = subplots.make_subplots(
        rows=len(rows) + 1, cols=1, shared_xaxes=True, vertical_spacing=0.025, row_heights=[h / sum(heights) for h in heights]
    )
    for severity, (symbol, colour, size) in MARKS.items():
        marker = {"symbol": symbol, "color": colour, "size": size, "line": {"width": 0}}
        figure.add_trace(
            go.Scatter(mode="markers", meta=f"finding:{severity}", name=severity, marker=marker, cliponaxis=False), row=1, col=1
        )
    for row, name in enumerate(rows, start=2):
        if name in compared:
            dash = {"color": OTHER, "width": 1.5, "dash": "dot"}
            figure.add_trace(go.Scatter(mode="lines", meta=f"other:{name}", name=name, line=dash), row=row, col=1)
        shape = "hv" if name in ("scale", "lr") else "linear"
        line = {"color": OWN, "width": 1.6, "shape": shape}
        figure.add_trace(go.Scatter(mode="lines", meta=name, name=name, line=line), row=row, col=1)
        bad = {"symbol": "x", "color": BAD, "size": 6}
        figure.add_trace(go.Scatter(mode="markers", meta=f"bad:{name}", name=name, marker=bad), row=row, col=1)
        if name == "scale" and "skipped" in curves:
            marker = {"symbol": "triangle-down", "color": SKIPPED, "size": 9}
            figure.add_trace(go.Scatter(mode="markers", meta="skipped", name="skipped", marker=marker), row=row, col=1)
        kind = {"type": "log"} if name in ON_LOG else {"type": "linear", "nticks": 5}
        look = {"rangemode": "tozero", "exponentformat": "e"} if name == "lr" else {"exponentformat": "power"}
        figure.update_yaxes(**look, **kind, row=row, col=1)
        figure.add_annotation(
            text=name, name=name, xref="paper", x=0, xanchor="right", xshift=-62, yref=f"y{row} domain", y=0.5, showarrow=False
        )
    figure.update_yaxes(visible=False, range=[-0.6, 2.6], fixedrange=True, row=1, col=1)
    figure.update_yaxes(zeroline=False)
    figure.update_xaxes(zeroline=False, showspikes=True, spikemode="across", spikethickness=1, spikedash="dot")
    figure.update_xaxes(showgrid=False, showline=False, row=1, col=1)
    figure.update_layout(height=90 + int(620 * sum(heights)), showlegend=False, hovermode="x", **_frame())
    return figure


def heat_figure() -> Any:
    """Layers down, steps across; and a cross on what is not finite, for eyes that do not tell red."""
    go, _ = _plotly()
    bar = {"thickness": 14, "len": 1.0, "outlinewidth": 0, "x": 1.005, "xpad": 4}
    heat = go.Heatmap(
        meta="heat", zmin=0, zmax=LEVEL_BAD, zauto=False, colorscale=colour_scale(), colorbar=bar, hoverinfo="none", zsmooth=False
    )
    cross = {"symbol": "x", "color": "#ffffff", "size": 7, "line": {"width": 1.5, "color": BAD}}
    bad = go.Scatter(meta="bad", mode="markers", marker=cross, hoverinfo="skip")
    figure = go.Figure([heat, bad])
    figure.update_layout(height=430, showlegend=False, hovermode="closest", **_frame())
    figure.update_yaxes(zeroline=False, showgrid=False, showspikes=False, ticks="")
    figure.update_xaxes(zeroline=False, showgrid=False, showspikes=False)
    return figure


def histogram_figure() -> Any:
    """Binary orders up, steps across; on the right the distribution at the chosen step."""
    go, subplots = _plotly()
    figure = subplots.make_subplots(rows=1, cols=2, shared_yaxes=True, column_widths=[0.84, 0.16], horizontal_spacing=0.012)
    heat = go.Heatmap(
        meta="heat", zmin=0, zmax=LEVEL_BAD, zauto=False, colorscale=colour_scale(), showscale=False, hoverinfo="none"
    )
    figure.add_trace(heat, row=1, col=1)
    bar = go.Bar(meta="bar", orientation="h", marker={"color": OWN, "line": {"width": 0}}, hoverinfo="none")
    figure.add_trace(bar, row=1, col=2)
    dash = {"color": OTHER, "width": 2, "dash": "dot", "shape": "vhv"}
    figure.add_trace(go.Scatter(meta="other", mode="lines", line=dash, hoverinfo="none"), row=1, col=2)
    figure.update_layout(height=400, showlegend=False, hovermode="closest", bargap=0.05, **_frame())
    figure.update_xaxes(zeroline=False, showgrid=False, showspikes=False)
    figure.update_xaxes(tickformat=".0%", nticks=4, fixedrange=True, row=1, col=2)
    figure.update_yaxes(zeroline=False, showgrid=False, showspikes=False)
    return figure


def format_borders() -> list[dict[str, Any]]:
    """Where formats end, in binary orders: from `top` on values overflow, below `normal` they lose digits, below `flush` all."""
    return [_border(FORMATS[name]) for name in TARGETS]


def _border(form: Format) -> dict[str, Any]:
    return {
        "name": form.name,
        "title": form.name.upper().replace("_", " "),
        "max": form.max,
        "logMax": math.log2(form.max),
        "top": form.max_exponent + 1,
        "normal": form.min_exponent,
        "flush": form.min_exponent - form.significand,
    }


def _frame() -> dict[str, Any]:
    return {
        "template": "none",
        "margin": {"l": 64, "r": 24, "t": 8, "b": 34},
        "font": {"size": 12, "family": "system-ui, sans-serif"},
        "dragmode": "zoom",
        "uirevision": "kept",
    }


def _plotly() -> tuple[Any, Any]:
    graphs = graph_objects()
    from plotly import subplots

    return graphs, subplots
