"""Where a model in BF16 or FP16 parts from its FP32 self: which layer, how much, and whether it is the layer's own fault.

    report = nanny.auto_diff(model, batch, torch.bfloat16, loss_fn=loss)      print(report)
    nanny diff --model model.py --input sample.pt --dtype bf16                 python -m nanny.diff ...

Both precisions run in one pass (`observe.shadow`), on the same weights, inputs and random numbers. The model, its gradients,
its buffers and the random state are left as they were.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .diff_records import CallDiff, DiffReport, Failure, Flip, GradDiff, OpFault, OpUse
from .formats import Format, format_of
from .judge.diff_rules import judge_diff, needs_floor, warn_limit
from .limits import Limits
from .records import NannyError, Severity
from .show.diff_text import render_diff
from .show.jsontext import to_text
from .show.term import wants_colour, width_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .observe.diff_settings import Settings
    from .observe.paired_run import Pass

__all__ = ["DiffReport", "auto_diff", "main"]

REFERENCES = ("fp32", "fp64")
POLICIES = ("native", "cuda", "cpu", "full")  # the device's autocast, that of a GPU or a CPU, a plain .to(dtype)


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
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Runs `model` on `sample_input` in the target precision and in the reference at once, and compares every module call.

    `sample_input`: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of such batches. `loss_fn(output)`, or
    `loss_fn(output, target)` with a target (a list of them for a list of batches). `own=False` leaves out the layers' own errors
    and is faster. `advise`: also look for the modules to keep in FP32 so that the output error falls below this number (True:
    below what a healthy model shows). `rel_warn` and `rel_error` turn plain limits of the relative error into a rule.
    """
    from .observe.diff_settings import Settings
    from .observe.names import unwrapped

    if reference not in REFERENCES:
        raise NannyError(f"unknown reference {reference!r}; use one of: {', '.join(REFERENCES)}")
    if policy not in POLICIES:
        raise NannyError(f"unknown policy {policy!r}; use one of: {', '.join(POLICIES)}")
    if advise and (policy == "full" or not own):
        raise NannyError("the advisor needs each layer's own error and autocast regions; leave out policy='full' and own=False")
    device = device_of(model)
    settings = Settings(
        target_format(target_dtype), reference, policy, backward, own, loss_fn, loss_scale, limits or Limits(), device=device
    )
    batches = as_batches(sample_input)
    samples = list(zip(batches, as_targets(target, sample_input, len(batches))))
    inner = unwrapped(model)
    report = _run_batches(inner, samples, settings, progress)
    if needs_floor(report, settings.limits):
        report = _with_floor(inner, *samples[0], settings, report)
    if advise and report.failure is None:
        from .advisor import find_advice

        goal = warn_limit(report, settings.limits) if advise is True else float(advise)
        report = replace(report, advice=find_advice(inner, *samples[0], settings, report, goal))
    return replace(report, findings=judge_diff(report, settings.limits, rel_warn, rel_error))


def _run_batches(
    model: nn.Module, samples: Sequence[tuple[Any, Any]], settings: Settings, progress: Callable[[int, int], None] | None
) -> DiffReport:
    """All batches, or those that were done before an interrupt or a failure."""
    from .observe.paired_run import run_batch

    passes: list[Pass] = []
    failure: Failure | None = None
    faults: tuple[OpFault, ...] = ()
    notes: list[str] = []
    for number, (batch, target) in enumerate(samples):
        if progress is not None:
            progress(number, len(samples))
        try:
            outcome = run_batch(model, batch, target, settings)
        except KeyboardInterrupt:
            if not passes:
                raise
            notes.append(f"interrupted after {number} of {len(samples)} batches; the numbers are of those")
            break
        if isinstance(outcome, Failure):
            failure = outcome
            break
        passes.append(outcome)
        if any(call.error.spoiled for call in outcome.calls) and not faults:
            again = run_batch(model, batch, target, replace(settings, backward=False, own=False, look_for_faults=True))
            faults = () if isinstance(again, Failure) else tuple(again.faults.values())
    if failure is None and not any(p.calls for p in passes):
        raise NannyError("the model returns no floating-point numbers for this input, so there is nothing to compare")
    return replace(_report(model, settings, passes, failure, notes), faults=faults)


