"""`nanny diff --model model.py --input sample.pt --dtype bf16`: where the model parts from its FP32 self."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..core.command_line import Parser, above_zero, add_result, terminal_language, write_result
from ..core.finding import Severity
from ..core.plain_json import to_text
from ..core.terminal import complain, progress, progress_shown
from ..show.term import wants_colour, width_of
from ..show.translation import translate
from .records import POLICIES, REFERENCES, DiffReport
from .text import render_diff


def _parser() -> Parser:
    parser = Parser(
        prog="nanny diff",
        description="Where a model in bf16 or fp16 parts from its FP32 self. Runs the code in the model file.",
        epilog="Exit code: 0 clean, 1 findings from --fail-on on, 2 bad input, 130 interrupted (what was seen is printed).",
    )
    parser.add_argument("--model", required=True, metavar="FILE.py[:NAME]", help="file with a model or a function that makes it")
    parser.add_argument("--input", metavar="FILE.pt", help="torch.save of a tensor, tuple of arguments, dict or list of batches")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"), help="target format (default: bf16)")
    parser.add_argument("--loss", metavar="MODULE:FN", help="loss(output) or loss(output, target): file.py:fn or module:fn")
    parser.add_argument(
        "--target", metavar="FILE[:KEY]", help="target of the loss; or save {'input': x, 'target': y} as the sample"
    )
    parser.add_argument("--policy", default="native", choices=POLICIES, help="who decides the precision of an operation")
    parser.add_argument("--reference", default="fp32", choices=REFERENCES)
    parser.add_argument("--loss-scale", type=float, metavar="S", help="as a GradScaler's (fp16: 2**16, less on overflow)")
    parser.add_argument("--weights", metavar="FILE", help="state_dict to load into the model first")
    parser.add_argument("--no-backward", action="store_true", help="forward only")
    parser.add_argument("--no-own", action="store_true", help="without each layer's own error (faster)")
    parser.add_argument("--eval", action="store_true", help="put the model into eval mode first")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    parser.add_argument("--rel-warn", type=_fraction, metavar="X", help="a relative error above X is a warning, in every layer")
    parser.add_argument("--rel-error", type=_fraction, metavar="X", help="a relative error above X is an error, in every layer")
    parser.add_argument(
        "--advise", type=float, nargs="?", const=True, default=False, metavar="GOAL",
        help="look for the modules to keep in FP32 so that the output error falls below GOAL",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="list every call")
    add_result(parser, ("text", "json", "html"), "text and page")
    parser.add_argument("--fail-on", default="warning", choices=("info", "warning", "error", "never"), help="exit 1 from here on")
    return parser


def _fraction(text: str) -> float:
    return above_zero(text, sys.float_info.max, "relative error; write 0.01 for 1 %")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if there is a finding of `--fail-on` or above."""
    args = _parser().parse_args(argv)
    import torch

    from .model_files import check_saved, load_function, load_model, load_sample, load_weights
    from .run import auto_diff

    if args.input:
        check_saved(args.input)
    complain(translate(f"running the code in {args.model}", terminal_language(args.lang)))
    torch.manual_seed(args.seed)
    model = load_model(args.model)
    if args.weights:
        load_weights(model, args.weights)
    loss_fn = load_function(args.loss) if args.loss else None
    sample, target = load_sample(args.input, args.target, model, loss_fn)
    with progress_shown():
        report = auto_diff(
            model.eval() if args.eval else model,
            sample,
            args.dtype,
            loss_fn=loss_fn,
            target=target,
            backward=not args.no_backward,
            own=not args.no_own,
            policy=args.policy,
            reference=args.reference,
            loss_scale=args.loss_scale,
            rel_warn=args.rel_warn,
            rel_error=args.rel_error,
            advise=args.advise,
            progress=progress if sys.stderr.isatty() else None,
        )
    write_result(_render(report, args), args.output, wants_colour(sys.stdout))
    if report.partial:
        return 130
    if args.fail_on == "never":
        return 0
    return 1 if report.worst is not None and report.worst >= Severity.parse(args.fail_on) else 0


def _render(report: DiffReport, args: argparse.Namespace) -> str:
    if args.format == "json":
        return to_text(report.to_json())
    if args.format == "html":
        from .page import render_diff as render_page

        return render_page(report, terminal_language(args.lang))
    colour = wants_colour(sys.stdout) and not args.output
    return render_diff(report, colour, width_of(sys.stdout), args.all, terminal_language(args.lang))
