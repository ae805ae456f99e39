"""The page's figures as plotly.js reads them; built by hand, for Plotly's own classes take half a second to say the same. Colours
that follow light and dark mode, data and selection are filled in by the script.

A trace's `meta` names the data that belongs into it: a curve of the run (`loss`), of the run it is compared with (`other:loss`),
points that are not finite (`bad:loss`), or findings of one severity (`finding:error`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from ..core.formats import FORMATS, TARGETS, Format
from ..show.figures import BAD, NOTE, OTHER, OWN, SKIPPED, VIRIDIS, WARN, ZERO

ROWS = ("loss", "grad_norm", "lr", "scale")
HEIGHTS = {"findings": 0.07, "loss": 0.34, "grad_norm": 0.27, "lr": 0.12, "scale": 0.20}
SPACE = 0.025  # between two rows
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
    return {"curves": curve_figure(curves, compared), "heat": heat_figure(), "histogram": histogram_figure()}


def curve_figure(curves: Collection[str], compared: Collection[str] = ()) -> dict[str, Any]:
    """One step axis; findings on top, then each curve that the run has."""
    rows = [name for name in ROWS if name in curves or name in compared] or ["loss"]
    heights = [HEIGHTS[name] for name in ("findings", *rows)]
    spikes = {"zeroline": False, "showspikes": True, "spikemode": "across", "spikethickness": 1, "spikedash": "dot"}
    unit, top = (1 - SPACE * len(rows)) / sum(heights), 1.0
    layout: dict[str, Any] = {"annotations": [], "height": 90 + int(620 * sum(heights)), "hovermode": "x", **_frame()}
    for row, height in enumerate(heights, start=1):
        number = row if row > 1 else ""
        shared = {} if row == len(heights) else {"matches": f"x{len(heights)}", "showticklabels": False}
        layout[f"xaxis{number}"] = {"anchor": f"y{number}", "domain": [0.0, 1.0], **shared, **spikes}
        bottom = max(top - unit * height, 0.0)
        layout[f"yaxis{number}"] = {"anchor": f"x{number}", "domain": [bottom, top], "zeroline": False}
        top = bottom - SPACE
    layout["xaxis"] |= {"showgrid": False, "showline": False}
    layout["yaxis"] |= {"visible": False, "range": [-0.6, 2.6], "fixedrange": True}
    data: list[dict[str, Any]] = []
    for severity, (symbol, colour, size) in MARKS.items():
        marker = {"symbol": symbol, "color": colour, "size": size, "line": {"width": 0}}
        data.append({**_trace(f"finding:{severity}", severity, ""), "mode": "markers", "marker": marker, "cliponaxis": False})
    for row, name in enumerate(rows, start=2):
        if name in compared:
            data.append({**_trace(f"other:{name}", name, row), "line": {"color": OTHER, "width": 1.5, "dash": "dot"}})
        shape = "hv" if name in ("scale", "lr") else "linear"
        data.append({**_trace(name, name, row), "line": {"color": OWN, "width": 1.6, "shape": shape}})
        bad = {"symbol": "x", "color": BAD, "size": 6}
        data.append({**_trace(f"bad:{name}", name, row), "mode": "markers", "marker": bad})
        if name == "scale" and "skipped" in curves:
            marker = {"symbol": "triangle-down", "color": SKIPPED, "size": 9}
            data.append({**_trace("skipped", "skipped", row), "mode": "markers", "marker": marker})
        kind = {"type": "log"} if name in ON_LOG else {"type": "linear", "nticks": 5}
        look = {"rangemode": "tozero", "exponentformat": "e"} if name == "lr" else {"exponentformat": "power"}
        layout[f"yaxis{row}"] |= {**look, **kind}
        place = {"xref": "paper", "x": 0, "xanchor": "right", "xshift": -62, "yref": f"y{row} domain", "y": 0.5}
        layout["annotations"].append({"text": name, "name": name, "showarrow": False, **place})
    return {"data": data, "layout": layout}


def _trace(meta: str, name: str, row: int | str) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "meta": meta, "name": name, "xaxis": f"x{row}", "yaxis": f"y{row}"}


def heat_figure() -> dict[str, Any]:
    """Layers down, steps across; and a cross on what is not finite, for eyes that do not tell red."""
    bar = {"thickness": 14, "len": 1.0, "outlinewidth": 0, "x": 1.005, "xpad": 4}
    scale = {"zmin": 0, "zmax": LEVEL_BAD, "zauto": False, "colorscale": colour_scale(), "colorbar": bar, "zsmooth": False}
    cross = {"symbol": "x", "color": "#ffffff", "size": 7, "line": {"width": 1.5, "color": BAD}}
    data = [
        {"type": "heatmap", "meta": "heat", "hoverinfo": "none", **scale},
        {"type": "scatter", "meta": "bad", "mode": "markers", "marker": cross, "hoverinfo": "skip"},
    ]
    return {
        "data": data,
        "layout": {"height": 430, "hovermode": "closest", "xaxis": BARE, "yaxis": {**BARE, "ticks": ""}, **_frame()},
    }


def histogram_figure() -> dict[str, Any]:
    """Binary orders up, steps across; on the right the distribution at the chosen step. The script draws both over these traces,
    which are there for the mouse alone: a picture and a path can change without their axes."""
    data = [
        {"type": "heatmap", "meta": "heat", "opacity": 0, "showscale": False, "hoverinfo": "none"},
        {"type": "bar", "meta": "bar", "orientation": "h", "opacity": 0, "hoverinfo": "none", "xaxis": "x2", "yaxis": "y2"},
    ]
    hidden = {"showticklabels": False, **BARE}
    beside = {
        "xaxis2": {"anchor": "y2", "fixedrange": True, "range": [0, 1.05], "tickvals": [], **hidden},
        "yaxis2": {"anchor": "x2", "matches": "y", **hidden},
    }
    sides = {"xaxis": BARE, "yaxis": BARE, **beside}
    return {"data": data, "layout": {"height": 400, "hovermode": "closest", "bargap": 0.05, **sides, **_frame()}}


BARE = {"zeroline": False, "showgrid": False, "showspikes": False}


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
        "showlegend": False,
        "margin": {"l": 64, "r": 24, "t": 8, "b": 34},
        "font": {"size": 12, "family": "system-ui, sans-serif"},
        "dragmode": "zoom",
        "uirevision": "kept",
    }
