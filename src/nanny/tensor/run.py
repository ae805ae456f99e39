"""What a low-precision format would do to one tensor: range, resolution, dimensions, reductions, and what is wrong.

    report = nanny.analyze_tensor(x, torch.float16)      print(report)
    nanny tensor grads.pt:layer1.weight --dtype fp16     python -m nanny.tensor ...

The tensor is only read. It is measured on the CPU (a tensor from another device is copied there), in small blocks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.finding import NannyError, Severity
from ..core.formats import TARGETS, Format, format_of
from ..core.plain_json import to_text
from ..show.term import wants_colour
from .files import load_tensor
from .judge import advise, judge_tensor
from .records import TensorReport
from .text import render_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["TensorReport", "analyze_tensor", "main"]


def analyze_tensor(
    tensor: torch.Tensor,
    target_dtype: torch.dtype | str = "bfloat16",
    *,
    dims: int | Sequence[int] | None = None,
    tile: int | tuple[int, int] | None = None,
    name: str = "",
) -> TensorReport:
    """Measures what casting to `target_dtype` would do, and what reductions in it would do.

    `dims`: the dimensions to profile and reduce (all unless given). `tile`: also compare tiles of this size, 128 or (1, 128).
    """
    import torch

    from .dimensions import measure_dimensions, measure_tiles, tile_shape
    from .quantization import measure_cast, scan
    from .reductions import measure_reductions

    target = target_format(target_dtype)
    source = readable_tensor(tensor)
    chosen = chosen_dims(dims, source.dim())
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
    )
    return replace(report, notes=tuple(notes_on(report)), findings=judge_tensor(report))


def _on_cpu() -> AbstractContextManager[Any]:
    """New tensors on the CPU even under `torch.set_default_device`; the context costs 1 us per operation, so only then."""
    import torch

    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: blocks are small, and a second one gains little on a quiet machine and loses a factor of ten on a busy one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def target_format(dtype: object) -> Format:
    target = format_of(dtype)
    if target.name not in TARGETS:
        raise NannyError(f"{target.name} is no low-precision target; use one of: {', '.join(TARGETS)}")
    return target


def readable_tensor(tensor: Any) -> torch.Tensor:
    """The tensor itself (the local part of a distributed one), if it can be measured at all."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise NannyError(f"analyze_tensor needs a torch tensor, not {type(tensor).__name__}; try torch.as_tensor(...)")
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
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
    if tensor.dtype.itemsize == 1 and "float8" not in str(tensor.dtype):
        raise NannyError(f"{tensor.dtype} packs several values into a byte; unpack it to float32 first")
    return tensor


def chosen_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    if dims is None:
        return tuple(range(rank))
    wanted = (dims,) if isinstance(dims, int) else tuple(dims)
    for dim in wanted:
        if not isinstance(dim, int) or not -rank <= dim < rank:
            has = f"the tensor has dimensions 0 to {rank - 1}" if rank else "the tensor has none"
            raise NannyError(f"there is no dimension {dim}; {has}")
    return tuple(dict.fromkeys(dim % rank for dim in wanted))


def notes_on(report: TensorReport) -> list[str]:
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NannyError(f"{message}; type `nanny tensor --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nanny tensor", description="What a low-precision format would do to a stored tensor.")
    parser.add_argument("file", metavar="FILE[:key]", help=".pt (only tensors are loaded), .safetensors or .npy")
    parser.add_argument("--dtype", default="bf16", choices=TARGETS, help="target format (default: bf16)")
    parser.add_argument("--dim", type=int, action="append", metavar="N", help="only this dimension; may be repeated")
    parser.add_argument("--tile", type=int, metavar="N", help="also compare tiles of N x N (1 x N in a vector)")
    parser.add_argument("--format", default="text", choices=("text", "json", "html"), help="output (default: text)")
    parser.add_argument("--lang", choices=("en", "zh"), help="language of the page (default: en)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there instead of to the terminal")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if there is a finding of WARNING or above."""
    args = _parser().parse_args(argv)
    tensor, name = load_tensor(args.file)
    report = analyze_tensor(tensor, args.dtype, dims=args.dim, tile=args.tile, name=name)
    _write(_rendered(report, args.format, args.lang, to_file=args.output is not None), args.output)
    return 1 if (report.worst or Severity.INFO) >= Severity.WARNING else 0


def _rendered(report: TensorReport, form: str, lang: str | None, to_file: bool) -> str:
    if form == "json":
        return to_text(report.to_json())
    if form == "html":
        from .page import render_tensor_page

        return render_tensor_page(report, lang)
    plain = not to_file and not str(sys.stdout.encoding or "").lower().startswith("utf")
    return render_tensor(report, plain=plain, colour=not to_file and wants_colour(sys.stdout))


def _write(text: str, path: Path | None) -> None:
    if path is None:
        print(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise NannyError(f"cannot write {path}: {error.strerror or error}; name another --output FILE") from error
    print(f"nanny: written to {path}", file=sys.stderr)
