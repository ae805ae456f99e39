"""One traced step: the outputs of every module and their gradients, measured as they pass.

The hook is a global one and lives only during the step, so nothing is stored on the modules. A tensor is measured once, however
many containers return it. Gradients are taken by a hook on the output tensor, which bears in-place modules and dict outputs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import unserializable_hook

from ..core.step import BadCall, Growth
from ..measure import transfer
from ..measure.rows import RowBuffer, count_nonfinite
from ..watch.calls import ModelCall
from ..watch.hooks import add_hook, add_module_hook
from ..watch.tensors import being_traced, float_leaves, in_backward, is_finite, short_dtype, tensors_in

HISTOGRAM_SAMPLE = 4096  # values per tensor: shares are true to about 1 %, for a quarter of the cost of the full sample
FEWEST_GROWING = 6  # calls or layers
LEAST_EACH = 1.15  # per call or layer; a healthy residual stream grows more slowly
LEAST_WHOLE = 1e3
FADED = 1e-5  # what is left of a gradient after all calls
LOWERED = (nn.Linear, nn.Bilinear, nn.RNNBase, _ConvNd)  # what autocast computes in 16 bits
LOW = (torch.float16, torch.bfloat16)
MOST_CALLS = 64  # per module and step: a cell called a thousand times is measured this often


@dataclass(slots=True)
class OutputCall:
    """One output tensor of one module call."""

    site: str
    output: int  # row
    dtype: str
    shape: tuple[int, ...] = ()
    gradient: list[int] = field(default_factory=list)  # row, once backward has passed
    gradient_dtype: list[str] = field(default_factory=list)
    # for the host to judge later, where nothing can be read now:
    inputs: tuple[int, ...] | None = None  # rows; None: judged at once
    module: str = ""
    has_parameters: bool = False


@dataclass
class BadOutput:
    """A call whose output was seen to be bad at once; what is known about its inputs."""

    bad: BadCall
    inputs: tuple[Tensor, ...]
    module: nn.Module


def layer_filter(include: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """Whether a module is traced, by its name: `blocks.0.attn`, or with wildcards `blocks.*.attn`, and all that is inside it."""

    def is_in(name: str, patterns: Sequence[str]) -> bool:
        parts = name.split(".")
        return any(fnmatchcase(".".join(parts[:n]), p) for n in range(1, len(parts) + 1) for p in patterns)

    return lambda name: (not include or is_in(name, include)) and not is_in(name, exclude)


def recomputing() -> bool:
    """Inside backward, that is in a checkpoint's second forward pass."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def fingerprints(value: Any) -> list[int]:
    """Of the first tensors in a batch, where they can be read at once: a sample of their bits."""
    return [_fingerprint(t) for t in tensors_in(value)[:4] if _is_plain(t)]