def _with_floor(model: nn.Module, batch: Any, target: Any, settings: Settings, report: DiffReport) -> DiffReport:
    import torch

    from .observe.diff_settings import loss_of
    from .observe.floor import rounding_floor

    def loss(output: Any) -> torch.Tensor | None:
        return loss_of(output, target, settings)[0] if settings.backward else None

    dtype = getattr(torch, settings.target.torch_name)
    output_floor, gradient_floor = rounding_floor(model, batch, loss, dtype, settings.device)
    return replace(report, output_floor=output_floor, gradient_floor=gradient_floor)


def target_format(dtype: object) -> Format:
    target = format_of(dtype)
    if target.name not in ("fp16", "bf16"):
        raise NannyError(f"{target.name} is no target that a model can run in; use bf16 or fp16")
    return target


def device_of(model: Any) -> str:
    from itertools import chain

    from torch import nn

    if not isinstance(model, nn.Module):
        raise NannyError(f"auto_diff needs a torch.nn.Module, not {type(model).__name__}")
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


def _report(
    model: nn.Module, settings: Settings, passes: Sequence[Pass], failure: Failure | None, notes: Sequence[str]
) -> DiffReport:
    calls = _worst_calls([p.calls for p in passes])
    leaves = [c for c in calls if not any(d.site.startswith(f"{c.site}." if c.site else "") and d.site != c.site for d in calls)]
    return DiffReport(
        model=type(model).__name__,
        target=settings.target.name,
        reference=settings.reference,
        policy=settings.policy,
        device=settings.device,
        training=model.training,
        batches=len(passes),
        calls=calls,
        gradients=_worst_gradients([p.gradients for p in passes]),
        activation_gradients=_worst_gradients([p.activation_gradients for p in passes]),
        total=max((p.total for p in passes if p.total), key=lambda t: t.rel_l2, default=None),
        loss=passes[-1].loss if passes else None,
        reference_loss=passes[-1].reference_loss if passes else None,
        floor=settings.target.unit_roundoff * max(len(leaves), 1) ** 0.5,
        flips=_flips(passes),
        operations=_operations(passes),
        integers=tuple({key: lost for p in passes for key, lost in p.integers.items()}.values()),
        mixes=tuple({site: mix for p in passes for site, mix in p.mixes.items()}.values()),
        failure=failure,
        reseeds={why: n for p in passes for why, n in p.reseeds.items()},
        notes=tuple(dict.fromkeys([*notes, *(note for p in passes for note in p.notes)])),
    )


def _worst_calls(batches: Sequence[Sequence[CallDiff]]) -> tuple[CallDiff, ...]:
    """Each call with the numbers of its worst batch, and the mean of its relative error over all."""
    groups: dict[tuple[str, int], list[CallDiff]] = {}
    for number, calls in enumerate(batches):
        for call in calls:
            groups.setdefault((call.site, call.call), []).append(replace(call, batch=number))
    worst = []
    for group in groups.values():
        one = max(group, key=lambda c: (c.error.spoiled > 0, c.error.worst))
        worst.append(replace(one, mean_rel_l2=sum(c.error.rel_l2 for c in group) / len(group)))
    return tuple(sorted(worst, key=lambda c: c.order))


def _worst_gradients(batches: Sequence[Sequence[GradDiff]]) -> tuple[GradDiff, ...]:
    worst: dict[tuple[str, int], GradDiff] = {}
    for gradients in batches:
        for one in gradients:
            held = worst.get((one.name, one.call))
            if held is None or (one.error.spoiled > 0, one.error.rel_l2) > (held.error.spoiled > 0, held.error.rel_l2):
                worst[(one.name, one.call)] = one
    return tuple(sorted(worst.values(), key=lambda g: g.order))


