"""`nanny tensor grads.pt:layer1.weight --dtype fp16`: what a low-precision format would do to a stored tensor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..core.command_line import add_result, command_parser, terminal_language, write_result
from ..core.finding import Severity
from ..core.formats import TARGETS
from ..core.plain_json import to_text
from ..show.term import wants_colour
from .files import load_tensor
from .records import TensorReport
from .text import render_tensor


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("tensor", "What a low-precision format would do to a stored tensor.")
    parser.add_argument("file", metavar="FILE[:key]", help=".pt (only tensors are loaded), .safetensors or .npy")
    parser.add_argument("--dtype", default="bf16", choices=TARGETS, help="target format (default: bf16)")
    parser.add_argument("--dim", type=int, action="append", metavar="N", help="only this dimension; may be repeated")
    parser.add_argument("--tile", type=int, metavar="N", help="also compare tiles of N x N (1 x N in a vector)")
    add_result(parser, ("text", "json", "html"), "text and page")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if there is a finding of WARNING or above."""
    args = _parser().parse_args(argv)
    tensor, name = load_tensor(args.file)
    from .run import analyze_tensor  # loads torch, which --help need not wait for

    report = analyze_tensor(tensor, args.dtype, dims=args.dim, tile=args.tile, name=name)
    write_result(_render(report, args), args.output, wants_colour(sys.stdout))
    return 1 if (report.worst or Severity.INFO) >= Severity.WARNING else 0


def _render(report: TensorReport, args: argparse.Namespace) -> str:
    if args.format == "json":
        return to_text(report.to_json())
    if args.format == "html":
        from .page import render_tensor_page

        return render_tensor_page(report, terminal_language(args.lang))
    on_screen = not args.output
    plain = on_screen and not str(sys.stdout.encoding or "").lower().startswith("utf")
    return render_tensor(report, plain, on_screen and wants_colour(sys.stdout), lang=terminal_language(args.lang))
