"""Magnitudes per index of a dimension and per tile: who is loud, who is quiet, by how much."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.finding import NannyError
from ..core.formats import Format
from .blocks import BLOCK, as_float, blocks
from .quantization import scale_block, scale_window
from .records import Dimension, IndexStats, Scan, Tiles

ENTRIES = 1 << 16  # per dimension; longer ones are pooled into groups of indices
HEAT = 64
HEAT_ROWS = 16
LISTED = 8
SMALLEST_TILE = 16  # elements


class Profile:
    """Largest and smallest magnitude and energy per entry of one dimension."""

    def __init__(self, x: Tensor, dim: int) -> None:
        self.dim = dim
        self.size = x.shape[dim]
        self.group = -(-self.size // ENTRIES)
        entries = -(-self.size // self.group)
        self.absmax = torch.zeros(entries, dtype=torch.float64)
        self.absmin = torch.full((entries,), math.inf, dtype=torch.float64)
        self.energy = torch.zeros(entries, dtype=torch.float64)

    def add(self, span: slice, magnitudes: Tensor, nonzero: Tensor, energy: Tensor) -> None:
        entries = torch.arange(span.start, span.stop) // self.group
        self.absmax.scatter_reduce_(0, entries, self._around_dim(magnitudes).amax((0, 2)).double(), "amax")
        self.absmin.scatter_reduce_(0, entries, self._around_dim(nonzero).amin((0, 2)).double(), "amin")
        self.energy.index_add_(0, entries, self._around_dim(energy).sum((0, 2)))

    def _around_dim(self, block: Tensor) -> Tensor:
        shape = block.shape
        return block.reshape(math.prod(shape[: self.dim]), shape[self.dim], math.prod(shape[self.dim + 1 :]))


def measure_dimensions(x: Tensor, dims: tuple[int, ...], seen: Scan) -> tuple[Dimension, ...]:
    profiles = [Profile(x, dim) for dim in dims]
    if profiles:
        for spans, block in blocks(x):
            v = scale_block(block, seen)
            magnitudes = as_float(block).abs()
            if not seen.clean:
                magnitudes = magnitudes.masked_fill(~magnitudes.isfinite(), 0.0)
            nonzero = magnitudes.masked_fill(magnitudes == 0, math.inf)
            energy = v.square_()
            for profile in profiles:
                profile.add(spans[profile.dim], magnitudes, nonzero, energy)
    return tuple(_summary(profile, x.numel() // x.shape[profile.dim], seen) for profile in profiles)


def _summary(profile: Profile, per_index: int, seen: Scan) -> Dimension:
    entries = len(profile.energy)
    lengths = torch.full((entries,), float(profile.group), dtype=torch.float64)
    lengths[-1] = profile.size - (entries - 1) * profile.group
    unit = math.ldexp(1.0, seen.exponent)
    rms = (profile.energy / (lengths * per_index)).sqrt() * unit
    alive = profile.absmax > 0
    loud = rms[alive]
    peaks = profile.absmax[alive]
    order = torch.argsort(rms, descending=True, stable=True)
    total = float(profile.energy.sum()) or 1.0

    def stats(entry: int) -> IndexStats:
        least = float(profile.absmin[entry])
        return IndexStats(
            index=entry * profile.group,
            absmax=float(profile.absmax[entry]),
            absmin=least if math.isfinite(least) else None,
            rms=float(rms[entry]),
            energy=float(profile.energy[entry]) / total,
        )

    all_fit = entries <= 2 * LISTED
    quietest = order[: int(alive.sum())][-LISTED:].tolist()[::-1]
    return Dimension(
        dim=profile.dim,
        size=profile.size,
        group=profile.group,
        silent=entries - int(alive.sum()),
        rms_ratio=float(loud.max() / loud.median()) if loud.numel() else None,
        max_ratio=float(peaks.max() / peaks.min()) if peaks.numel() else None,
        top=tuple(stats(i) for i in (order if all_fit else order[:LISTED]).tolist()),
        bottom=() if all_fit else tuple(stats(i) for i in quietest),
        heat=tuple(_stretches(profile.energy, lengths * per_index, unit)),
    )


def _stretches(energy: Tensor, counts: Tensor, unit: float) -> list[float]:
    """rms of up to 64 equal stretches."""
    bins = min(HEAT, len(energy))
    place = torch.arange(len(energy)) * bins // len(energy)
    sums = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, energy)
    sizes = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, counts)
    return [v * unit for v in (sums / sizes).sqrt().tolist()]


def tile_shape(tile: int | tuple[int, int], dims: int) -> tuple[int, int]:
    """An int is a square tile, a stretch of that length in a vector; a pair is (rows, columns)."""
    pair = (1 if dims < 2 else tile, tile) if isinstance(tile, int) else tile
    match pair:
        case (int(rows), int(columns)) if min(rows, columns) > 0 and rows * columns >= SMALLEST_TILE:
            return rows, columns
    raise NannyError(f"tile {tile!r} is not a tile size; use a number such as 128, or (rows, columns) such as (1, 128)")


def measure_tiles(x: Tensor, tile: int | tuple[int, int], target: Format, seen: Scan) -> Tiles:
    rows, columns = tile_shape(tile, x.dim())
    matrix = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    grid = (-(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns))
    absmax = torch.zeros(grid, dtype=torch.float64)
    energy = torch.zeros(grid, dtype=torch.float64)
    one_scale = scale_window(target, seen.absmax, seen.absmin or 1.0)[1] if seen.nonzero else 0
    lost = {"tensor": [0.0, 0], "tile": [0.0, 0]}
    wide = max(1, BLOCK // (rows * columns))
    deep = max(1, wide // grid[1])
    for i in range(0, grid[0], deep):
        for j in range(0, grid[1], wide):
            part = matrix[i * rows : (i + deep) * rows, j * columns : (j + wide) * columns]
            v = _split_tiles(part, rows, columns)
            v = v if seen.clean else v.masked_fill(~v.isfinite(), 0.0)
            peaks = v.abs().amax((1, 3))
            place = (slice(i, i + deep), slice(j, j + wide))
            absmax[place] = peaks
            energy[place] = (v * math.ldexp(1.0, -seen.exponent)).square_().sum((1, 3))
            _add_loss(lost["tensor"], v, torch.full_like(peaks, one_scale), target, seen)
            _add_loss(lost["tile"], v, _tile_scales(peaks, target), target, seen)
    return _tile_summary(matrix, rows, columns, absmax, energy, lost, seen)


def _split_tiles(part: Tensor, rows: int, columns: int) -> Tensor:
    """(tile rows, rows, tile columns, columns) in float64, the rim filled with zeros."""
    v = as_float(part).to(torch.float64)
    down, right = -part.shape[0] % rows, -part.shape[1] % columns
    v = torch.nn.functional.pad(v, (0, right, 0, down))
    return v.reshape(v.shape[0] // rows, rows, v.shape[1] // columns, columns)


def _tile_scales(peaks: Tensor, target: Format) -> Tensor:
    """Exponent of the largest power of two that keeps each tile's largest magnitude finite."""
    mantissa, exponent = torch.frexp(peaks)
    top_mantissa, top_exponent = math.frexp(target.max)
    highest = top_exponent - exponent - (mantissa > top_mantissa).int()
    return highest.masked_fill(peaks == 0, 0).to(torch.float64)


