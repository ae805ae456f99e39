"""Layer x step matrices of a run, pooled: largest magnitude, norm, share of lost updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.step import Site
from ..runs.source import Source
from ..runs.stats import KINDS, kinds_of, stats_of
from ..store import reader
from .arrays import codes_of, packed
from .columns import ABSENT, groups_of, order_keys, pooled, reach

MOST_COLUMNS = 1000
CELLS = 1_200_000  # of all matrices of a page together
FEWEST_COLUMNS = 150
CELLS_AT_ONCE = 2_000_000  # read from the store in one piece: bounds memory
DRAWN = tuple(kind for kind in KINDS if kind != "buffer")

Columns = Mapping[str, np.ndarray]  # statistic -> [samples, sites]


def _largest(columns: Columns, bare: np.ndarray) -> np.ndarray:
    """Largest magnitude. Where only the minimum is infinite and the layer has no weights it is a mask, and no overflow."""
    low, high = columns["min"], columns["max"]
    masked = np.isneginf(low) & np.isfinite(high) & bare[None, : low.shape[1]]
    return np.where(masked, np.abs(high), np.maximum(np.abs(low), np.abs(high)))


def _norm(columns: Columns, bare: np.ndarray) -> np.ndarray:
    return columns["norm"]


def _unchanged(columns: Columns, bare: np.ndarray) -> np.ndarray:
    return columns["unchanged"] / np.maximum(columns["count"], 1)


# quantity -> (statistics it needs, how it follows from them)
QUANTITIES: dict[str, tuple[tuple[str, ...], Callable[[Columns, np.ndarray], np.ndarray]]] = {
    "absmax": (("min", "max"), _largest),
    "norm": (("norm",), _norm),
    "lost": (("unchanged",), _unchanged),
}
NORMS = ("grad", "output_grad")  # a norm says something only where it can be compared over time


def matrices_of(source: Source, after: int | None = None, most_cells: int = CELLS) -> dict[str, Any]:
    """Kind -> its sites, columns and matrices; with `after`, only what was sampled later than that step."""
    plans = [plan for kind in kinds_of(source, None) if kind in DRAWN and (plan := _plan(source, kind, after)) is not None]
    rows = sum(len(sites) * len(quantities) for _, sites, _, quantities in plans)
    fewest = FEWEST_COLUMNS if after is None else 1
    most = min(MOST_COLUMNS, max(fewest, most_cells // max(rows, 1)))
    bare = _bare(source)
    return {kind: _matrices(source, kind, sites, steps, quantities, most, bare) for kind, sites, steps, quantities in plans}


def error_matrix(source: Source, sites: Sequence[str]) -> dict[str, Any] | None:
    """Gradients of the examined steps beside those that FP32 would have given, as a matrix with columns of its own."""
    seen = [examination for examination in reader.examinations(source.db, source.run.id) if examination.gradients]
    if not seen:
        return None
    steps, bounds = np.array([e.step for e in seen]), np.arange(len(seen) + 1)
    row_of = {name: row for row, name in enumerate(sites)}
    keys = np.full((len(sites), len(seen)), ABSENT, np.float32)
    for column, examination in enumerate(seen):
        for gradient in examination.gradients:
            if gradient.name in row_of and not gradient.reference_nonfinite:
                value = np.nan if gradient.nonfinite else gradient.error
                keys[row_of[gradient.name], column] = order_keys(np.array(value), np.array(True))
    return {"codes": packed(codes_of(keys)), "at": None, **axis(steps, bounds)}


def axis(steps: np.ndarray, bounds: np.ndarray) -> dict[str, Any]:
    """The columns of a matrix: the steps that were looked at, which of them belong to each column, and where it is drawn."""
    whole = {"steps": packed(steps.astype(np.int32)), "bounds": packed(bounds.astype(np.int32))}
    return {**whole, "reach": packed(reach(steps, bounds))}


def _plan(source: Source, kind: str, after: int | None) -> tuple[str, list[Site], np.ndarray, list[str]] | None:
    stats = set(stats_of(source, kind))
    quantities = [name for name, (needed, _) in QUANTITIES.items() if stats >= {"count", *needed}]
    if kind not in NORMS and "norm" in quantities:
        quantities.remove("norm")
    steps = reader.sample_steps(source.db, source.run.id, kind)
    steps = steps if after is None else steps[steps > after]
    if not quantities or not len(steps):
        return None
    return kind, reader.sites(source.db, source.run.id, kind), steps, quantities


def _bare(source: Source) -> Callable[[Sequence[Site]], np.ndarray]:
    """Which sites hold no parameters, by name."""
    names = {site.name for kind in ("grad", "weight") for site in reader.sites(source.db, source.run.id, kind)}
    owners = {name.rpartition(".")[0] for name in names}
    holders = {".".join(parts[:i]) for parts in (owner.split(".") for owner in owners) for i in range(1, len(parts) + 1)}
    return lambda sites: np.array([site.name not in names and site.name not in holders for site in sites], bool)


def _matrices(
    source: Source,
    kind: str,
    sites: Sequence[Site],
    steps: np.ndarray,
    quantities: Sequence[str],
    most: int,
    bare: Callable[[Sequence[Site]], np.ndarray],
) -> dict[str, Any]:
    bounds = groups_of(len(steps), most)
    without = bare(sites)
    blocks: dict[str, list[np.ndarray]] = {name: [] for name in quantities}
    for lower, upper, columns in _pieces(source, kind, steps, bounds, len(sites), quantities):
        measured = columns["count"] > 0
        for name in quantities:
            keys = order_keys(QUANTITIES[name][1](columns, without), measured)
            for start, end in zip(bounds[lower:upper], bounds[lower + 1 : upper + 1]):
                block = keys[start - bounds[lower] : end - bounds[lower]]
                blocks[name].append(_worst_row(block))
    return {
        "names": [site.name for site in sites],
        "dtypes": [site.dtype for site in sites],
        **axis(steps, bounds),
        "quantities": {name: _matrix(blocks[name], len(sites), len(steps) == len(bounds) - 1) for name in quantities},
    }


def _worst_row(block: np.ndarray) -> np.ndarray:
    """A group as two rows, its worst keys and where they stood: what is kept of a long run while it is read."""
    found = pooled([block])
    return np.stack([found.keys[:, 0], found.at[:, 0].astype(np.float32)])


def _matrix(rows: Sequence[np.ndarray], sites: int, is_exact: bool) -> dict[str, Any]:
    keys = np.full((sites, len(rows)), ABSENT, np.float32)
    at = np.zeros((sites, len(rows)), np.uint16)
    for i, (worst, where) in enumerate(rows):
        keys[: len(worst), i] = worst[:sites]
        at[: len(where), i] = where[:sites]
    return {"codes": packed(codes_of(keys)), "at": None if is_exact else packed(at if at.max() > 255 else at.astype(np.uint8))}


def _pieces(
    source: Source, kind: str, steps: np.ndarray, bounds: np.ndarray, sites: int, quantities: Sequence[str]
) -> Iterator[tuple[int, int, Columns]]:
    """(first group, end group, statistics of all samples in them), a bounded number of cells at a time."""
    names = {"count"} | {stat for name in quantities for stat in QUANTITIES[name][0]}
    lower = 0
    while lower < len(bounds) - 1:
        wanted = bounds[lower] + max(CELLS_AT_ONCE // max(sites, 1), 1)
        upper = max(int(np.searchsorted(bounds, wanted, side="right")) - 1, lower + 1)
        first, last = int(steps[bounds[lower]]), int(steps[bounds[upper] - 1])
        columns = {}
        with reader.one_moment(source.db):
            for name in names:
                found, matrix = reader.samples(source.db, source.run.id, kind, name, first, last)
                columns[name] = matrix[np.isin(found, steps)]
        yield lower, upper, columns
        lower = upper
