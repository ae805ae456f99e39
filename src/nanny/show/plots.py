"""Pictures of a run for papers and chat, with matplotlib: `nanny plot`. Readable in grey; computes nothing.

Every distinction is made by shape or brightness as well as by colour: not finite is the darkest thing in a picture, what was
not sampled is hatched, zero is pale.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.finding import Finding, NannyError, Severity
from ..core.formats import TARGETS, format_of
from ..core.numbers import amount, power_of_two, short, shorten
from ..core.terminal import visible

try:
    import matplotlib
    from matplotlib import font_manager
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
except ImportError as error:
    raise NannyError("pictures need the package matplotlib; install it with pip install 'precision-nanny[plot]'") from error

INK = "#1a1a1a"
BLUE = "#0072b2"
RED = "#b00020"  # dark: in grey it is nearly black
AMBER = "#9a6700"
PALE = "#e9e4d8"  # zero
LABELS = 36  # names of layers beside a heat map
NAME_WIDTH = 40
CLOSE_DECADES, FEW_DECADES = 0.5, 3.0
CJK_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Source Han Sans SC", "PingFang SC", "Microsoft YaHei")

Curve = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Marks:
    """What is drawn into every picture: where something was found, the culprit of the verdict, and the first error or warning."""

    title: str
    findings: Sequence[Finding] = ()
    culprit: Finding | None = None
    first: Finding | None = None


@dataclass(frozen=True)
class Grid:
    """Layers (rows) by steps (columns of equal width), the worst of each cell."""

    names: Sequence[str]  # of each row
    span: tuple[float, float]  # first and last step
    values: np.ndarray  # NaN where `state` is not VALUE
    state: np.ndarray  # VALUE, NON_FINITE, ZERO or NOT_SAMPLED
    label: str
    unit: str


VALUE, NON_FINITE, ZERO, NOT_SAMPLED = range(4)


@dataclass(frozen=True)
class ExponentHistory:
    """The binary orders of magnitude of one site's values, over steps."""

    name: str
    span: tuple[float, float]
    lowest: int  # exponent of the first row
    shares: np.ndarray  # log2 of the share of the values, [exponents, columns]; -inf for none, NaN for not sampled
    zeros: np.ndarray  # steps at which at least half of the values were zero
    nonfinite: np.ndarray  # steps with NaN or infinity


def loss_figure(curve: Curve, marks: Marks) -> Figure:
    figure, (axes,) = _figure(marks, "loss", 1)
    _draw_curve(axes, curve, "loss")
    _draw_marks(axes, marks)
    _finish(axes)
    return figure


def grad_figure(norm: Curve, marks: Marks, clip: Curve | None = None, lr: Curve | None = None) -> Figure:
    """The norm of the whole gradient before clipping, on a logarithmic axis, and the learning rate if it moves."""
    figure, (axes, *below) = _figure(marks, "gradient norm", 1 if lr is None else 2)
    _draw_curve(axes, norm, "gradient norm (unscaled)", log=True)
    if clip is not None:
        axes.plot(*clip, color=AMBER, linestyle="--", linewidth=1.2, label="clipped to")
    _draw_marks(axes, marks)
    if lr is not None and below:
        _draw_curve(below[0], lr, "learning rate")
    _finish(axes, *below)
    return figure


def scale_figure(scale: Curve, marks: Marks, skipped: np.ndarray) -> Figure:
    """The loss scale in powers of two, and the steps that GradScaler skipped."""
    figure, (axes,) = _figure(marks, "loss scale", 1)
    steps, values = scale
    axes.step(steps, np.where(values > 0, values, np.nan), where="post", color=INK, linewidth=1.4, label="loss scale")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_two(value)))
    axes.set_ylabel("loss scale")
    if len(skipped):
        _rug(axes, skipped, 0.04, "|", BLUE, f"skipped step ({len(skipped)})", size=11)
    _draw_marks(axes, marks)
    _finish(axes)
    return figure


