"""What a notebook shows of a result: the words of the terminal, in its colours, with the picture of a run above them."""

from __future__ import annotations

import html
import re
from dataclasses import asdict
from pkgutil import resolve_name
from typing import Any, ClassVar

from ..core.finding import Finding, Severity
from ..core.plain_json import finite

_STYLES = {
    "31;1": "color:#c8451b;font-weight:600",
    "33": "color:#b8860b",
    "32": "color:#1f7a4d",
    "2": "opacity:.7",
    "1": "font-weight:600",
}
_COLOURED = re.compile("\x1b\\[([0-9;]+)m(.*?)\x1b\\[0m", re.DOTALL)


def cell(text: str, picture: str = "") -> str:
    """`text` as `show.term.painted` has coloured it; `picture` is an SVG."""
    parts = _COLOURED.split(text)
    words = html.escape(parts[0])
    for code, inside, after in zip(parts[1::3], parts[2::3], parts[3::3]):
        words += f'<span style="{_STYLES.get(code, "")}">{html.escape(inside)}</span>{html.escape(after)}'
    return f'<div class="nanny">{picture}<pre style="white-space:pre-wrap">{words}</pre></div>'


class Shown:
    """A record that a notebook shows as the terminal does. Records come first: what renders them is only named here."""

    looks: ClassVar[str]  # "module:function", in the `text.py` of the room

    def render(self, colour: bool = False) -> str:
        text: str = resolve_name(self.looks)(self, colour=colour)
        return text

    def _repr_html_(self) -> str:
        return cell(self.render(colour=True))


class ShownReport(Shown):
    """A frozen dataclass that ends with findings."""

    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Severity | None:
        return max((f.severity for f in self.findings), default=None)

    def __str__(self) -> str:
        return self.render()

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; non-finite numbers as the strings "NaN", "Infinity", "-Infinity"."""
        plain: dict[str, Any] = finite(asdict(self) | {"findings": [f.to_json() for f in self.findings]})  # type: ignore[call-overload]
        return plain