def _add_loss(loss: list[float], v: Tensor, exponents: Tensor, target: Format, seen: Scan) -> None:
    """Adds the error energy (scaled as everywhere) and the number of values that become zero."""
    shift = exponents[:, None, :, None]
    raised = torch.ldexp(v, shift)
    cast = as_float(raised.to(getattr(torch, target.torch_name))).to(torch.float64)
    loss[1] += int(((cast == 0) & (v != 0)).sum())
    loss[0] += float(torch.ldexp(raised - cast, -shift - seen.exponent).square_().sum())


def _tile_summary(
    matrix: Tensor, rows: int, columns: int, absmax: Tensor, energy: Tensor, lost: dict[str, list[float]], seen: Scan
) -> Tiles:
    total = float(energy.sum()) or 1.0
    alive = absmax[absmax > 0]
    peak = int(absmax.argmax())
    across = absmax.shape[1]
    down = torch.full((absmax.shape[0],), float(rows), dtype=torch.float64)
    down[-1] = matrix.shape[0] - (absmax.shape[0] - 1) * rows
    right = torch.full((across,), float(columns), dtype=torch.float64)
    right[-1] = matrix.shape[1] - (across - 1) * columns
    unit = math.ldexp(1.0, seen.exponent)
    return Tiles(
        rows=rows,
        columns=columns,
        count=absmax.numel(),
        silent=absmax.numel() - alive.numel(),
        absmax_ratio=float(alive.max() / alive.median()) if alive.numel() else None,
        loudest=(peak // across, peak % across),
        loudest_absmax=float(absmax.max()),
        quietest_absmax=float(alive.min()) if alive.numel() else None,
        error_per_tensor=math.sqrt(lost["tensor"][0] / total),
        error_per_tile=math.sqrt(lost["tile"][0] / total),
        flushed_per_tensor=lost["tensor"][1] / max(seen.nonzero, 1),
        flushed_per_tile=lost["tile"][1] / max(seen.nonzero, 1),
        heat=_tile_heat(energy, down, right, unit),
    )


def _tile_heat(energy: Tensor, down: Tensor, right: Tensor, unit: float) -> tuple[tuple[float, ...], ...]:
    height, width = min(HEAT_ROWS, len(down)), min(HEAT, len(right))
    row = torch.arange(len(down)) * height // len(down)
    column = torch.arange(len(right)) * width // len(right)

    def pool(values: Tensor) -> Tensor:
        bands = torch.zeros(height, len(right), dtype=torch.float64).index_add_(0, row, values)
        return torch.zeros(height, width, dtype=torch.float64).index_add_(1, column, bands)

    rms = (pool(energy) / pool(down[:, None] * right[None, :])).sqrt() * unit
    return tuple(tuple(line) for line in rms.tolist())
