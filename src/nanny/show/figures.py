"""What figures on a page have in common: colours and layout."""

from __future__ import annotations

import json
from typing import Any

# Colour-blind-safe (Okabe and Ito); shapes differ too.
BAD = "#d0021b"
WARN = "#e69f00"
NOTE = "#8a8f98"
OWN = "#0072b2"
OTHER = "#cc79a7"
SKIPPED = "#d55e00"
ZERO = "#b48cf2"  # as far from viridis for colour-blind eyes as for others; greys are not
QUIET = "#9aa4af"
CLAIM = "#cc79a7"
VIRIDIS = ("#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725")


def frame(height: int, top: int = 10, left: int = 64) -> dict[str, Any]:
    """The layout that all figures share; colours come from the page."""
    return {
        "height": height, "template": "none", "margin": {"l": left, "r": 24, "t": top, "b": 44}, "showlegend": False,
        "font": {"size": 12, "family": "system-ui, sans-serif"},
    }  # fmt: skip


def figure_json(figure: Any) -> dict[str, Any]:
    """A Plotly figure as plain data; arrays as base64 typed arrays, which plotly.js reads."""
    return dict(json.loads(figure.to_json()))
