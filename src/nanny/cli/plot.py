"""`nanny plot`: pictures of a run for papers and chat, PNG or SVG, readable in grey.

For instance:

    nanny plot -o pictures
    nanny plot --what heat,hist --layer encoder.3 --quantity headroom --format svg
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..core.command_line import add_format, add_place, add_run, command_parser, made_folder, positive
from ..core.finding import NannyError
from ..core.formats import FP16
from ..core.terminal import complain, say
from ..diagnose.verdict import finding_of
from ..runs.alerts import findings_of, job_verdict, sort_by_step
from ..runs.histograms import histograms_of, layer_histogram
from ..runs.layer import chosen_name
from ..runs.matrices import ABSENT, Columns, KindMatrices, Matrix, error_matrix, matrices_of
from ..runs.opening import open_run
from ..runs.source import Source, title_of
from ..show import plots
from ..store import reader

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = ("loss", "grad", "scale", "heat", "hist")
POWER = "2 to the power of"
QUANTITIES = {
    "absmax": "largest magnitude",
    "headroom": "room below the end of FP16",
    "flushed": "share that FP16 flushes to zero",
    "norm": "norm",
    "lost": "share of updates lost",
    "error": "error against FP32",
}
KINDS = {
    "output": "outputs",
    "output_grad": "gradients of outputs",
    "grad": "gradients",
    "weight": "weights",
    "update": "updates",
}
MOST_ROWS = 400
FEWEST_DOTS, MOST_DOTS = 20, 1200  # per inch; letters of less have no shape, and a larger picture does not fit into memory
COLUMNS = 600  # fewer than the pixels of the picture, so that none is dropped
MARK = 3  # of them, that a sample fills at least: what nobody looked at stays empty


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    names = _picture_names(args.what)
    with plots.settings(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name without a font is boxes in a good picture
        with open_run(args.db, args.run) as source:
            found = sort_by_step(findings_of(source))
            verdict = job_verdict([source], found)
            marks = plots.Marks(title_of(source), found, finding_of(verdict) or verdict.first, verdict.first)
            figures = {name: DRAW[name](source, marks, args) for name in names}
        if all(isinstance(figure, str) for figure in figures.values()):
            reasons = "; ".join(f"{name}: {figure}" for name, figure in figures.items())
            raise NannyError(f"{title_of(source)} has nothing to draw ({reasons}); `nanny summary` tells what is on record")
        folder = made_folder(args.out)  # from here on, for a store that cannot be read to the end leaves nothing behind
        for name, figure in figures.items():
            if isinstance(figure, str):
                complain(f"no picture of {name}: {figure}")
                continue
            path = folder / f"{name}.{args.format}"
            plots.save(figure, path, args.dpi)
            say(str(path))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("plot", "Pictures of a recorded run, PNG or SVG, readable in grey.")
    add_run(parser)
    add_place(parser, ".", "DIR", "where to write (default: here)")
    parser.add_argument("--what", default=",".join(PICTURES), metavar="LIST", help=f"of {','.join(PICTURES)} (default: all)")
    add_format(parser, ("png", "svg"))
    parser.add_argument(
        "--dpi", type=_dots, default=150, metavar="N", help=f"dots per inch, {FEWEST_DOTS} to {MOST_DOTS} (default: 150)"
    )
    parser.add_argument("--kind", choices=tuple(KINDS), help="heat and hist: of what (default: output, or the first on record)")
    parser.add_argument("--quantity", choices=tuple(QUANTITIES), default="absmax", help="heat: which number (default: absmax)")
    parser.add_argument("--layer", metavar="NAME", help="hist: whose (default: the first culprit, else the closest to overflow)")
    return parser


def _picture_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PICTURES]
    if unknown or not names:
        raise NannyError(f"--what {text!r}: name some of {', '.join(PICTURES)}, separated by commas")
    return list(dict.fromkeys(names))


def _dots(text: str) -> int:
    number = positive(text)
    if not FEWEST_DOTS <= number <= MOST_DOTS:
        raise argparse.ArgumentTypeError(
            f"{text} dots per inch: from {FEWEST_DOTS} up to {MOST_DOTS} will do, 300 is enough for print"
        )
    return number


# Each returns the figure, or the reason why there is none.


def _loss(source: Source, marks: plots.Marks, args: argparse.Namespace) -> Figure | str:
    curves = reader.scalars(source.db, source.run.id, ["loss"])
    return plots.loss_figure(curves["loss"], marks) if curves else "the run has no loss on record"


def _grad(source: Source, marks: plots.Marks, args: argparse.Namespace) -> Figure | str:
    curves = reader.scalars(source.db, source.run.id, ["grad_norm", "clip", "lr"])
    if "grad_norm" not in curves:
        return "the run has no gradient norm on record"
    lr = curves.get("lr")
    moves = lr is not None and len(np.unique(lr[1])) > 1
    return plots.grad_figure(curves["grad_norm"], marks, curves.get("clip"), lr if moves else None)


def _scale(source: Source, marks: plots.Marks, args: argparse.Namespace) -> Figure | str:
    curves = reader.scalars(source.db, source.run.id, ["scale", "skipped"])
    if "scale" not in curves:
        return "the run had no GradScaler"
    steps, skipped = curves.get("skipped", (np.empty(0), np.empty(0)))
    return plots.scale_figure(curves["scale"], marks, steps[skipped > 0])


def _heat(source: Source, marks: plots.Marks, args: argparse.Namespace) -> Figure | str:
    of_kind = matrices_of(source)
    kind = args.kind or ("grad" if args.quantity == "error" else next((kind for kind in KINDS if kind in of_kind), ""))
    if kind not in of_kind:
        return f"no {kind or 'layer'} was sampled"
    matrix = _matrix(source, kind, of_kind[kind], "absmax" if args.quantity == "headroom" else args.quantity)
    if matrix is None:
        return f"{args.quantity} was not recorded of {kind}"
    names = [site.name for site in of_kind[kind].sites]
    return plots.heat_figure(_grid(names, matrix.keys, _drawn(matrix.columns), args.quantity, kind), marks)


def _matrix(source: Source, kind: str, found: KindMatrices, quantity: str) -> Matrix | None:
    """A quantity of a kind; what was taken at fewer steps than the rest of its kind has columns of its own."""
    if quantity == "flushed":
        histograms = histograms_of(source).get(kind)
        return None if histograms is None else histograms.flushed["flushed"]
    if quantity == "error":
        return error_matrix(source, [site.name for site in found.sites]) if kind == "grad" else None
    return found.quantities.get(quantity)


def _hist(source: Source, marks: plots.Marks, args: argparse.Namespace) -> Figure | str:
    for kind, name in _subjects(source, marks, args):
        found = layer_histogram(source, kind, name)
        if found is not None:
            break
    else:
        return "the run has no histograms"
    drawn_over = _drawn(found.columns)
    counts = found.counts[0].T.astype(np.float64)  # rows: zeros, exponents, not finite
    shares = counts / np.maximum(counts.sum(0), 1)
    drawn = on_pixels(shares[1:-1], drawn_over, fill=-1.0)
    with np.errstate(divide="ignore"):
        levels = np.where(drawn < 0, np.nan, np.log2(np.maximum(drawn, 0.0)))
    firsts = drawn_over[:, 0] + 0.5
    seen = (firsts[shares[0] >= 0.5], firsts[shares[-1] > 0])
    history = plots.ExponentHistory(f"{kind} of {name}", _span(drawn_over), found.lowest, levels, *seen)
    return plots.histogram_figure(history, marks)


DRAW: dict[str, Callable[[Source, plots.Marks, argparse.Namespace], Figure | str]] = {
    "loss": _loss, "grad": _grad, "scale": _scale, "heat": _heat, "hist": _hist,
}  # fmt: skip


def _subjects(source: Source, marks: plots.Marks, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Whose histogram to draw: what was asked for, else the culprit, else the site closest to the end of FP16."""
    there = set(reader.kinds(source.db, source.run.id))
    kinds = [kind for kind in ((args.kind,) if args.kind else KINDS) if kind in there]
    sites = {kind: [site.name for site in source.sites(kind)] for kind in kinds}
    if args.layer:
        holding = next((kind for kind in kinds if any(args.layer in name for name in sites[kind])), "")
        name = chosen_name(args.layer, sites[holding] if holding else [name for names in sites.values() for name in names])
        yield from ((kind, name) for kind in kinds if name in sites[kind])
        return
    for finding in (marks.culprit, marks.first):  # of an optimizer or a batch there is no histogram
        if finding is not None:
            yield from ((kind, finding.site) for kind in kinds if finding.site in sites[kind])
    for kind, found in matrices_of(source).items():
        if kind in kinds and "absmax" in found.quantities:
            yield kind, found.sites[int(found.quantities["absmax"].keys.max(axis=1).argmax())].name