def heat_figure(grid: Grid, marks: Marks) -> Figure:
    """Layers down, steps across."""
    rows = len(grid.names)
    figure = _sheet(marks, grid.label, height=min(max(3.2, 1.8 + 0.17 * min(rows, LABELS)), 12.0))
    axes = figure.subplots()
    extent = (*grid.span, rows, 0)
    shown = grid.values[grid.state == VALUE]
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0)
    # Only the bright part of viridis: the dark end belongs to what is not finite.
    colours = LinearSegmentedColormap.from_list("bright", matplotlib.colormaps["viridis"](np.linspace(0.3, 1.0, 64)))
    values = np.ma.masked_where(grid.state != VALUE, grid.values)
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "extent": extent}
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=high if high > low else low + 1.0, **look)
    for state, colour in ((ZERO, PALE), (NON_FINITE, RED)):
        axes.imshow(np.ma.masked_where(grid.state != state, np.ones(grid.state.shape)), cmap=ListedColormap([colour]), **look)
    _hatch_what_is_missing(axes)
    _label_rows(axes, grid.names)
    _label_steps(axes)
    if shown.size:
        figure.colorbar(image, ax=axes, label=grid.unit, fraction=0.03, pad=0.01)
    _draw_culprit(axes, marks.culprit)
    looks = {
        NON_FINITE: Patch(facecolor=RED, label="NaN or infinity"),
        ZERO: Patch(facecolor=PALE, edgecolor="#999999", label="zero"),
        NOT_SAMPLED: Patch(facecolor="white", hatch="////", edgecolor="#c8c8c8", label="not sampled"),
    }
    seen = [patch for key, patch in looks.items() if (grid.state == key).any()]
    if seen:
        figure.legend(handles=seen, loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    return figure


def histogram_figure(history: ExponentHistory, marks: Marks) -> Figure:
    """Exponents up, steps across, with the borders of the formats drawn in."""
    figure = _sheet(marks, f"sizes of the values, {_short(history.name)}", height=5.2)
    axes = figure.subplots()
    count = len(history.shares)
    image = axes.imshow(
        np.ma.masked_where(~np.isfinite(history.shares), history.shares), cmap="Greys", vmin=-14, vmax=0, origin="lower",
        aspect="auto", interpolation="nearest", extent=(*history.span, history.lowest, history.lowest + count),
    )  # fmt: skip
    figure.colorbar(image, ax=axes, label="share of the values (2 to the power of)", fraction=0.03, pad=0.01)
    bottom, top = float(min(history.lowest - 3, -27)), float(max(history.lowest + count + 3, 19))
    axes.set_ylim(bottom, top)
    _draw_borders(axes, bottom, top)
    axes.set_ylabel("magnitude (2 to the power of)")
    _label_steps(axes)
    if len(history.nonfinite):
        _rug(axes, history.nonfinite, 0.985, "x", RED, "NaN or infinity")
    if len(history.zeros):
        _rug(axes, history.zeros, 0.015, "_", BLUE, "at least half of the values are zero")
    _draw_culprit(axes, marks.culprit)
    _legend(axes)
    return figure


def save(figure: Figure, path: Path, dpi: int) -> None:
    try:
        figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise NannyError(f"cannot write {path}: {error.strerror or error}; name another folder with -o DIR") from error


def settings() -> AbstractContextManager[Any]:
    """While it is open, a `$` in a layer's name is no formula, and Chinese names have a font if there is one."""
    known = set(font_manager.get_font_names())
    families = ["DejaVu Sans", *(name for name in CJK_FONTS if name in known)]
    return matplotlib.rc_context({
        "text.parse_math": False, "font.family": families, "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "nanny",
        "hatch.linewidth": 0.6, "axes.unicode_minus": False,
    })  # fmt: skip


def _figure(marks: Marks, what: str, panels: int) -> tuple[Figure, list[Any]]:
    figure = _sheet(marks, what, height=3.6 + 1.4 * (panels - 1))
    grid = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=[3.0, *[1.0] * (panels - 1)])
    grid[-1, 0].set_xlabel("step")
    return figure, list(grid[:, 0])


def _sheet(marks: Marks, what: str, height: float) -> Figure:
    figure = Figure(figsize=(9.0, height), layout="constrained", facecolor="white")
    figure.suptitle(f"{what}\n{visible(shorten(marks.title, 130))}", fontsize=9, x=0.01, ha="left", color="#444444")
    return figure


def _draw_curve(axes: Any, curve: Curve, label: str, log: bool = False) -> None:
    steps, values = curve
    usable = np.isfinite(values) & ((values > 0) | (not log))
    marker = "o" if usable.sum() <= 2 else None  # a line of one point cannot be seen
    axes.plot(steps, np.where(usable, values, np.nan), color=INK, linewidth=1.2, marker=marker, markersize=4, label=label)
    lone = usable & ~np.roll(usable, 1) & ~np.roll(usable, -1)
    if marker is None and lone.any():
        axes.plot(steps[lone], values[lone], color=INK, linestyle="", marker=".", markersize=4)
    if log and usable.any():
        axes.set_yscale("log")
        _label_decades(axes, float(np.log10(values[usable].max() / values[usable].min())))
    axes.set_ylabel(label)
    bad = ~np.isfinite(values)
    if bad.any():
        _rug(axes, steps[bad], 0.96, "x", RED, f"NaN or infinity ({amount(int(bad.sum()), 'step')})")
    zero = (values == 0) & log
    if zero.any():
        _rug(axes, steps[zero], 0.02, "_", BLUE, f"zero ({amount(int(zero.sum()), 'step')})")


