"""A dumped operation, run again beside FP32 or FP64: does the fault come back?

nanny replay nanny_logs/ops/torch.ops.aten.addmm_inputs.safetensors
correct, args, kwargs, out = compare_for_single_op("nanny_logs/ops/torch.ops.aten.addmm_inputs.pkl", torch.ops.aten.addmm)
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..core.command_line import Parser, add_format, add_language, add_output, terminal_language, write_result
from ..core.finding import NannyError
from ..core.limits import Limits
from ..core.plain_json import to_text
from ..show.translation import translate
from ..watch.dump import Dump, load_dump, operation_of, refuse_impure
from ..watch.op_facts import KERNEL_ERRORS
from .gap import Tolerance, gaps_of
from .records import Gap, Replay
from .reference import Call, call_before, check_reference, reference_of, results_of
from .replay_module import replay_module
from .selection import op_pattern
from .text import replay_lines


def compare_for_single_op(
    path: str | os.PathLike[str], op: Any = None, atol: float | None = None, rtol: float | None = None, reference: str = "wide"
) -> tuple[bool, tuple[Any, ...], dict[str, Any], Any]:
    """Runs a dumped operation again and compares it: (correct, args, kwargs, out); args and kwargs as they were before."""
    stored = load_dump(path)
    call, out = _run_again(stored, op)
    wide = reference_of(call, check_reference(reference))
    if wide is None:
        raise NannyError(
            f"{stored.path}: {stored.op} takes nothing that a wider type could check; try reference='cpu_same_dtype'"
        )
    with torch.no_grad():
        correct = not gaps_of(call, results_of(call, out), wide, Tolerance(atol, rtol), Limits())
    return correct, stored.args, stored.kwargs, out


def nan_inf_track_for_single_op(
    path: str | os.PathLike[str], op: Any = None
) -> tuple[bool, tuple[Any, ...], dict[str, Any], Any]:
    """Runs a dumped operation again: (no NaN or Inf in what it made, args, kwargs, out)."""
    stored = load_dump(path)
    call, out = _run_again(stored, op)
    return _all_finite(results_of(call, out)), stored.args, stored.kwargs, out


def replay_dump(path: str | os.PathLike[str], atol: float | None = None, rtol: float | None = None) -> Replay:
    """A dump run again: is the stored result wrong, and does it come back?"""
    stored = load_dump(path)
    call, out = _run_again(stored, None)
    try:
        reference = reference_of(call)
    except KERNEL_ERRORS as error:
        raise NannyError(f"{stored.path}: {stored.op} has no wider kernel to compare with ({error})") from None
    results, kept = results_of(call, out), list(stored.outputs)
    then: tuple[Gap, ...] = ()
    now: tuple[Gap, ...] = ()
    if reference is not None:
        with torch.no_grad():
            now = gaps_of(call, results, reference, Tolerance(atol, rtol), Limits())
            then = gaps_of(call, kept, reference, Tolerance(atol, rtol), Limits())
    return Replay(
        op=stored.op,
        place=stored.place,
        classes=stored.classes,
        kind=stored.kind,
        step=stored.step,
        recorded_with=stored.torch_version,
        here=torch.__version__,
        then=then,
        now=now,
        compared=reference is not None,
        nonfinite_then=not _all_finite(kept),
        nonfinite_now=not _all_finite(results),
    )


def _all_finite(tensors: list[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point())


def _run_again(stored: Dump, op: Any) -> tuple[Call, Any]:
    """A dumped operation, once more, on copies of its inputs. What a file names must be pure; an operation given is trusted."""
    if op is not None and op_pattern(op) != stored.op:
        raise NannyError(f"{stored.path} holds {stored.op}, not {op_pattern(op)}")
    func = operation_of(stored)
    args, kwargs = stored.fresh_inputs()
    if func is None and op is not None:  # the caller hands the operation over: nothing is resolved by name
        func = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    elif func is None:
        raise NannyError(f"{stored.path}: {stored.op} is a custom operation; pass it: compare_for_single_op(path, {stored.op})")
    elif op is None:
        refuse_impure(func, args, kwargs, stored.path)
    try:
        call = call_before(func, args, kwargs)
        with torch.no_grad():
            out = func(*args, **kwargs)
    except KERNEL_ERRORS as error:
        raise NannyError(f"{stored.path}: {stored.op} does not run here on what was stored ({error})") from None
    return call, out


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="nanny replay",
        description="Runs a dumped operation or module again and compares it with a wider reference on the CPU.",
    )
    parser.add_argument("dump", help="the *_inputs.safetensors of a dump (of `nanny trace` or `nanny run`), or a folder with one")
    parser.add_argument("--atol", type=float, help="absolute tolerance (default: by dtype and conditioning)")
    parser.add_argument("--rtol", type=float, help="relative tolerance")
    add_format(parser, ("text", "json"))
    add_output(parser)
    add_language(parser, "what is said", chosen_by="the locale")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """1 if the stored or the new result is wrong."""
    options = parse(sys.argv[1:] if argv is None else argv)
    stored = load_dump(options.dump)
    lang = terminal_language(options.lang)
    if stored.op.startswith("torch.ops."):
        replay = replay_dump(options.dump, options.atol, options.rtol)
        wrong, data, lines = replay.is_wrong, asdict(replay), replay_lines(replay, lang)
    else:
        told = replay_module(stored)
        wrong = True  # it was kept because its output was wrong
        data, lines = {"op": stored.op, "step": stored.step, "said": told}, [translate(line, lang) for line in told]
    write_result(to_text(data) if options.format == "json" else "\n".join(lines), options.output)
    return int(wrong)
