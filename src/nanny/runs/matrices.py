"""Layer x step matrices of a run: largest magnitude, norm, share of lost updates, error beside FP32.

2000 steps on 900 pixels lose a NaN of one step if neighbours are averaged, and a long run would not fit into a page. So samples
are grouped into a bounded number of columns, and of each group every layer keeps its worst value and the step at which it stood.
Sampling is uneven (dense around errors, thin later), and groups have an equal number of samples: where more was looked at, more
is seen.

Values are kept as keys whose maximum is the worst: not measured < zero < finite < infinite < NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.step import Site
from ..core.terminal import progress
from ..store import reader
from .source import Source
from .stats import KINDS, kinds_of, stats_of

MOST_COLUMNS = 1000
CELLS = 900_000  # of all matrices of a page together
FEWEST_COLUMNS = 150
CELLS_AT_ONCE = 2_000_000  # read from the store in one piece: bounds memory
DRAWN = tuple(kind for kind in KINDS if kind != "buffer")

Statistics = Mapping[str, np.ndarray]  # name -> [samples, sites]
ABSENT = np.float32(-1.0)
NOTHING_BUT_ROUNDING = 1e-12  # of the energy of all gradients, in FP32: one that is 0 (a bias before a softmax), and no error


@dataclass(frozen=True)
class Columns:
    """The columns of a matrix: the steps that were looked at, and which of them belong to each column."""

    steps: np.ndarray
    bounds: np.ndarray  # first sample of each column, and the end
    bad: np.ndarray = field(default_factory=lambda: np.zeros(0))  # steps whose loss was not finite

    @property
    def reach(self) -> np.ndarray:
        """float64 [columns, 2]: from where to where on the step axis each column may be drawn.

        A column begins at its own first step, so that no damage shows before it was seen, and goes on to the next one at most, or
        to the next lost loss.
        """
        if not len(self.steps):
            return np.zeros((0, 2))
        first, last = self.steps[self.bounds[:-1]].astype(float), self.steps[self.bounds[1:] - 1].astype(float)
        following = np.append(first[1:], last[-1] + np.diff(first, prepend=first[0] - 1)[-1])
        next_lost = np.append(self.bad, np.inf)[np.searchsorted(self.bad, last, side="right")]
        return np.stack([first, np.minimum(following, next_lost)], axis=1) - 0.5

    def drawn(self, least: float) -> np.ndarray:
        """float64 [columns, 2]: the steps of each column itself, `least` of them where it may reach so far: nobody looked beyond.

        `cellsOf` in web/assets/arrays.js is the same for the browser, whose pixels are not known here.
        """
        start, end = self.reach.T
        own = self.steps[self.bounds[1:] - 1] + 0.5
        return np.stack([start, np.minimum(end, np.maximum(own, start + least))], axis=1)


@dataclass(frozen=True)
class Matrix:
    """One quantity of all sites of a kind."""

    columns: Columns
    keys: np.ndarray  # float32 [sites, columns], see `order_keys`
    at: np.ndarray | None = None  # which sample of its column each key stood at; None: columns are single samples


@dataclass(frozen=True)
class KindMatrices:
    sites: list[Site]
    columns: Columns
    quantities: dict[str, Matrix]


def _largest(columns: Statistics, bare: np.ndarray) -> np.ndarray:
    """Largest magnitude. Where only the minimum is infinite and the layer has no weights it is a mask, and no overflow."""
    low, high = columns["min"], columns["max"]
    largest, endless = np.maximum(-low, high), np.isneginf(low)
    if endless.any():
        largest = np.where(endless & np.isfinite(high) & bare[None, : low.shape[1]], np.abs(high), largest)
    return largest


# quantity -> (statistics it needs, how it follows from them)
QUANTITIES: dict[str, tuple[tuple[str, ...], Callable[[Statistics, np.ndarray], np.ndarray]]] = {
    "absmax": (("min", "max"), _largest),
    "norm": (("norm",), lambda columns, _: columns["norm"]),
    "lost": (("unchanged",), lambda columns, _: columns["unchanged"] / np.maximum(columns["count"], 1)),
}
NORMS = ("grad", "output_grad")  # a norm says something only where it can be compared over time


def matrices_of(
    source: Source, after: int | None = None, most_cells: int = CELLS, kinds: Sequence[str] = DRAWN
) -> dict[str, KindMatrices]:
    """Kind -> its sites, columns and matrices; with `after`, only what was sampled later than that step."""
    plans = [plan for kind in kinds_of(source, None) if kind in kinds and (plan := _plan(source, kind, after)) is not None]
    rows = sum(len(sites) * len(quantities) for _, sites, _, quantities in plans)
    fewest = FEWEST_COLUMNS if after is None else 1
    most = min(MOST_COLUMNS, max(fewest, most_cells // max(rows, 1)))
    holders = _holders(source)
    return {kind: _matrices(source, kind, sites, steps, quantities, most, holders) for kind, sites, steps, quantities in plans}


def error_matrix(source: Source, sites: Sequence[str]) -> Matrix | None:
    """Gradients of the examined steps beside those that FP32 would have given, as a matrix with columns of its own."""
    seen = [examination for examination in reader.examinations(source.db, source.run.id) if examination.gradients]
    if not seen:
        return None
    columns = Columns(np.array([e.step for e in seen]), np.arange(len(seen) + 1), bad_steps(source))
    row_of = {name: row for row, name in enumerate(sites)}
    keys = np.full((len(sites), len(seen)), ABSENT, np.float32)
    for column, examination in enumerate(seen):
        for gradient in examination.gradients:
            is_noise = gradient.error > 1 and gradient.energy_share < NOTHING_BUT_ROUNDING
            if gradient.name in row_of and not gradient.reference_nonfinite and not is_noise:
                value = np.nan if gradient.nonfinite else gradient.error
                keys[row_of[gradient.name], column] = order_keys(np.array(value), np.array(True))
    return Matrix(columns, keys)


def bad_steps(source: Source) -> np.ndarray:
    steps, losses = source.evidence.curve("loss")
    return np.asarray(steps[~np.isfinite(losses)])


def _plan(source: Source, kind: str, after: int | None) -> tuple[str, list[Site], np.ndarray, list[str]] | None:
    stats = set(stats_of(source, kind))
    quantities = [name for name, (needed, _) in QUANTITIES.items() if stats >= {"count", *needed}]
    if kind not in NORMS and "norm" in quantities:
        quantities.remove("norm")
    steps = reader.sample_steps(source.db, source.run.id, kind)
    steps = steps if after is None else steps[steps > after]
    if not quantities or not len(steps):
        return None
    return kind, source.sites(kind), steps, quantities


def _holders(source: Source) -> set[str]:
    """Parameters, and the modules that hold some."""
    names = [site.name for kind in ("grad", "weight") for site in source.sites(kind)]
    owners = [name.rpartition(".")[0].split(".") for name in names]
    return {*names, *(".".join(owner[:i]) for owner in owners for i in range(1, len(owner) + 1))}


def _matrices(
    source: Source,
    kind: str,
    sites: Sequence[Site],
    steps: np.ndarray,
    quantities: Sequence[str],
    most: int,
    holders: set[str],
) -> KindMatrices:
    columns = Columns(steps, groups_of(len(steps), most), bad_steps(source))
    bounds = columns.bounds
    bare = np.array([site.name not in holders for site in sites], bool)
    shape = len(sites), len(bounds) - 1
    keys = {name: np.full(shape, ABSENT, np.float32) for name in quantities}
    at = {name: np.zeros(shape, np.uint16) for name in quantities}
    for lower, upper, statistics in _pieces(source, kind, steps, bounds, len(sites), quantities):
        progress(f"{kind}: {bounds[upper]}/{len(steps)}")
        measured = statistics["count"] > 0
        for name in quantities:
            piece = order_keys(QUANTITIES[name][1](statistics, bare), measured)[:, : len(sites)]
            for column in range(lower, upper):
                block = piece[bounds[column] - bounds[lower] : bounds[column + 1] - bounds[lower]]
                seen = block.shape[1]  # sites met later are missing in earlier samples
                keys[name][:seen, column], at[name][:seen, column] = worst_of(block)
    is_exact = len(steps) == len(bounds) - 1
    return KindMatrices(list(sites), columns, {n: Matrix(columns, keys[n], None if is_exact else at[n]) for n in quantities})


def _pieces(
    source: Source, kind: str, steps: np.ndarray, bounds: np.ndarray, sites: int, quantities: Sequence[str]
) -> Iterator[tuple[int, int, Statistics]]:
    """(first group, end group, statistics of all samples in them), a bounded number of cells at a time."""
    names = {"count"} | {stat for name in quantities for stat in QUANTITIES[name][0]}
    lower = 0
    while lower < len(bounds) - 1:
        wanted = bounds[lower] + max(CELLS_AT_ONCE // max(sites, 1), 1)
        upper = max(int(np.searchsorted(bounds, wanted, side="right")) - 1, lower + 1)
        first, last = int(steps[bounds[lower]]), int(steps[bounds[upper] - 1])
        found, columns = reader.statistics_of(source.db, source.run.id, kind, names, first, last)
        known = np.isin(found, steps)
        yield lower, upper, columns if known.all() else {name: matrix[known] for name, matrix in columns.items()}
        lower = upper


def order_keys(values: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """float32 whose maximum is the worst: not measured < zero < finite < infinite < NaN."""
    keys: np.ndarray = np.abs(values).astype(np.float32)
    if not np.isfinite(keys).all():
        keys = np.where(np.isnan(keys), np.float32(np.inf), np.minimum(keys, np.finfo(np.float32).max))
    return keys if measured.all() else np.where(measured, keys, ABSENT)


def groups_of(samples: int, most: int) -> np.ndarray:
    """First sample of each group, and the end: at most `most` groups of the same size."""
    size = -(-samples // max(most, 1)) if samples else 1
    return np.append(np.arange(0, samples, size), samples)


def worst_of(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of keys [samples of a group, sites], the worst of each site, and which of the samples it was (uint16)."""
    where = block.argmax(0)
    return block[where, np.arange(block.shape[1])], np.minimum(where, 65535)
