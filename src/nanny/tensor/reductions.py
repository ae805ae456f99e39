"""Sum, mean and norm over one dimension, done in the target format and compared with float64.

Two ways are measured: torch's own kernel (wide accumulator, one rounding at the end) and `acc += x` in the target format.
Overflow is counted over all results of torch's kernel; errors on a sample of results, and the sequential accumulator on the
first terms of a smaller sample, because it takes one step per term.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.formats import Format
from .blocks import BLOCK, as_float, blocks, sample_rows
from .records import Reduction

MEASURED = 1 << 20  # elements behind the errors of one dimension
MEASURED_ROWS = 1 << 14
STEPS = 4096  # terms given to the sequential accumulator: twice the count at which fp16 stops
LANES = 128  # results that it computes side by side
FEW_RESULTS = 8  # fewer do not show which index is small as a rule
PART = 1 << 20  # elements looked at together when overflow is counted
NATIVE = (torch.float16, torch.bfloat16)
OPS = ("sum", "mean", "norm")


@dataclass(frozen=True)
class Exact:
    """float64 results per row."""

    sums: Tensor
    magnitudes: Tensor  # sum |x|
    norms: Tensor

    def of(self, op: str, terms: int) -> Tensor:
        return {"sum": self.sums, "mean": self.sums / terms, "norm": self.norms}[op]


@dataclass(frozen=True)
class Accumulated:
    result: Tensor  # float64
    swallowed: float


def measure_reductions(x: Tensor, dims: tuple[int, ...], target: Format) -> tuple[Reduction, ...]:
    """Three records for each dimension that has something to reduce."""
    dtype: torch.dtype = getattr(torch, target.torch_name)
    return tuple(one for dim in dims if x.shape[dim] > 1 for one in _over(x, dim, dtype))


def _over(x: Tensor, dim: int, dtype: torch.dtype) -> list[Reduction]:
    terms = x.shape[dim]
    results = x.numel() // terms
    rows = sample_rows(x, dim, max(1, min(MEASURED_ROWS, MEASURED // terms)))
    rows, low = _only_finite(rows, rows.to(dtype))
    exact = exact_rows(rows)
    lanes = sample_rows(rows, 1, LANES)[:, :STEPS]
    few = lanes.to(dtype)
    few_exact = exact_rows(lanes)
    summed = accumulate(few)
    squared = accumulate(few.float().square().to(dtype))
    small_error, small_ratio = _smaller_half(rows, low, exact)
    overflow = count_overflow(x, dim, dtype)
    out = []
    for op in OPS:
        library = library_rows(low, op)
        by_hand = {
            "sum": summed.result,
            "mean": (summed.result / few.shape[1]).to(dtype).double(),
            "norm": squared.result.sqrt().to(dtype).double(),
        }[op]
        reference = few_exact.of(op, few.shape[1])
        out.append(
            Reduction(
                op=op,
                dim=dim,
                terms=terms,
                results=results,
                measured=rows.shape[0],
                result_rms=_rms(exact.of(op, terms)),
                library_error=None if library is None else relative_error(library, exact.of(op, terms)),
                library_overflow=overflow[op],
                condition=None if op == "norm" else _condition(exact),
                cancels=None if op == "norm" else _cancels(exact),
                accumulator_terms=few.shape[1],
                accumulator_results=few.shape[0],
                accumulator_error=relative_error(by_hand, reference),
                accumulator_overflow=int((~by_hand.isfinite()).sum()),
                swallowed=squared.swallowed if op == "norm" else summed.swallowed,
                equal_terms=op != "norm" and _equal(lanes),
                small_half_error=small_error if op == "sum" else None,
                small_half_ratio=small_ratio if op == "sum" else None,
                advice="",
            )
        )
    return out


def _only_finite(rows: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Elements that are not finite, or not after the cast, count as zero on both sides: the cast is judged elsewhere."""
    if all(bool(as_float(block).isfinite().all()) for part in (rows, low) for _, block in blocks(part)):
        return rows, low
    bad = ~(as_float(low).isfinite() & as_float(rows).isfinite())
    return as_float(rows).masked_fill(bad, 0.0), as_float(low).masked_fill(bad, 0.0).to(low.dtype)


def exact_rows(rows: Tensor) -> Exact:
    count = rows.shape[0]
    sums = torch.zeros(count, dtype=torch.float64)
    magnitudes, squares = torch.zeros_like(sums), torch.zeros_like(sums)
    peak = max(float(as_float(block).abs().max()) for _, block in blocks(rows)) or 1.0
    unit = math.ldexp(1.0, max(math.frexp(peak)[1] - 1, -1000))
    for spans, block in blocks(rows, BLOCK):
        v = as_float(block).to(torch.float64) / unit
        sums[spans[0]] += v.sum(1)
        magnitudes[spans[0]] += v.abs().sum(1)
        squares[spans[0]] += v.square_().sum(1)
    return Exact(sums * unit, magnitudes * unit, squares.sqrt_() * unit)


