"""A dumped module (`nanny run --dump-on-error`), run again on what came in, and once more in FP64.

Only modules of torch.nn that compute one tensor from its inputs and weights; code of a stranger's module is never run.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.numbers import short
from ..watch.dump import MOST_BYTES, Dump, on_meta
from ..watch.tensors import is_low, short_dtype

_FILES = ("linear", "conv", "normalization", "batchnorm", "instancenorm", "activation", "pooling")
MOST_RESULT = 4 * MOST_BYTES


def replay_module(stored: Dump) -> list[str]:
    """What `nanny replay` says of it."""
    site = f" [{stored.place.site}]" if stored.place.site else ""
    out = [f"{stored.classes}{site} made {'NaN' if stored.kind == 'nan' else 'Inf'} in {stored.dtype} at step {stored.step}"]
    if stored.torch_version != torch.__version__:
        out.append(f"recorded with torch {stored.torch_version}, this is {torch.__version__}")
    inputs = {f"input.{i}": value for i, value in enumerate(stored.args)}
    numbers = ((name, t) for name, t in {**inputs, **stored.state}.items() if isinstance(t, Tensor) and t.is_floating_point())
    out += [f"{name}: {_tensor_text(t)}" for name, t in numbers]
    return out + list(_run_again(stored))


def _run_again(stored: Dump) -> Iterator[str]:
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
