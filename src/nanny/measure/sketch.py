"""A tensor as a few numbers that ranks write down, each into its own file, to be compared there: nobody is asked while training
runs.

`checksum`: are replicas alike bit by bit? `sketch`: did a reduction give the sum of what ranks sent? The sketch of a sum is the
sum of the sketches: each element has a sign drawn once and goes into one of a few sums, and the square of such a sum is, in the
mean, that of the norm of what fell into it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from .flatten import as_line, local_part

SUMS = 4
MOST = 1 << 14  # elements that are looked at, evenly spaced
WIDE, BF16, FP16 = 1, 2, 3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reduction_rows(sent: Mapping[str, Tensor], got: Mapping[str, Tensor], ranks: int) -> Tensor:
    """[n, 2 * SUMS + 1] of gradients after a reduction over `ranks`: a sketch of what this rank `sent` (0 if nothing) and of what
    it got, and the format of that. All 0 where that is not known."""
    rows = []
    for name, gradient in got.items():
        place, device = _place_of(gradient), gradient.device
        if place is None:
            rows.append(torch.zeros(2 * SUMS + 1, dtype=torch.float64, device=device))
            continue
        own = sent[name].to(device) if name in sent else torch.zeros(SUMS, dtype=torch.float64, device=device)
        rows.append(torch.cat([own, sketch(gradient, *place), grid(gradient, ranks).double().view(1)]))
    return torch.stack(rows)


def _place_of(gradient: Tensor) -> tuple[int, int] | None:
    """Elements before this rank's part of it, and of all; None if it is shared out in a way that is not followed here."""
    placements = getattr(gradient, "placements", None)
    if placements is None:
        return 0, gradient.numel()
    if len(placements) != 1 or not placements[0].is_shard(0):
        return None
    ranks, rows = gradient.device_mesh.size(), gradient.shape[0]  # type: ignore[attr-defined]
    before = min(rows, gradient.device_mesh.get_local_rank() * -(-rows // ranks))  # type: ignore[attr-defined]
    return before * (gradient.numel() // max(1, rows)), gradient.numel()


def sketch(tensor: Tensor, before: int = 0, whole: int | None = None) -> Tensor:
    """float64 [SUMS], on the tensor's device. `before`, `whole`: of a shard, the elements of the whole before it, and of all."""
    line = local_part(tensor.detach()).reshape(-1)
    stride = max(1, -(-(line.numel() if whole is None else whole) // MOST))
    skip = -before % stride
    first = (before + skip) // stride
    picked = line[skip::stride].double()
    picked = picked * _signs(line.device)[first : first + picked.numel()]
    left = first % SUMS
    padded = torch.nn.functional.pad(picked, (left, -(left + picked.numel()) % SUMS))
    return padded.view(-1, SUMS).sum(0)


def grid(tensor: Tensor, ranks: int) -> Tensor:
    """Whether all elements are numbers of a 16-bit format, before or after an average over `ranks`; 0 if all are 0."""
    line = local_part(tensor.detach()).reshape(-1)
    line = line[:: max(1, -(-line.numel() // MOST))].float()
    known = (line != 0).any() if line.numel() else torch.zeros((), dtype=torch.bool, device=line.device)
    low = [_lies_on(line, ranks, dtype) for dtype in (torch.bfloat16, torch.float16)]
    return known * torch.where(low[0], BF16, torch.where(low[1], FP16, WIDE))


def _lies_on(line: Tensor, ranks: int, dtype: torch.dtype) -> Tensor:
    summed = line * ranks
    near = (summed - summed.to(dtype).float()).abs() <= summed.abs() * 2.0**-22
    return (line == line.to(dtype).float()).all() | near.all()


@functools.lru_cache(maxsize=8)
def _signs(device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(0, 2, (MOST + 1,), generator=draw) * 2 - 1).double().to(device)


def checksum(tensor: Tensor) -> Tensor:
    """The wrapping sum of its memory read as 64-bit integers, on its device; of a DTensor, that of this rank's part."""
    line = as_line(tensor)
    size = line.element_size()
    if line.storage_offset() * size % 8:
        line = line.clone()
    whole = line.numel() * size // 8 * 8 // size
    total = line[:whole].view(torch.int64).sum()
    return total + line[whole:].view(_INTEGERS[size]).sum() if whole < line.numel() else total
