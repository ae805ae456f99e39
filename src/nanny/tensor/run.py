"""What a low-precision format would do to one tensor: range, resolution, dimensions, reductions, and what is wrong.

    report = nanny.analyze_tensor(x, torch.float16)      print(report)

The tensor is only read. It is measured on the CPU (a tensor from another device is copied there), in small blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.finding import NannyError
from ..core.formats import TARGETS, Format, format_of
from ..measure.flatten import local_part
from ..measure.histogram import exponents_of
from .dimensions import measure_dimensions, measure_tiles, tile_shape
from .judge import advise, judge_tensor
from .quantization import measure_cast, scan
from .records import TensorReport
from .reductions import measure_reductions


def analyze_tensor(
    tensor: Tensor,
    target_dtype: torch.dtype | str = "bfloat16",
    *,
    dims: int | Sequence[int] | None = None,
    tile: int | tuple[int, int] | None = None,
    name: str = "",
) -> TensorReport:
    """Measures what casting to `target_dtype` would do, and what reductions in it would do.

    `dims`: the dimensions to profile and reduce (all unless given). `tile`: also compare tiles of this size, 128 or (1, 128).
    """
    target = _target(target_dtype)
    source = _readable_tensor(tensor)
    chosen = _chosen_dims(dims, source.dim())
    if tile is not None:
        tile_shape(tile, source.dim())
    with torch.no_grad(), torch.autocast("cpu", enabled=False), _on_cpu(), _one_thread():
        x = source.detach().to("cpu")
        seen = scan(x)
        if not seen.finite:
            raise NannyError(
                f"all {seen.count} elements are NaN or infinite, there is nothing to measure; "
                f"look for the operation that made them"
            )
        values, ranges, resolution = measure_cast(x, target, seen)
        dimensions = measure_dimensions(x, chosen, seen)
        tiles = None if tile is None else measure_tiles(x, tile, target, seen)
        reductions = measure_reductions(x, chosen, target)
        exponents = exponents_of(x.contiguous())  # the same sample whatever the layout
    report = TensorReport(
        name=name,
        shape=tuple(source.shape),
        source=str(source.dtype).removeprefix("torch."),
        device=str(source.device),
        target=target.name,
        values=values,
        ranges=ranges,
        resolution=resolution,
        dimensions=dimensions,
        tiles=tiles,
        reductions=tuple(replace(r, advice=advise(r, target)) for r in reductions),
        notes=(),
        findings=(),
        exponents=exponents,
    )
    return replace(report, notes=tuple(_notes_on(report)), findings=judge_tensor(report))


def _on_cpu() -> AbstractContextManager[Any]:
    """New tensors on the CPU even under `torch.set_default_device`; the context costs 1 us per operation, so only then."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: blocks are small, and a second one gains little on a quiet machine and loses a factor of ten on a busy one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _target(dtype: object) -> Format:
    target = format_of(dtype)
    if target.name not in TARGETS:
        raise NannyError(f"{target.name} is no low-precision target; use one of: {', '.join(TARGETS)}")
    return target


def _readable_tensor(given: Any) -> Tensor:
    """The tensor itself (the local part of a distributed one), if it can be measured at all."""
    if not isinstance(given, Tensor):
        raise NannyError(f"analyze_tensor needs a torch tensor, not {type(given).__name__}; try torch.as_tensor(...)")
    tensor = local_part(given)
    if tensor.is_meta:
        raise NannyError("the tensor is on the meta device and holds no values; load the real one first")
    if tensor.layout != torch.strided:
        raise NannyError(f"the tensor is sparse ({tensor.layout}); analyze its values() or to_dense()")
    if tensor.is_quantized:
        raise NannyError("the tensor is quantized; analyze tensor.dequantize()")
    if tensor.is_complex():
        raise NannyError("the tensor is complex; analyze torch.view_as_real(tensor), or its real and imaginary parts")
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise NannyError(f"the tensor holds {kind}, and casts only harm floating point; analyze tensor.float() if it is meant")
    if tensor.numel() == 0:
        raise NannyError(f"the tensor is empty (shape {tuple(tensor.shape)}); there is nothing to measure")
    if tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        raise NannyError(f"{tensor.dtype} packs several values into a byte; unpack it to float32 first")
    return tensor


def _chosen_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    if dims is None:
        return tuple(range(rank))
    wanted = (dims,) if isinstance(dims, int) else tuple(dims)
    for dim in wanted:
        if not isinstance(dim, int) or not -rank <= dim < rank:
            has = f"the tensor has dimensions 0 to {rank - 1}" if rank else "the tensor has none"
            raise NannyError(f"there is no dimension {dim}; {has}")
    return tuple(dict.fromkeys(dim % rank for dim in wanted))


def _notes_on(report: TensorReport) -> list[str]:
    """What the reader must know to read the numbers right."""
    out = []
    target = format_of(report.target)
    if report.device != "cpu":
        out.append(f"copied from {report.device} and measured with the CPU's kernels")
    if report.resolution.same_dtype:
        out.append(
            f"the tensor is already {target.name}: the cast changes nothing, and what storing it has cost cannot be seen any "
            f"more; range, spacing against variation, dimensions and reductions still hold"
        )
    elif report.resolution.exact:
        out.append(f"every value is exact in {target.name}: the cast changes nothing")
    if not report.ranges[0].underflow_matters:
        out.append(
            f"{target.name} reaches as far down as fp32, so underflow says nothing about it; its risk is resolution "
            f"({target.significand} significant bits)"
        )
    if report.values.sampled < report.values.count:
        out.append(f"quantiles are from {report.values.sampled} elements spread over the tensor, counts and energies from all")
    return out