def _is_plain(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not transfer.reads_freely(tensor.device):
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if wrapped or tensor.is_quantized or tensor.is_complex() or tensor.is_nested:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() > 0  # it may have been given back since


def _fingerprint(tensor: Tensor) -> int:
    line = tensor.detach().reshape(-1)
    part = line[:: max(1, line.numel() // 512)].clone()  # numpy would forbid the program to resize what it has looked at
    bits = str(tuple(tensor.shape)).encode() + part.view(torch.uint8).numpy().tobytes()
    return int.from_bytes(blake2b(bits, digest_size=6).digest(), "little")  # the same in every process


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count their changes


def _hook(reference: weakref.ref[StepTrace], call: OutputCall) -> Callable[[Tensor | None], None]:
    """On a tensor, which may outlive the trace and does not keep it alive."""

    def hook(grad: Tensor | None) -> None:
        trace = None if torch.compiler.is_compiling() else reference()
        if trace is not None:
            trace._after_backward(call, grad)

    return unserializable_hook(hook)


class StepTrace:
    """Opened at the start of a traced step, closed at its end; the numbers are in `rows`."""

    def __init__(
        self, names: Mapping[int, str], on_bad_output: Callable[[BadOutput], None], skip: frozenset[int] = frozenset()
    ) -> None:
        self.rows = RowBuffer(HISTOGRAM_SAMPLE)
        self.calls: list[OutputCall] = []
        self.first_pass: int | None = None  # so many of them came before the first backward
        self.bad: list[BadCall] = []
        self.zero_outputs: list[str] = []
        self.called: set[str] = set()
        self.called_without_grad: set[str] = set()
        self.given: dict[str, tuple[int, int]] = {}  # identity and size of the first tensor that a module was called with
        self.products: dict[str, tuple[str, int]] = {}  # modules that autocast lowers: format of the output, elements of weights
        self.outside: set[str] = set()  # those of them that ran while autocast was off
        self.in_threads: list[str] = []  # those of them that ran in another thread
        self.low_elsewhere = False  # a module of somebody else put out 16 bits
        self.roots: frozenset[int] = frozenset()  # the models themselves, by identity
        self.left_out: frozenset[int] = frozenset()  # modules whose outputs nobody wants, by identity
        self.model_calls: Sequence[ModelCall] = ()  # of this step
        self.root_inputs: set[int] = set()  # checksums of what they were called with
        self.amp: tuple[str, str] | None = None
        self._names = names
        self._skip = skip
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, OutputCall]] = {}
        self._counts: dict[str, int] = {}
        self._on_bad_output = on_bad_output
        self._not_good: set[int] = set()  # rows that are bad, or of which nobody knows yet
        self._myself = weakref.ref(self)
        self._thread = get_ident()
        self._unhook: list[Callable[[], Any]] = []  # with hooks on parameters or inputs that a module returned

    def open(self, guard: Callable[..., None]) -> None:
        """`guard(function, *args)` calls a function that may raise, and never does. It must not keep the trace alive."""
        self._guard = guard
        if not self._skip:  # a hook in place while torch.compile traces would break the graph
            self._unhook.append(add_module_hook(register_module_forward_hook, self._after_forward, with_kwargs=True))

    def close(self) -> None:
        while self._unhook:
            self._unhook.pop()()

    def _after_forward(self, *about: Any) -> None:
        if get_ident() == self._thread or in_backward():
            self._guard(self._forward, *about)
        else:
            with contextlib.suppress(Exception):
                self._elsewhere(*about)

    def _elsewhere(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """In a thread that the model works with: autocast is of one thread, and is not on there. Nothing else is asked."""
        name = self._names.get(id(module))
        if name is not None and name not in self.given and isinstance(module, LOWERED):
            self._note_setup(name, module, (args, kwargs), list(float_leaves(output)))
            if name in self.outside:
                self.in_threads.append(name)

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            if next(module.parameters(), None) is not None:  # another model's part
                self.low_elsewhere = self.low_elsewhere or any(t.dtype in LOW for t in float_leaves(output))
                return
            name = f"{type(module).__name__}()"  # a criterion, or a module made on the fly
        if not torch.is_grad_enabled() or recomputing() or being_traced():
            if not recomputing():
                self.called_without_grad.add(name)
            return
        leaves = list(float_leaves(output))
        calls = self._counts.get(name, 0)
        self._counts[name] = calls + 1
        if name not in self.given:
            self._note_setup(name, module, (args, kwargs) if kwargs else args, leaves)
        if id(module) in self.roots:
            self.root_inputs.update(fingerprints((args, kwargs)))
        if calls >= MOST_CALLS or id(module) in self.left_out:
            return
        if self.amp is None:
            self._note_autocast(leaves)
        for i, leaf in enumerate(leaves):
            self._one_output(name if i == 0 else f"{name}[{i}]", module, args, kwargs, leaf)

    def _note_setup(self, name: str, module: nn.Module, given: Any, leaves: Sequence[Tensor]) -> None:
        first = next(iter(tensors_in(given)), None)
        if first is not None:
            self.given[name] = (id(first), first.numel())
        if leaves and isinstance(module, LOWERED):
            out = leaves[0]
            if not (
                isinstance(module, nn.RNNBase) and out.is_cpu and out.dtype not in LOW
            ):  # the CPU's autocast leaves those alone
                elements = sum(p.numel() for p in module._parameters.values() if p is not None)
                self.products.setdefault(name, (short_dtype(out.dtype), elements))
                if not torch.is_autocast_enabled(out.device.type):
                    self.outside.add(name)

    def _one_output(self, site: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], leaf: Tensor) -> None:
        self.called.add(site)
        known = self._measured_call(leaf)
        if known is not None:  # a container that returns what its last child returned
            call = OutputCall(site, known.output, known.dtype, known.shape, known.gradient, known.gradient_dtype)
        else:
            call = OutputCall(site, self.rows.add(leaf, histogram=True), short_dtype(leaf.dtype), tuple(leaf.shape))
        self.calls.append(call)
        bad = self.rows.is_bad(call.output) if known is None or known.output in self._not_good else False
        flushed = known is None and leaf.dtype == torch.float16 and not bad and self.rows.is_zero(call.output)
        before = self._rows_of_inputs(args, kwargs) if bad is not False or flushed else []
        if known is None:
            self._seen[id(leaf)] = (weakref.ref(leaf), version_of(leaf), call)
            if leaf.requires_grad:
                if leaf.is_leaf:  # it would outlive the step
                    self._unhook.append(add_hook(leaf.register_hook, self._after_backward, call))
                else:
                    leaf.register_hook(_hook(self._myself, call))
        if bad is None:
            call.inputs = tuple(self.rows.add_bounds(t) if row is None else row for t, row in before)
            call.module = type(module).__name__
            call.has_parameters = _has_parameters(module)
        elif bad:
            self._suspect(call, module, leaf, before)
        elif flushed:
            self._zero_output(call, module, before)
        if bad is not False:
            self._not_good.add(call.output)

    def _measured_call(self, tensor: Tensor) -> OutputCall | None:
        """The call that measured this very tensor, if it was not written to since."""
        entry = self._seen.get(id(tensor))
        if entry is None or entry[0]() is not tensor or entry[1] != version_of(tensor):
            return None
        return entry[2]

    def _rows_of_inputs(self, args: Any, kwargs: Any) -> list[tuple[Tensor, int | None]]:
        """Each input with the row that its producer left. An in-place module has overwritten its input: the older row stands."""
        out: list[tuple[Tensor, int | None]] = []
        for tensor in float_leaves((args, kwargs)):
            entry = self._seen.get(id(tensor))
            out.append((tensor, entry[2].output if entry is not None and entry[0]() is tensor else None))
        return out

    def _after_backward(self, call: OutputCall, grad: Tensor | None) -> None:
        self._guard(self._gradient, call, grad)

    def _gradient(self, call: OutputCall, grad: Tensor | None) -> None:
        if grad is not None and not call.gradient:  # none where the loss has no part of it: DDP hands its outputs on so
            call.gradient.append(self.rows.add(grad, histogram=True))
            call.gradient_dtype.append(short_dtype(grad.dtype))

    def _note_autocast(self, leaves: Sequence[Tensor]) -> None:
        kind = leaves[0].device.type if leaves else "cpu"
        if torch.is_autocast_enabled(kind):
            self.amp = (kind, short_dtype(torch.get_autocast_dtype(kind)))

    def _suspect(self, call: OutputCall, module: nn.Module, leaf: Tensor, before: list[tuple[Tensor, int | None]]) -> None:
        """Only here, once something is wrong, are inputs and parameters looked at."""
        states: list[bool | None] = []
        largest = 0.0
        for tensor, row in before:
            if row is None and tensor is leaf and not any(call.has_unwritten(leaf) for call in self.model_calls):
                # it may be overwritten in place, and nobody measured it before
                states.append(None)
                continue
            row = self.rows.add(tensor) if row is None else row
            states.append(self.rows.is_clean(row))
            size = self.rows.largest(row)
            largest = max(largest, size if size < float("inf") else _finite_absmax(tensor))
        known = [s for s in states if s is not None]
        clean = None if not known and states else all(known)
        parameters = tuple(n for n, p in module.named_parameters(recurse=False) if p.is_floating_point() and not is_finite(p))
        nan, posinf, neginf = count_nonfinite(leaf)
        bad_call = BadCall(
            site=call.site,
            module=type(module).__name__,
            dtype=call.dtype,
            nan=nan,
            posinf=posinf,
            neginf=neginf,
            count=leaf.numel(),
            inputs_clean=clean,
            has_parameters=_has_parameters(module),
            bad_parameters=parameters,
            finite_absmax=_finite_absmax(leaf),
            input_absmax=largest,
        )
        self.bad.append(bad_call)
        if clean is not False and (nan or posinf or parameters or bad_call.has_parameters):
            self._on_bad_output(BadOutput(bad_call, tuple(t for t, _ in before), module))

    def _zero_output(self, call: OutputCall, module: nn.Module, before: list[tuple[Tensor, int | None]]) -> None:
        """All zero in fp16: flushed, if the input spreads to both sides of zero and no parameter of the module is itself zero."""
        if any(not p.any() for p in module.parameters(recurse=False)):
            return
        for tensor, row in before:
            if row is not None and tensor.is_floating_point():
                low, high = torch.aminmax(tensor.detach())
                if bool(low < 0) and bool(high > 0):
                    self.zero_outputs.append(call.site)
                    return


def _has_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def _finite_absmax(tensor: Tensor) -> float:
    magnitude = tensor.detach().float().abs()
    return float(torch.where(magnitude.isfinite(), magnitude, 0.0).max())


def growths_of(calls: Sequence[OutputCall], values: Any) -> Iterator[Growth]:
    """Norms that grow geometrically within one step: over the calls of one module (time), or over the layers (depth).

    `values` are the rows of the trace: count, min, max, sum of squares, sum.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        rms = np.sqrt(values[3] / values[0])
    by_site: dict[str, list[OutputCall]] = {}
    for call in calls:
        by_site.setdefault(call.site, []).append(call)
    for site, members in by_site.items():
        forward = [float(rms[c.output]) for c in members]
        backward = [float(rms[c.gradient[0]]) for c in reversed(members) if c.gradient]
        yield from _find_growth("forward", site, "calls", forward)
        yield from _find_growth("backward", site, "calls", backward)
    first = [members[0] for members in by_site.values()]
    distinct = list({c.output: c for c in first}.values())  # a container hands on the row of its last child
    forward = [float(rms[c.output]) for c in distinct]
    backward = [float(rms[c.gradient[0]]) for c in reversed(distinct) if c.gradient]
    weighty = next((c.site for c in distinct if c.has_parameters), distinct[0].site if distinct else "")
    yield from _find_growth("forward", weighty, "layers", forward)
    yield from _find_growth("backward", weighty, "layers", backward)


def _find_growth(direction: str, site: str, unit: str, norms: Sequence[float]) -> Iterator[Growth]:
    """The longest stretch at the beginning or end that grows in nearly every member; what overflowed ends it."""
    known = []
    for norm in norms:
        if not np.isfinite(norm):
            break
        if norm > 0:
            known.append(norm)
    if len(known) < FEWEST_GROWING:
        return
    ratios = np.diff(np.log(known))
    steady = float(np.mean(ratios > 0)) > 0.7
    whole = float(np.exp(ratios.sum()))
    if steady and whole > LEAST_WHOLE and whole ** (1 / len(ratios)) > LEAST_EACH:
        yield Growth(direction, site, unit, len(known), whole)
    if unit == "calls" and float(np.mean(ratios < 0)) > 0.7 and whole < FADED:
        yield Growth(direction, site, unit, len(known), whole)
