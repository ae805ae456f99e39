"""Where a model in BF16 or FP16 parts from its FP32 self: which layer, how much, and whether it is the layer's own fault.

    report = nanny.auto_diff(model, batch, torch.bfloat16, loss_fn=loss)      print(report)
    nanny diff --model model.py --input sample.pt --dtype bf16                 python -m nanny.diff ...

Both precisions run in one pass (`observe.shadow`), on the same weights, inputs and random numbers. The model, its gradients,
its buffers and the random state are left as they were.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.finding import NannyError, Severity
from ..core.formats import Format, format_of
from ..core.limits import Limits
from ..core.plain_json import to_text
from ..show.term import wants_colour, width_of
from .blame import needs_closer_look, needs_floor, suspects, warn_limit
from .judge import judge_diff
from .records import DiffReport, Failure
from .text import render_diff

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .paired_run import Pass
    from .settings import Settings

__all__ = ["DiffReport", "auto_diff", "main"]

REFERENCES = ("fp32", "fp64")
POLICIES = ("native", "cuda", "cpu", "full")  # the device's autocast, that of a GPU or a CPU, a plain .to(dtype)
Progress = Callable[[str], None]


def auto_diff(
    model: nn.Module,
    sample_input: Any,
    target_dtype: torch.dtype | str = "bfloat16",
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    backward: bool = True,
    own: bool = True,
    policy: str = "native",
    reference: str = "fp32",
    loss_scale: float | None = None,
    rel_warn: float | None = None,
    rel_error: float | None = None,
    limits: Limits | None = None,
    advise: bool | float = False,
    progress: Progress | None = None,
) -> DiffReport:
    """Runs `model` on `sample_input` in the target precision and in the reference at once, and compares every module call.

    `sample_input`: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of such batches. `loss_fn(output)`, or
    `loss_fn(output, target)` with a target (a list of them for a list of batches). `own=False` leaves out the layers' own errors
    and is faster. `advise`: also look for the modules to keep in FP32 so that the output error falls below this number (True:
    below what a healthy model shows). `rel_warn` and `rel_error` turn plain limits of the relative error into a rule. An
    interrupt (Ctrl-C) gives the calls seen until then, in a report that is marked `partial`.
    """
    from ..watch.names import unwrapped
    from ..watch.tensors import float_leaves
    from .settings import Settings

    if reference not in REFERENCES:
        raise NannyError(f"unknown reference {reference!r}; use one of: {', '.join(REFERENCES)}")
    if policy not in POLICIES:
        raise NannyError(f"unknown policy {policy!r}; use one of: {', '.join(POLICIES)}")
    if advise and not own:
        raise NannyError("the advisor needs each layer's own error; leave out own=False")
    device = device_of(model)
    settings = Settings(
        target_format(target_dtype), reference, policy, backward, own, loss_fn, loss_scale, limits or Limits(), device=device
    )
    batches = as_batches(sample_input)
    samples = list(zip(batches, as_targets(target, sample_input, len(batches))))
    inner = unwrapped(model)
    report = _run_batches(inner, samples, settings, progress)
    report = replace(report, input_nan=sum(int(t.isnan().sum()) for t in float_leaves(samples)))
    if report.failure is None and not report.partial:
        try:
            report = _explained(inner, samples, settings, report, advise, progress)
        except KeyboardInterrupt:
            report = replace(report, partial=True, notes=(*report.notes, "interrupted while looking for the cause"))
    return replace(report, findings=judge_diff(report, settings.limits, rel_warn, rel_error))


def _run_batches(
    model: nn.Module, samples: Sequence[tuple[Any, Any]], settings: Settings, progress: Progress | None
) -> DiffReport:
    """All batches, or what was seen before an interrupt or a failure."""
    from .merged_passes import merged_report
    from .paired_run import run_batch

    passes: list[Pass] = []
    failure: Failure | None = None
    notes: list[str] = []
    stopped = False
    for number, (batch, target) in enumerate(samples):
        where = f"batch {number + 1} of {len(samples)}"
        try:
            outcome = run_batch(model, batch, target, _told(settings, progress, where))
        except KeyboardInterrupt:
            if not passes:
                raise
            stopped = True
            notes.append(f"interrupted after {number} of {len(samples)} batches; the numbers are of those")
            break
        if isinstance(outcome, Failure):
            failure = outcome
            break
        passes.append(outcome)
        if outcome.interrupted:
            notes.append(f"interrupted in {where}, after {len(outcome.calls)} module calls; what came later is missing")
            break
    if failure is None and not any(p.calls for p in passes):
        raise NannyError("the model returns no floating-point numbers for this input, so there is nothing to compare")
    report = merged_report(model, settings, passes, failure, notes)
    return replace(report, partial=report.partial or stopped)


def _told(settings: Settings, progress: Progress | None, where: str) -> Settings:
    """Settings that tell of every module call."""
    if progress is None:
        return settings
    seen = 0

    def on_call(site: str) -> None:
        nonlocal seen
        seen += 1
        progress(f"{where}: module call {seen}, {site or 'the model'}")

    return replace(settings, on_call=on_call)


def _explained(
    model: nn.Module,
    samples: Sequence[tuple[Any, Any]],
    settings: Settings,
    report: DiffReport,
    advise: bool | float,
    progress: Progress | None,
) -> DiffReport:
    """Further runs, for trouble only: what rounding explains, which operation it is, what helps."""
    limits = settings.limits
    told = partial(_told, settings, progress)
    if needs_floor(report, limits):
        report = _with_floor(model, *samples[0], told("what rounding alone does"), report)
    worst = max(report.outputs, key=lambda c: (c.error.spoiled > 0, c.error.worst)).batch if report.outputs else 0
    if needs_closer_look(report, limits):
        report = _looked_at_closely(model, *samples[worst], told("a closer look"), report)
        sites = suspects(report, limits) if settings.own else ()
        if sites:
            from .advisor import run_trials

            report = replace(report, trials=run_trials(model, *samples[worst], told("kept in FP32"), report, sites))
    if advise:
        from .advisor import find_advice

        goal = warn_limit(report, limits) if advise is True else float(advise)
        report = replace(report, advice=find_advice(model, *samples[worst], told("advice"), report, goal))
    return report


def _looked_at_closely(model: nn.Module, batch: Any, target: Any, settings: Settings, report: DiffReport) -> DiffReport:
    from .paired_run import must_repeat, run_batch

    scale = report.total.loss_scale if report.total else settings.loss_scale
    again = run_batch(model, batch, target, replace(settings, closely=True, loss_scale=scale))
    if isinstance(again, Failure):
        return report
    must_repeat(report.outputs, [c for c in again.calls if not c.site])
    return replace(report, faults=again.faults, op_errors=again.op_errors)


def _with_floor(model: nn.Module, batch: Any, target: Any, settings: Settings, report: DiffReport) -> DiffReport:
    import torch

    from .floor import error_floor
    from .settings import loss_of

    def loss(output: Any) -> torch.Tensor | None:
        return loss_of(output, target, settings)[0] if settings.backward else None

    dtype = getattr(torch, settings.target.torch_name)
    floor = error_floor(model, batch, loss, dtype, settings.device)
    return replace(report, output_floor=floor.output, input_floor=floor.output_by_input, gradient_floor=floor.gradient)


def target_format(dtype: object) -> Format:
    target = format_of(dtype)
    if target.name not in ("fp16", "bf16"):
        raise NannyError(f"{target.name} is no target that a model can run in; use bf16 or fp16")
    return target


def device_of(model: Any) -> str:
    from itertools import chain

    from torch import nn
    from torch.nn.parameter import is_lazy

    if not isinstance(model, nn.Module):
        raise NannyError(f"auto_diff needs a torch.nn.Module, not {type(model).__name__}")
    if any(is_lazy(p) for p in model.parameters()):
        raise NannyError("the model has lazy layers that have no weights yet; run it once on a batch first: model(x)")
    devices = {t.device.type for t in chain(model.parameters(), model.buffers())}
    if "meta" in devices:
        raise NannyError("the model is on the meta device and holds no values; load its weights first (load_state_dict)")
    return next(iter(devices - {"cpu"}), "cpu")


def as_batches(sample: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A list is a list of batches; a tuple is the arguments of one call, a dict its keyword arguments."""
    batches = sample if isinstance(sample, list) else [sample]
    if not batches:
        raise NannyError("the list of sample inputs is empty; give at least one batch")
    out: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for batch in batches:
        if isinstance(batch, dict):
            if not all(isinstance(key, str) for key in batch):
                raise NannyError("a dict of inputs is passed as keyword arguments; its keys must be names")
            out.append(((), dict(batch)))
        elif isinstance(batch, (tuple, list)):
            out.append((tuple(batch), {}))
        else:
            out.append(((batch,), {}))
    return out


