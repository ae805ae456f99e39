"""Walks a tensor in small blocks, so that measuring needs little memory beside it; picks rows and elements to sample.

Views, transposed and expanded tensors are never copied whole. Nothing here is random: the same tensor is sampled the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1 << 18  # elements; a handful of float64 temporaries of this size stay in cache and under 20 MB
GOLDEN = (math.sqrt(5) - 1) / 2

Spans = tuple[slice, ...]


def blocks(x: Tensor, limit: int = BLOCK) -> Iterator[tuple[Spans, Tensor]]:
    """Views of at most `limit` elements that cover the tensor once, each with its place along every dimension."""
    yield from _split(x, tuple(slice(0, n) for n in x.shape), 0, limit)


def _split(x: Tensor, spans: Spans, dim: int, limit: int) -> Iterator[tuple[Spans, Tensor]]:
    if x.numel() <= limit:
        yield spans, x
        return
    inner = math.prod(x.shape[dim + 1 :])
    step = max(1, limit // inner)
    for start in range(0, x.shape[dim], step):
        stop = min(start + step, x.shape[dim])
        part = (*spans[:dim], slice(start, stop), *spans[dim + 1 :])
        yield from _split(x.narrow(dim, start, stop - start), part, dim + 1, limit)


def as_float(block: Tensor) -> Tensor:
    """The block in a type that every kernel knows: float32, or float64 if it is; exact either way."""
    return block if block.dtype in (torch.float32, torch.float64) else block.to(torch.float32)


def spread_positions(total: int, wanted: int) -> Tensor:
    """Up to `wanted` positions spread evenly over `range(total)`, without a stride that could follow the data's own period."""
    if total <= wanted:
        return torch.arange(total)
    turns = torch.arange(wanted, dtype=torch.float64) * GOLDEN
    return ((turns - turns.floor()) * total).long().clamp_(max=total - 1)


def sample_elements(x: Tensor, wanted: int) -> Tensor:
    """All elements, or `wanted` of them spread over the tensor, flat."""
    if x.numel() <= wanted:
        return x.reshape(-1)
    return x[torch.unravel_index(spread_positions(x.numel(), wanted), x.shape)]


def sample_rows(x: Tensor, dim: int, wanted: int) -> Tensor:
    """The terms of up to `wanted` results of a reduction over `dim`: a matrix (results, terms)."""
    last = x.movedim(dim, -1)
    others = last.shape[:-1]
    total = math.prod(others)
    if not others:
        return last.unsqueeze(0)
    if total <= wanted:
        return last.reshape(total, last.shape[-1])
    return last[torch.unravel_index(spread_positions(total, wanted), others)]