def library_rows(low: Tensor, op: str) -> Tensor | None:
    """torch's own kernel on the target dtype, as float64; None where it has none."""
    if low.dtype not in NATIVE:
        return None
    return _library(low, 1, op).to(torch.float64)


def _library(low: Tensor, dim: int, op: str) -> Tensor:
    if op == "norm":
        norm: Tensor = torch.linalg.vector_norm(low, dim=dim)
        return norm
    return low.sum(dim) if op == "sum" else low.mean(dim)


def count_overflow(x: Tensor, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """How many results of torch's kernel are not finite although every term is. A mean lies between its terms: never."""
    counts = dict.fromkeys(OPS, 0)
    if dtype not in NATIVE:
        return counts
    for part in _result_parts(x, dim):
        low = part.to(dtype)
        for op in ("sum", "norm"):
            wrong = ~_library(low, dim, op).isfinite()
            if bool(wrong.any()):
                counts[op] += int((wrong & low.isfinite().all(dim)).sum())
    return counts


def _result_parts(x: Tensor, dim: int) -> Iterator[Tensor]:
    """The tensor cut across the widest other dimension, so that each part holds all terms of its results."""
    across = max((d for d in range(x.dim()) if d != dim), key=lambda d: x.shape[d], default=None)
    if across is None:
        yield x
        return
    width = x.shape[across]
    step = max(1, PART * width // x.numel())
    for start in range(0, width, step):
        yield x.narrow(across, start, min(step, width - start))


def accumulate(terms: Tensor) -> Accumulated:
    """`acc += term`, rounded to the terms' dtype at every step, for all rows side by side."""
    dtype = terms.dtype
    steps = (terms if dtype in NATIVE else terms.float()).t().contiguous()
    partial = torch.empty_like(steps)
    acc = torch.zeros_like(steps[0])
    for step, out in zip(steps.unbind(0), partial.unbind(0)):
        if dtype in NATIVE:
            acc = torch.add(acc, step, out=out)
        else:
            acc = out.copy_((acc + step).to(dtype))
    before = torch.cat([torch.zeros_like(partial[:1]), partial[:-1]])
    mass = steps.double().abs()
    swallowed = float(mass[(partial == before) & partial.isfinite()].sum())
    total = float(mass.sum())
    return Accumulated(partial[-1].to(torch.float64), swallowed / total if total else 0.0)


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Relative L2 over the results; infinite if one of them is not finite."""
    if not bool(got.isfinite().all()):
        return math.inf
    peak = float(exact.abs().max())
    if peak == 0:
        return 0.0 if not bool(got.any()) else math.inf
    return float(((got - exact) / peak).norm() / (exact / peak).norm())


def _rms(values: Tensor) -> float:
    peak = float(values.abs().max())
    return float((values / peak).square_().mean().sqrt_()) * peak if peak else 0.0


def _condition(exact: Exact) -> float | None:
    alive = exact.magnitudes > 0
    return float((exact.magnitudes[alive] / exact.sums[alive].abs()).median()) if bool(alive.any()) else None


def _cancels(exact: Exact) -> float | None:
    """Size of the sums against the norms: about 1 for random signs, sqrt(terms) for equal terms, far below 1 if they cancel."""
    peak = float(exact.norms.max())
    return float((exact.sums / peak).norm() / (exact.norms / peak).norm()) if peak else None


def _equal(rows: Tensor) -> bool:
    """All non-zero elements of each row are one and the same number."""
    v = as_float(rows)
    low = v.masked_fill(v == 0, math.inf).amin(1)
    high = v.masked_fill(v == 0, -math.inf).amax(1)
    alive = low.isfinite()
    return bool(alive.any()) and bool((low[alive] == high[alive]).all())


def _smaller_half(rows: Tensor, low: Tensor, exact: Exact) -> tuple[float | None, float | None]:
    """What is left, in the sum as the target stores it, of the indices with the smaller contributions.

    Median over the results of |stored - exact|, over the median of what the smaller half adds up to: above 1 their
    contribution is gone. Medians, because one outlier per row is a heavy tail, not an imbalance between indices.
    """
    if rows.shape[0] < FEW_RESULTS:
        return None, None
    v = as_float(rows)
    rms = torch.linalg.vector_norm(v, dim=0, dtype=torch.float64) / math.sqrt(rows.shape[0])
    order = torch.argsort(rms)
    order = order[rms[order] > 0]
    small = order[: max(1, len(order) // 2)]
    if len(order) < 2:
        return None, None
    stored = library_rows(low, "sum")
    if stored is None:
        stored = as_float(low.float().sum(1).to(low.dtype)).to(torch.float64)
    part = v[:, small].to(torch.float64).sum(1).abs()
    part = part[part > 0]
    if not part.numel():
        return None, None
    error = (stored - exact.sums).abs().median()
    return float(error / part.median()), float(rms[order[-1]] / rms[small].median())