def as_targets(target: Any, sample: Any, count: int) -> list[Any]:
    if not isinstance(sample, list):
        return [target]
    if target is None:
        return [None] * count
    if not isinstance(target, (list, tuple)) or len(target) != count:
        raise NannyError(f"there are {count} batches; give a list of {count} targets, one for each")
    return list(target)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NannyError(f"{message}; type `nanny diff --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
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
    parser.add_argument("--format", default="text", choices=("text", "json", "html"), help="output (default: text)")
    parser.add_argument("--lang", choices=("en", "zh"), help="language of the page (default: en)")
    parser.add_argument("--output", metavar="FILE", help="write there instead of to the terminal")
    parser.add_argument("--fail-on", default="warning", choices=("info", "warning", "error", "never"), help="exit 1 from here on")
    return parser


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no relative error; write 0.01 for 1 %")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if there is a finding of `--fail-on` or above."""
    args = _parser().parse_args(argv)
    import torch

    from .model_files import load_function, load_model, load_sample, load_weights

    print(f"nanny: running the code in {args.model}", file=sys.stderr)
    torch.manual_seed(args.seed)
    model = load_model(args.model)
    if args.weights:
        load_weights(model, args.weights)
    loss_fn = load_function(args.loss) if args.loss else None
    sample, target = load_sample(args.input, args.target, model, loss_fn)
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
        progress=_progress_line() if sys.stderr.isatty() else None,
    )
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    _write(_rendered(report, args), args.output)
    if report.partial:
        return 130
    if args.fail_on == "never":
        return 0
    return 1 if report.worst is not None and report.worst >= Severity.parse(args.fail_on) else 0


def _rendered(report: DiffReport, args: argparse.Namespace) -> str:
    if args.format == "json":
        return to_text(report.to_json())
    if args.format == "html":
        return _html(report, args.lang)
    return render_diff(report, wants_colour(sys.stdout) and not args.output, width_of(sys.stdout), args.all)


def _html(report: DiffReport, lang: str | None) -> str:
    try:
        from .page import render_diff as render_page
    except ModuleNotFoundError as error:
        raise NannyError(f"--format html needs {error.name}; type: pip install 'precision-nanny[web]'") from None
    return render_page(report, lang)


def _write(text: str, output: str | None) -> None:
    if not output:
        print(text)
        return
    try:
        Path(output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise NannyError(f"{output}: cannot be written ({error.strerror or error}); name another --output FILE") from None
    print(f"nanny: written to {output}", file=sys.stderr)


def _progress_line() -> Progress:
    """One line on the terminal that is written over, a few times a second."""
    shown = time.monotonic()

    def show(text: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown > 0.2:
            shown = now
            print(f"\r\x1b[K{text[:99]}\r", end="", file=sys.stderr, flush=True)

    return show