def _flips(passes: Sequence[Pass]) -> tuple[Flip, ...]:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for one in passes:
        for key, (flipped, count) in one.flips.items():
            before = sums.get(key, (0, 0))
            sums[key] = (before[0] + flipped, before[1] + count)
    return tuple(Flip(site, op, flipped, count) for (site, op), (flipped, count) in sums.items() if flipped)


def _operations(passes: Sequence[Pass]) -> tuple[OpUse, ...]:
    return tuple(OpUse(*key, count) for key, count in passes[0].operations.items()) if passes else ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NannyError(f"{message}; type `nanny diff --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nanny diff",
        description="Where a model in bf16 or fp16 parts from its FP32 self. Runs the code in the model file.",
    )
    parser.add_argument("--model", required=True, metavar="FILE.py[:NAME]", help="file with a model or a function that makes it")
    parser.add_argument("--input", metavar="FILE.pt", help="torch.save of a tensor, tuple of arguments, dict or list of batches")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"), help="target format (default: bf16)")
    parser.add_argument("--loss", metavar="MODULE:FN", help="loss function of the output: file.py:fn or package.module:fn")
    parser.add_argument("--policy", default="native", choices=POLICIES, help="who decides the precision of an operation")
    parser.add_argument("--reference", default="fp32", choices=REFERENCES)
    parser.add_argument("--loss-scale", type=float, metavar="S", help="as a GradScaler's (fp16: 2**16, less on overflow)")
    parser.add_argument("--weights", metavar="FILE", help="state_dict to load into the model first")
    parser.add_argument("--no-backward", action="store_true", help="forward only")
    parser.add_argument("--no-own", action="store_true", help="without each layer's own error (faster)")
    parser.add_argument("--eval", action="store_true", help="put the model into eval mode first")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    parser.add_argument("--rel-warn", type=float, metavar="X", help="make a relative error above X a warning, for every layer")
    parser.add_argument("--rel-error", type=float, metavar="X", help="make a relative error above X an error, for every layer")
    parser.add_argument(
        "--advise", type=float, nargs="?", const=True, default=False, metavar="GOAL",
        help="look for the modules to keep in FP32 so that the output error falls below GOAL",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="list every call")
    parser.add_argument("--format", default="text", choices=("text", "json"), help="output (default: text)")
    parser.add_argument("--output", metavar="FILE", help="write there instead of to the terminal")
    parser.add_argument("--fail-on", default="warning", choices=("info", "warning", "error", "never"), help="exit 1 from here on")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if there is a finding of `--fail-on` or above."""
    args = _parser().parse_args(argv)
    import torch

    from .observe.model_files import load_function, load_input, load_model, load_weights

    print(f"nanny: running the code in {args.model}", file=sys.stderr)
    torch.manual_seed(args.seed)
    model = load_model(args.model)
    if args.weights:
        load_weights(model, args.weights)
    sample = load_input(args.input, model)
    report = auto_diff(
        model.eval() if args.eval else model,
        sample,
        args.dtype,
        loss_fn=load_function(args.loss) if args.loss else None,
        backward=not args.no_backward,
        own=not args.no_own,
        policy=args.policy,
        reference=args.reference,
        loss_scale=args.loss_scale,
        rel_warn=args.rel_warn,
        rel_error=args.rel_error,
        advise=args.advise,
        progress=_show_progress if sys.stderr.isatty() else None,
    )
    plain = args.format == "json"
    to_terminal = not args.output
    text = to_text(report.to_json()) if plain else render_diff(
        report, wants_colour(sys.stdout) and to_terminal, width_of(sys.stdout), args.all
    )  # fmt: skip
    if args.output:
        try:
            Path(args.output).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise NannyError(f"{args.output}: cannot be written ({error.strerror or error})") from None
    else:
        print(text)
    if args.fail_on == "never":
        return 0
    return 1 if report.worst is not None and report.worst >= Severity.parse(args.fail_on) else 0


def _show_progress(done: int, total: int) -> None:
    if total > 1:
        print(f"\rbatch {done + 1} of {total}", end="\n" if done + 1 == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    from .cli import main as nanny_main

    sys.exit(nanny_main(["diff", *sys.argv[1:]]))