def _label_decades(axes: Any, decades: float) -> None:
    """Plain numbers, more of them where the curve spans few decades."""
    plain = FuncFormatter(lambda value, _: short(value))
    axes.yaxis.set_major_formatter(plain)
    if decades < CLOSE_DECADES:
        axes.yaxis.set_minor_formatter(plain)
    elif decades < FEW_DECADES:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_marks(axes: Any, marks: Marks) -> None:
    for severity, marker, colour, fill in ((Severity.WARNING, "^", AMBER, "none"), (Severity.ERROR, "^", RED, RED)):
        steps = sorted({f.step for f in marks.findings if f.severity == severity and f.step is not None})
        if steps:
            label = f"{severity.name.lower()} ({amount(len(steps), 'step')})"
            _rug(axes, np.array(steps), -0.02, marker, colour, label, 7, fill)
    _draw_culprit(axes, marks.culprit)


def _draw_culprit(axes: Any, culprit: Finding | None) -> None:
    if culprit is None or culprit.step is None:
        return
    axes.axvline(culprit.step, color="white", linewidth=2.2, zorder=3.9)
    axes.axvline(culprit.step, color=INK, linestyle=(0, (4, 2)), linewidth=1.1, zorder=4)
    place = f" in {_short(culprit.site)}" if culprit.site else ""
    axes.set_title(f"{culprit.code} at step {culprit.step}{place} (dashed)", fontsize=9, loc="left", color=RED)


def _draw_borders(axes: Any, bottom: float, top: float) -> None:
    """Solid: the largest finite value; dotted: the smallest subnormal. bf16 and fp32 share their top."""
    styles = dict(zip(TARGETS, (BLUE, INK, AMBER, "#7a4fa3")))
    for at, group in itertools.groupby(sorted(_borders(), key=lambda b: (b[0], b[1])), key=lambda border: border[:2]):
        names = [name for *_, name in group]
        exponent, is_top = at
        if not bottom < exponent < top:
            continue
        axes.axhline(exponent, color=styles[names[0]], linewidth=1.1, linestyle="-" if is_top else ":")
        text = f"{' and '.join(names)} {'overflow above' if is_top else 'become 0 below'}"
        axes.annotate(text, (0.005, exponent), xycoords=("axes fraction", "data"), fontsize=7.5, color=styles[names[0]],
                      va="bottom" if is_top else "top", xytext=(0, 1 if is_top else -1), textcoords="offset points",
                      bbox={"facecolor": "white", "alpha": 0.9, "linewidth": 0, "pad": 0.8})  # fmt: skip


def _borders() -> list[tuple[int, bool, str]]:
    out = []
    for name in TARGETS:
        form = format_of(name)
        out += [(form.max_exponent + 1, True, name), (form.min_exponent - form.significand, False, name)]
    return out


def _rug(
    axes: Any, steps: np.ndarray, height: float, marker: str, colour: str, label: str, size: int = 6, fill: str = ""
) -> None:
    """Marks at a fixed height of the picture, whatever the values are."""
    axes.plot(steps, np.full(len(steps), height), transform=axes.get_xaxis_transform(), linestyle="", marker=marker, color=colour,
              markersize=size, markerfacecolor=fill or colour, label=label, clip_on=False, zorder=5)  # fmt: skip


def _label_rows(axes: Any, names: Sequence[str]) -> None:
    every = -(-len(names) // LABELS)
    rows = range(0, len(names), every)
    axes.yaxis.set_major_locator(FixedLocator([row + 0.5 for row in rows]))
    axes.set_yticklabels([_short(names[row]) for row in rows], fontsize=7)
    if every > 1:
        axes.set_ylabel(f"every {every}th of {len(names)} rows is named", fontsize=8)


def _label_steps(axes: Any) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10], integer=True))


def _hatch_what_is_missing(axes: Any) -> None:
    """The background shows through where nothing was sampled."""
    axes.patch.set(facecolor="white", hatch="////", edgecolor="#c8c8c8")


def _finish(*panels: Any) -> None:
    for axes in panels:
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10], integer=True))
    _legend(panels[0])


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1 or (handles and "NaN" in labels[0]):
        axes.legend(fontsize=8, frameon=True, framealpha=0.85, loc="best")


def _short(name: str) -> str:
    return visible(shorten(name, NAME_WIDTH))