def _grid(names: Sequence[str], keys: np.ndarray, drawn_over: np.ndarray, quantity: str, kind: str) -> plots.Grid:
    names, keys = _fewer_rows(names, keys)
    pixels = on_pixels(keys, drawn_over, fill=ABSENT)
    state = np.full(pixels.shape, plots.VALUE)
    state[pixels == 0] = plots.ZERO
    state[pixels < 0] = plots.NOT_SAMPLED
    state[pixels >= np.finfo(np.float32).max] = plots.NON_FINITE
    values, unit = np.log2(np.where(state == plots.VALUE, pixels, 1.0)), POWER
    if quantity == "headroom":
        values, unit = np.log2(FP16.max) - values, "bits"
    elif quantity in ("flushed", "lost"):
        values, unit = 100 * np.exp2(np.minimum(values, 0.0)), "%"
    label = f"{QUANTITIES[quantity]}, {KINDS[kind]}"
    return plots.Grid(names, _span(drawn_over), np.where(state == plots.VALUE, values, np.nan), state, label, unit)


def _fewer_rows(names: Sequence[str], keys: np.ndarray) -> tuple[list[str], np.ndarray]:
    """At most MOST_ROWS; neighbours share a row, and the worst of them is seen."""
    size = -(-len(names) // MOST_ROWS)
    if size == 1:
        return list(names), keys
    starts = np.arange(0, len(names), size)
    return [names[i] for i in starts.tolist()], np.maximum.reduceat(keys, starts, axis=0)


def _drawn(columns: Columns) -> np.ndarray:
    return columns.drawn(least=MARK * float(columns.steps[-1] - columns.steps[0] + 1) / COLUMNS)


def on_pixels(values: np.ndarray, drawn_over: np.ndarray, fill: float) -> np.ndarray:
    """Columns that are drawn over some steps each, as columns of equal width; the largest wins, `fill` where none is."""
    low, high = _span(drawn_over)
    width = COLUMNS / (high - low)
    out = np.full((len(values), COLUMNS), fill, values.dtype)
    for column, (start, end) in zip(values.T, (drawn_over - low) * width):
        a = min(int(start + 0.5), COLUMNS - 1)
        b = max(int(end + 0.5), a + 1)
        np.maximum(out[:, a:b], column[:, None], out=out[:, a:b])
    return out


def _span(drawn_over: np.ndarray) -> tuple[float, float]:
    return float(drawn_over[0, 0]), float(drawn_over[-1, 1])
