"""A dumped operation, or a module, run again beside FP32 or FP64: does the fault come back?

nanny replay nanny_logs/ops/torch.ops.aten.addmm_inputs.safetensors
correct, args, kwargs, out = compare_for_single_op("nanny_logs/ops/torch.ops.aten.addmm_inputs.pkl", torch.ops.aten.addmm)
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..core.command_line import Parser, add_result, terminal_language, write_result
from ..core.finding import NannyError
from ..core.limits import Limits
from ..core.numbers import short
from ..core.plain_json import to_text
from ..show.translation import translate
from ..watch.dump import MOST_RESULT, Dump, load_dump, on_meta, operation_of, refuse_impure
from ..watch.op_facts import KERNEL_ERRORS
from ..watch.tensors import is_low, short_dtype
from .gap import Tolerance, gaps_of
from .records import Gap, Replay
from .reference import Call, call_before, check_reference, reference_of, results_of
from .selection import op_pattern
from .text import replay_lines

_FILES = ("linear", "conv", "normalization", "batchnorm", "instancenorm", "activation", "pooling")


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
            now = gaps_of(call, results, reference, Tolerance(atol, rtol), Limits()) or ()
            then = gaps_of(call, kept, reference, Tolerance(atol, rtol), Limits()) or ()
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


def _all_finite(tensors: list[Tensor]) -> bool:
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


def replay_module(stored: Dump) -> list[str]:
    """A dumped module (`nanny run --dump-on-error`), run again on what came in, and once more in FP64, in words.

    Only modules of torch.nn that compute one tensor from its inputs and weights; code of a stranger's module is never run.
    """
    site = f" [{stored.place.site}]" if stored.place.site else ""
    out = [f"{stored.classes}{site} made {'NaN' if stored.kind == 'nan' else 'Inf'} in {stored.dtype} at step {stored.step}"]
    if stored.torch_version != torch.__version__:
        out.append(f"recorded with torch {stored.torch_version}, this is {torch.__version__}")
    inputs = {f"input.{i}": value for i, value in enumerate(stored.args)}
    numbers = ((name, t) for name, t in {**inputs, **stored.state}.items() if isinstance(t, Tensor) and t.is_floating_point())
    out += [f"{name}: {_tensor_text(t)}" for name, t in numbers]
    return out + list(_module_lines(stored))


def _module_lines(stored: Dump) -> Iterator[str]:
    module = _rebuilt(stored)
    if module is None:
        yield f"not run again: {stored.op} is not a plain module of torch.nn, and nanny runs no code that a dump names"
        return
    try:
        size = _size_of_result(module, stored)
        if size > MOST_RESULT:
            most = f"at most {MOST_RESULT >> 30} GB are computed from a file"
            yield f"not run again: its result would take {size / 2**30:.3g} GB, and {most}"
            return
        with torch.no_grad(), _as_then(stored, [*stored.args, *module.parameters()]):
            again = _tensor(module.forward(*stored.fresh_inputs()[0]))
        with torch.no_grad():
            wide_inputs = [a.double() if a.is_floating_point() else a for a in stored.fresh_inputs()[0]]
            wide = _tensor(module.double().forward(*wide_inputs))
    except Exception as error:  # noqa: BLE001  whatever options and shapes that nobody checked lead to inside torch
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        yield f"not run again: {stored.op} does not run here on what was stored ({why})"
        return
    yield f"run again here: {_tensor_text(again)}"
    yield f"in float64: {_tensor_text(wide)}"
    largest = float(wide.abs().max()) if wide.numel() and bool(torch.isfinite(wide).all()) else 0.0
    if is_low(again.dtype) and largest > (end := torch.finfo(again.dtype).max):
        yield f"the result does not fit into {short_dtype(again.dtype)}, whose largest number is {short(end)}"


def _size_of_result(module: nn.Module, stored: Dump) -> int:
    with torch.no_grad():
        return 8 * _tensor(copy.deepcopy(module).to("meta").forward(*map(on_meta, stored.args))).numel()


def _rebuilt(stored: Dump) -> nn.Module | None:
    """The module without its constructor: plain attributes, weights and buffers as they were."""
    file, _, name = stored.op.removeprefix("torch.nn.modules.").partition(".")
    kind = getattr(torch.nn, name, None) if file in _FILES else None
    if not isinstance(kind, type) or not issubclass(kind, nn.Module) or stored.op != f"{kind.__module__}.{kind.__qualname__}":
        return None
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    of_every_module = frozenset(vars(module)) - {"training"}
    for key, value in stored.options.items():
        if key not in of_every_module and not hasattr(nn.Module, key):
            setattr(module, key, value)
    for key, tensor in stored.state.items():
        place, _, key = key.partition(".")
        if "." in key:
            return None  # a module with parts of its own
        if place == "weight":
            module.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        elif place == "buffer":
            module.register_buffer(key, tensor)
    for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):  # those that were None
        if key not in module._parameters and key not in module._buffers:
            module.register_parameter(key, None)
    return module


def _as_then(stored: Dump, tensors: list[Tensor]) -> Any:
    """Autocast, if what was made has fewer bits than what it was made of."""
    made = getattr(torch, stored.dtype, None)
    wide = any(t.is_floating_point() and t.dtype != made for t in tensors)
    if wide and made in (torch.float16, torch.bfloat16):
        return torch.autocast(tensors[0].device.type, dtype=made)
    return contextlib.nullcontext()


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"it returns a {type(value).__name__}")
    return value


def _tensor_text(tensor: Tensor) -> str:
    wide = tensor.detach().double()
    nan, inf = int(wide.isnan().sum()), int(wide.isinf().sum())
    finite = torch.where(wide.isfinite(), wide, 0.0)
    largest = short(float(finite.abs().max())) if tensor.numel() else "-"
    bad = ", ".join(f"{count} {name}" for count, name in ((nan, "NaN"), (inf, "Inf")) if count)
    return f"{short_dtype(tensor.dtype)} {list(tensor.shape)}, {bad or 'finite'}, largest {largest}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="nanny replay",
        description="Runs a dumped operation or module again and compares it with a wider reference on the CPU.",
    )
    parser.add_argument("dump", help="the *_inputs.safetensors of a dump (of `nanny trace` or `nanny run`), or a folder with one")
    parser.add_argument("--atol", type=float, help="absolute tolerance (default: by dtype and conditioning)")
    parser.add_argument("--rtol", type=float, help="relative tolerance")
    add_result(parser, ("text", "json"), "what is said")
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
