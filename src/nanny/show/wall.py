"""The picture of a run as SVG, 1200 x 630: for `nanny card`, the head of the page and a notebook; made by hand, needs nothing.

What it shows is `runs.wall.Wall`: values by binary order over the steps, the end of the format as a wall, what FP32 has behind
it, the source line, the change. Colours are told apart by the colour-blind, and marks do not rest on colour alone.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from ..core.numbers import number, short
from ..core.terminal import visible
from .term import wrap
from .translation import words_of

if TYPE_CHECKING:
    from ..runs.wall import Wall

Side = Literal["start", "middle", "end"]
WIDTH, HEIGHT = 1200, 630
LEFT, RIGHT, TOP, BOTTOM = 76, 800, 132, 436  # of the plot
PANEL, EDGE = 846, 1168
LEVELS = 6  # of darkness
ROOM = 3  # binary orders above and below what is drawn
MOST_ORDERS = 60
MOST_TICKS = 6  # numbers under the axis, about
ALL_ZERO_ORDERS = 14  # above the floor, where there is nothing but zeros to draw
TITLE = 18  # the smallest it is written
WIDEST = 0.02  # of the axis, for one column of samples
LETTER = 0.58  # of its size, how wide one is
_STYLE = """
.paper{fill:#fff}.ink{fill:#1a2230}.soft{fill:#5b6675}.grid{stroke:#dfe4ea}.cell{fill:#2c6fbb}.code{fill:#f3f5f8}
.wall{stroke:#c8451b;stroke-width:3}.hot{fill:#c8451b}.ghost{fill:none;stroke:#c8451b;stroke-width:1.6}.ran{fill:#2c6fbb}
.band{fill:#c8451b;opacity:.10}.bad{fill:#c8451b;opacity:.25}.good{fill:#1f7a4d}.fall{stroke:#5b6675;stroke-dasharray:5 4}
text{font-family:system-ui,'Segoe UI','Noto Sans CJK SC','PingFang SC','DejaVu Sans',sans-serif}
.halo{paint-order:stroke;stroke:#fff;stroke-width:5px}
.mono{font-family:'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}
@media (prefers-color-scheme:dark){
.paper{fill:#191d23}.ink{fill:#e8ecf1}.soft{fill:#a3adba}.grid{stroke:#2c333d}.code{fill:#20262f}
.cell,.ran{fill:#6aa8e8}.hot{fill:#ff8a5c}.wall,.ghost{stroke:#ff8a5c}.good{fill:#5cc796}.halo{stroke:#191d23}}
@media (max-width:500px){.ink,.soft,.hot{font-size:21px}.key{display:none}}
"""


def wall_svg(
    wall: Wall,
    *,
    word: str,
    good: bool,
    title: str,
    subtitle: str,
    source: str = "",
    seen: str = "",
    change: str = "",
    chain: Sequence[str] = (),
    footer: str = "",
    lang: str = "en",
) -> str:
    """`word` is the verdict's, `title` and `subtitle` say what and where."""
    words = words_of("wall", lang)
    word = words_of("verdict", lang).get(word, word)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        f"<title>{_safe(f'{word}: {title}. {subtitle}')}</title><style>{_STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
        *_head(word, good, title, subtitle),
        *_plot(wall, words),
        *_panel(wall, words, seen, change, chain),
        *_source(source),
        _text(LEFT - 40, HEIGHT - 20, footer, "soft", 15),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def _head(word: str, good: bool, title: str, subtitle: str) -> Iterator[str]:
    width = 30 + _width(word, 22)
    yield f'<rect class="{"good" if good else "hot"}" x="36" y="28" width="{width:.0f}" height="32" rx="16"/>'
    middle = f'x="{36 + width / 2:.0f}" y="50" font-size="18" font-weight="700" text-anchor="middle" fill="#fff"'
    yield f"<text {middle}>{_safe(word)}</text>"
    room = 1112 - width
    size = min(24, int(room / _width(title, 1.04)))
    lines = [title] if size >= TITLE else _wrap(title, room, 1.04 * TITLE)
    for i, line in enumerate([*lines[:1], " ".join(lines[1:])]):  # smaller where it is long, then in two lines
        y = 53 if len(lines) == 1 else 41 + 24 * i
        yield _text(52 + width, y, _fit(line, room, 1.04 * max(size, TITLE)), "ink", max(size, TITLE), bold=True)
    small = max(13, min(17, int(1128 / max(_width(subtitle, 1.04), 1))))
    yield _text(36, 90, _fit(subtitle, 1128, 1.04 * small), "soft", small)


class _Axes:
    def __init__(self, wall: Wall) -> None:
        steps = [*(edge for pair in wall.reach for edge in pair), *(step for step, _ in wall.marks)]
        first, last = (min(steps), max(steps)) if steps else (wall.steps or (0, 1))
        if wall.steps is not None:
            last = wall.steps[1] + 1
        if wall.impact is not None:  # what led there matters, and a little of what came of it
            last = min(last, wall.impact + max(0.3 * (wall.impact - first), 6) + 0.5)
            first, last = min(first, wall.impact - 1), max(last, wall.impact + 1)
        elif wall.forecast is not None and last < wall.forecast <= last + (last - first):
            last = wall.forecast + 1
        self.first, self.last = first, max(last, first + 1)
        self.low, self.high = _orders(wall)

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * (min(max(step, self.first), self.last) - self.first) / (self.last - self.first)

    def y(self, order: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (min(max(order, self.low), self.high) - self.low) / (self.high - self.low)

    def holds(self, order: float) -> bool:
        return self.low <= order <= self.high


def _orders(wall: Wall) -> tuple[int, int]:
    """Binary orders from the lowest to the highest that are drawn."""
    seen = [wall.lowest + i for column in wall.counts for i, count in enumerate(column) if count]
    seen += [int(order) for found in (wall.ran, wall.fp32) for order in found if order.lstrip("-").isdecimal()]
    seen += [math.floor(math.log2(size)) for _, size in wall.marks]
    top, bottom = (max(seen) + 1, min(seen)) if seen else (16, -10)
    if not any(map(any, wall.counts)) and any(wall.zeros) and wall.limits:  # what matters is where the format begins
        floor = math.floor(math.log2(wall.limits[0].floor))
        return min([floor, *seen]) - 2 * ROOM, max([floor, *seen]) + ALL_ZERO_ORDERS
    ceilings = [math.log2(limit.ceiling) for limit in wall.limits] or [math.log2(wall.largest)]
    if min(ceilings) - top < 24:
        top = max(top, math.ceil(max(c for c in ceilings if c - top < 24)))
    return max(bottom - ROOM, top + ROOM - MOST_ORDERS), top + ROOM


def _plot(wall: Wall, words: Mapping[str, str]) -> Iterator[str]:
    axes = _Axes(wall)
    of_op = words["results"].format(op=wall.op) if wall.ran or wall.fp32 else words["empty"]
    title = f"{words[wall.kind]} {wall.site}" if wall.kind else of_op
    left, legend = _legend(wall, words, axes)
    yield _text(LEFT, TOP - 12, _fit(title, left - LEFT, 16), "ink", 16)
    yield from legend
    yield from _grid(axes, words)
    if wall.impact is not None:  # below the words that it may cross
        x = axes.x(wall.impact)
        yield f'<line class="fall" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}"/>'
    yield from _cells(wall, axes, words)
    yield from _limits(wall, axes, words)
    yield from _marks(wall, axes, words)
    yield from _impact(wall, axes, words)
    yield from _forecast(wall, axes, words)


def _forecast(wall: Wall, axes: _Axes, words: Mapping[str, str]) -> Iterator[str]:
    """From the highest order that was seen last, straight to the wall."""
    if wall.impact is not None or wall.forecast is None or not wall.counts or not wall.limits or wall.steps is None:
        return
    seen = [i for i, count in enumerate(wall.counts[-1]) if count]
    ceiling = math.log2(wall.limits[-1].ceiling)
    if not seen or not axes.first < wall.forecast <= axes.last or not axes.holds(ceiling):
        return
    x, y = axes.x(wall.reach[-1][0] + 0.5), axes.y(wall.lowest + seen[-1] + 1)  # where it was taken: it may reach far
    yield f'<line class="wall fall" x1="{x:.1f}" y1="{y:.1f}" x2="{axes.x(wall.forecast):.1f}" y2="{axes.y(ceiling):.1f}"/>'
    label = words["forecast"].format(steps=max(wall.forecast - wall.steps[1], 1))
    yield _text(RIGHT - 8, axes.y(ceiling) - 8, label, "hot", 16, bold=True, anchor="end")


def _legend(wall: Wall, words: Mapping[str, str], axes: _Axes) -> tuple[float, list[str]]:
    """From the right, and how far to the left it reaches."""
    x, parts = float(RIGHT), []
    shown = [("ghost", "wide"), ("ran", "ran")] if wall.fp32 else []
    shown += [("bad", "lost")] if any(axes.first <= step <= axes.last for step in wall.lost) else []
    for style, key in shown:
        label = words[key].format(op=wall.op)
        x -= _width(label, 14) + 30
        parts.append(f'<rect class="{style} key" x="{x:.1f}" y="{TOP - 23}" width="12" height="12"/>')
        parts.append(_text(x + 18, TOP - 12, label, "soft key", 14))
    return x - 12, parts


def _grid(axes: _Axes, words: Mapping[str, str]) -> Iterator[str]:
    every = max(4, 4 * math.ceil((axes.high - axes.low) / 40))
    for order in range(-(-axes.low // every) * every, axes.high + 1, every):
        y = axes.y(order)
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        label = f'2<tspan dy="-6" font-size="11">{order}</tspan>'
        yield f'<text class="soft" x="{LEFT - 10}" y="{y + 5:.1f}" font-size="14" text-anchor="end">{label}</text>'
    for step in _ticks(axes.first, axes.last):
        if axes.x(step) > RIGHT - 50:
            continue  # the name of the axis stands there
        yield _text(axes.x(step), BOTTOM + 20, f"{step:,}", "soft", 14, anchor="middle")
    yield _text(RIGHT, BOTTOM + 20, words["steps"], "soft", 14, anchor="end")


def _ticks(first: float, last: float) -> list[int]:
    span = max(last - first, 1)
    size = 10 ** math.floor(math.log10(max(span / MOST_TICKS, 1)))
    every = next((size * k for k in (1, 2, 5, 10) if span / (size * k) <= MOST_TICKS), size * 10)
    begin = math.ceil(max(first, 0) / every) * every
    return [step for step in range(int(begin), int(last) + 1, int(every)) if step <= last - 0.04 * span]


def _cells(wall: Wall, axes: _Axes, words: Mapping[str, str]) -> Iterator[str]:
    shapes: dict[int, list[str]] = {}
    bad: list[str] = []
    for (start, end), column, nonfinite in zip(wall.reach, wall.counts, wall.nonfinite):
        if start > axes.last:
            continue
        # drawn where it was taken, half a step behind its start: the stretch to the next sample was not looked at
        left, width = axes.x(start), max(min(axes.x(end) - axes.x(start), WIDEST * (RIGHT - LEFT)), 2)
        left = max(left, axes.x(start + 0.5) - width / 2)
        right = min(left + width, RIGHT)
        most = max(column, default=0)
        for index, count in enumerate(column):
            order = wall.lowest + index
            if count and axes.low <= order < axes.high:
                level = max(1, round(LEVELS * math.sqrt(count / most)))
                shapes.setdefault(level, []).append(_box(left, axes.y(order + 1), right, axes.y(order)))
        if nonfinite:
            bad.append(_box(left, TOP, right, BOTTOM))
    bad += [
        _box(axes.x(first - 0.5), TOP, axes.x(last + 0.5), BOTTOM) for first, last in _stretches(wall.lost) if first <= axes.last
    ]
    for level, boxes in sorted(shapes.items()):
        yield f'<path class="cell" opacity="{level / LEVELS:.2f}" d="{"".join(boxes)}"/>'
    if bad:
        yield f'<path class="bad" d="{"".join(bad)}"/>'
    if not shapes and not bad and any(wall.zeros):
        yield _text((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2, words["zero"], "ink halo", 18, bold=True, anchor="middle")


def _stretches(steps: Iterable[int]) -> Iterator[tuple[int, int]]:
    """From where to where steps follow one another."""
    for _, run in groupby(enumerate(steps), lambda pair: pair[1] - pair[0]):
        found = [step for _, step in run]
        yield found[0], found[-1]


def _box(left: float, top: float, right: float, bottom: float) -> str:
    return f"M{left:.1f} {top:.1f}H{right:.1f}V{bottom:.1f}H{left:.1f}Z"


def _limits(wall: Wall, axes: _Axes, words: Mapping[str, str]) -> Iterator[str]:
    if not wall.limits:
        return
    scaled = len({limit.ceiling for limit in wall.limits}) > 1 or wall.limits[0].ceiling != wall.largest
    shown = [limit for limit in wall.limits if limit.step <= axes.last]
    last = (shown or wall.limits)[-1]
    if axes.holds(math.log2(last.ceiling)):
        points = list(_stairs(((limit.step, math.log2(limit.ceiling)) for limit in shown), axes))
        yield f'<path class="wall" fill="none" d="M{"L".join(points)}"/>'
        top = f"{LEFT} {TOP}L{'L'.join(points)}L{RIGHT} {TOP}"
        yield f'<path class="band" d="M{top}Z"/>'
        label = words["ends_scaled" if scaled else "ends"].format(format=wall.format, value=number(last.ceiling))
        early = wall.impact is not None and axes.x(wall.impact) <= (LEFT + RIGHT) / 2  # what FP32 has is written there
        side: Side = "end" if early else "start"
        x = RIGHT - 8 if early else LEFT + 8
        yield _text(x, axes.y(math.log2(last.ceiling)) - 8, label, "hot", 15, bold=True, anchor=side)
    else:
        bits = math.log2(last.ceiling) - axes.high
        label = words["far"].format(format=wall.format, value=number(last.ceiling), bits=f"{bits:.0f}")
        yield _text(LEFT + 8, TOP + 16, label, "soft halo", 15)
    if axes.holds(math.log2(last.floor)):
        y = axes.y(math.log2(last.floor))
        yield f'<line class="wall" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        label = words["moves" if wall.marks and wall.kind == "weight" else "begins"].format(
            format=wall.format, value=short(last.floor)
        )
        yield _text(LEFT + 8, y + 17, label, "hot", 15, bold=True)


def _marks(wall: Wall, axes: _Axes, words: Mapping[str, str]) -> Iterator[str]:
    """Diamonds: how far each step should have moved the weights, or what FP32 has where gradients are 0."""
    shown = [(step, size, axes.x(step), axes.y(math.log2(size))) for step, size in wall.marks if step <= axes.last]
    marks = "".join(f"M{x - 6:.1f} {y:.1f}L{x:.1f} {y - 6:.1f}L{x + 6:.1f} {y:.1f}L{x:.1f} {y + 6:.1f}Z" for *_, x, y in shown)
    if shown:
        _, size, x, y = next((mark for mark in shown if mark[0] == wall.impact), shown[-1])  # the verdict's own number
        yield f'<path class="ghost" d="{marks}"/>'
        label = words["update" if wall.kind == "weight" else "gradient"].format(value=short(size))
        side: Side = "end" if x > (LEFT + RIGHT) / 2 else "start"
        yield _text(x + (-12 if side == "end" else 12), y - 10, label, "hot", 17, bold=True, anchor=side)


def _stairs(points: Iterable[tuple[int, float]], axes: _Axes) -> Iterator[str]:
    x, y = float(LEFT), None
    for step, order in points:
        if y is not None:
            x = axes.x(step)
            yield f"{x:.1f} {y:.1f}"
        y = axes.y(order)
        yield f"{x:.1f} {y:.1f}"
    if y is not None:
        yield f"{RIGHT} {y:.1f}"


def _impact(wall: Wall, axes: _Axes, words: Mapping[str, str]) -> Iterator[str]:
    if wall.impact is None:
        return
    x = axes.x(wall.impact)
    right = x > (LEFT + RIGHT) / 2
    side: Side = "end" if right else "start"
    floor = axes.y(math.log2(wall.limits[0].floor)) if wall.limits else BOTTOM
    foot = floor - 8 if BOTTOM - 30 < floor < BOTTOM else BOTTOM - 8  # the line of the floor would strike it out
    yield _text(x + (-6 if right else 6), foot, words["impact"].format(step=wall.impact), "ink", 15, bold=True, anchor=side)
    most = max([count for found in (wall.ran, wall.fp32) for order, count in found.items() if order[-1].isdecimal()], default=1)
    direction, room = (-1, min(x - LEFT, 130)) if right else (1, min(RIGHT - x, 130))
    lost = {order: count for order, count in wall.fp32.items() if abs(count - wall.ran.get(order, 0)) > count / 10}
    for found, style in ((wall.ran, "ran"), (lost, "ghost")):
        boxes = []
        for order, count in found.items():
            if order[-1].isdecimal() and axes.low <= int(order) < axes.high:
                length = max(room * math.sqrt(count / most), 6)
                edge = x + direction * length
                boxes.append(_box(min(x, edge), axes.y(int(order) + 1) + 1, max(x, edge), axes.y(int(order)) - 1))
        if boxes:
            yield f'<path class="{style}" d="{"".join(boxes)}"/>'
    if wall.expected is not None and 0 < wall.expected < math.inf and axes.holds(math.log2(wall.expected)):
        y = axes.y(math.log2(wall.expected))
        yield f'<circle class="hot" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        label = words["fp32"].format(value=number(wall.expected))
        yield _text(x + (-12 if right else 12), y - 6, label, "hot", 17, bold=True, anchor=side)


def _panel(wall: Wall, words: Mapping[str, str], seen: str, change: str, chain: Sequence[str]) -> Iterator[str]:
    y = TOP
    asked = ((words["seen"], seen), (words["change"], change), (words["how"], " → ".join(chain)))
    for heading, text in (*(pair for pair in asked if pair[1]), *outlook(wall, words)):
        yield _text(PANEL, y, heading, "ink", 18, bold=True)
        for line in _wrap(text, EDGE - PANEL, 16)[:9]:
            y += 23
            yield _text(PANEL, y, line, "ink", 16)
        y += 40


def outlook(wall: Wall, words: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What lies ahead, each with its heading: the step at which it would be there, or the clearance."""
    if wall.forecast is not None and wall.steps is not None and wall.forecast > wall.steps[1]:
        yield words["impact"].format(step=wall.forecast), words["forecast"].format(steps=wall.forecast - wall.steps[1])
    near = wall.clearance
    if near is not None:
        moves = near.drift or 0.0
        way = "unknown" if near.drift is None else "still" if abs(moves) < 0.1 else "drift" if moves > 0 else "back"
        closest = words["closest"].format(
            site=wall.site, value=number(near.value), step=near.step, bits=f"{near.bits:.1f}", format=wall.format
        )
        space = "" if closest.endswith("。") else " "
        yield words["clearance"], f"{closest}{space}{words[way].format(bits=f'{abs(moves):.1f}')}"


def _source(source: str) -> Iterator[str]:
    if not source:
        return
    line, _, carets = source.partition("\n")
    most = 92
    cut = max(0, carets.find("^") - 20) if len(line) > most else 0
    yield f'<rect class="code" x="36" y="486" width="{WIDTH - 72}" height="76" rx="8"/>'
    yield _text(56, 516, line[cut : cut + most], "ink mono", 20)
    yield _text(56, 540, carets[cut : cut + most], "hot mono", 20, bold=True)


def _text(x: float, y: float, text: str, style: str, size: int, *, bold: bool = False, anchor: Side = "start") -> str:
    if not text.strip():
        return ""
    weight = ' font-weight="700"' if bold else ""
    at = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" font-size="{size}"{weight}{at} xml:space="preserve">{_safe(text)}</text>'
    )


def _safe(text: str) -> str:
    return escape(visible(text))


def _width(text: str, size: float) -> float:
    """Roughly: fonts differ, so a little wide."""
    return sum(1.0 if c in "mwMW%" or unicodedata.east_asian_width(c) in "WF" else LETTER for c in text) * size


def _fit(text: str, width: float, size: float) -> str:
    if _width(text, size) <= width:
        return text
    while text and _width(text + "…", size) > width:
        text = text[:-1]
    return text + "…"


def _wrap(text: str, width: float, size: float) -> list[str]:
    return wrap(text, int(width / (LETTER * size)))
