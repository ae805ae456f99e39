"""Watches one run of a model beside its twins: every module call, gradient and operation beside its reference.

`OpWatcher` runs inside the dispatch, once for every operation, so what costs a pass over the data is done only on request
(`closely`).
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._script import RecursiveScriptModule
from torch.utils.flop_counter import flop_registry

from ..core.finding import NannyError
from ..core.formats import format_of
from ..core.numbers import plain_name
from ..core.ops import COUNT, DECISIONS, FACTORS, UNWRITTEN
from ..measure.errors import channel_contributions, compare, contribution_ratio, contributions, dimension_errors, relative_l2
from ..measure.records import ErrorStats
from ..watch.places import Places
from ..watch.storages import StorageMap
from ..watch.tensors import LOW, float_leaves, has_storage, in_backward, is_finite, is_plain, outside_program, short_dtype
from ..watch.twins import Operation, Twins
from .records import LOSS, CallDiff, GradDiff, IntegerLoss, Mix, NonfiniteOp, OpError
from .settings import DiffSettings

_INTEGERS_LOOKED_AT = 4096
_MOST_ERRORS = 256


def modules_by_site(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its real name; of a wrapper and what it wraps, the wrapper."""
    sites: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        sites.setdefault(plain_name(name), module)
    return sites


class PairWatcher:
    """Hooks for one pass. `calls` and what follows fill up while the model runs."""

    def __init__(self, settings: DiffSettings, loss_scale: float) -> None:
        self._settings, self._loss_scale = settings, loss_scale
        self._target, self._limits = settings.target, settings.limits
        self._last: tuple[weakref.ref[Tensor], int, ErrorStats] | None = None
        self._places = Places(settings.model)
        self._open_calls = 0
        self._backward_site = ""
        self._seen: Counter[str] = Counter()
        self._outer_error = sys.exc_info()[1]
        self.failed_at: str | None = None
        self.calls: list[CallDiff] = []
        self.gradients: list[GradDiff] = []
        self.own_of_parameters: dict[str, float] = {}  # error that the last backward step adds to each parameter's gradient
        self.ops = OpWatcher(settings, self.site, lambda: len(self.calls))
        self.shadows: Twins

    def site(self) -> str:
        """Of the operation that runs now; where a parameter takes its gradient, that of the operation before."""
        place = self._places.here()
        if place.module == "Parameter":
            return self._backward_site
        site = place.site if place.module else LOSS
        if in_backward():
            self._backward_site = site
        return site

    @contextmanager
    def watching(self, shadows: Twins) -> Iterator[None]:
        model, self.shadows, self.ops.shadows = self._settings.model, shadows, shadows
        handles: list[Any] = []
        if isinstance(model, RecursiveScriptModule):
            raise NannyError("the model is a ScriptModule, which cannot be watched; give the Python module it was made from")
        try:
            self._places.open()
            for site, module in modules_by_site(model).items():
                handles.append(module.register_forward_pre_hook(partial(self._before, site)))
                handles.append(module.register_forward_hook(partial(self._after, site), with_kwargs=True, always_call=True))
            for name, parameter in model.named_parameters() if self._settings.backward else ():
                if parameter.requires_grad and parameter.is_leaf:
                    handles.append(parameter.register_post_accumulate_grad_hook(partial(self._on_parameter, plain_name(name))))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._places.close()

    def _before(self, site: str, module: nn.Module, args: Any) -> None:
        if in_backward():  # a checkpoint runs its modules again
            return
        self._open_calls += 1
        self.shadows.open_frame()
        if self._settings.on_call is not None:
            self._settings.on_call(site)

    def _after(self, site: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward() or not self._open_calls:
            return
        error = sys.exc_info()[1]
        raised = output is None and error is not None and error is not self._outer_error
        if raised:
            self.failed_at = self.failed_at if self.failed_at is not None else site
        else:
            self._measure(site, module, (args, kwargs), output)
        self.shadows.close_frame()
        self._open_calls -= 1

    def _measure(self, site: str, module: nn.Module, inputs: Any, output: Any) -> None:
        leaves = list(filter(is_plain, float_leaves(output)))
        if not leaves:
            return
        call = self._seen[site]
        self._seen[site] += 1
        with outside_program():
            pairs = [(leaf.detach(), self.shadows.twin(leaf)) for leaf in leaves]
            passed_through = self._last_error(leaves)
            errors = [passed_through] if passed_through else [
                self._settings.errors(real, twin) for real, twin in pairs
            ]  # fmt: skip
            worst = max(range(len(leaves)), key=lambda i: (errors[i].spoiled > 0, errors[i].worst))
            real, twin = pairs[worst]
            own, inherited = self._own(leaves[worst], twin, errors[worst])
            self.calls.append(
                CallDiff(
                    site=site,
                    call=call,
                    module=type(module).__name__,
                    order=len(self.calls),
                    dtype=short_dtype(real.dtype),
                    shape=tuple(real.shape),
                    error=errors[worst],
                    own=own,
                    inherited=inherited,
                    inputs_spoiled=errors[worst].spoiled > 0 and self._any_spoiled(inputs),
                    dimensions=dimension_errors(real, twin) if self._remarkable(errors[worst], own) else (),
                    mean_rel_l2=errors[worst].rel_l2,
                )
            )
        self._last = (weakref.ref(leaves[0]), leaves[0]._version, errors[0]) if len(leaves) == 1 else None
        if self._settings.backward and torch.is_grad_enabled() and not passed_through:
            for leaf in leaves:
                if leaf.requires_grad:
                    leaf.register_hook(partial(self._on_gradient, site, call))

    def _last_error(self, leaves: list[Tensor]) -> ErrorStats | None:
        """A container often returns what its last child returned: measured already."""
        if self._last is None or len(leaves) != 1:
            return None
        leaf, version, error = self._last
        return error if leaf() is leaves[0] and leaves[0]._version == version else None

    def _own(self, leaf: Tensor, twin: Tensor, error: ErrorStats) -> tuple[ErrorStats | None, float | None]:
        value = self.shadows.own_value(leaf)
        if value is None:
            return None, None
        own = self._settings.errors(value, twin)
        difference = (leaf.detach().to(twin.dtype) - value.to(twin.dtype)).nan_to_num(0.0, 0.0, 0.0)
        size = error.reference_norm
        return own, float(torch.linalg.vector_norm(difference, dtype=torch.float64)) / size if size else None

    def _remarkable(self, error: ErrorStats, own: ErrorStats | None) -> bool:
        limit = self._limits.rel_l2_warn_roundoffs * self._target.unit_roundoff
        return error.spoiled > 0 or error.worst > limit or (own is not None and own.worst > limit)

    def _any_spoiled(self, inputs: Any) -> bool:
        for leaf in float_leaves(inputs):
            bad = ~torch.isfinite(leaf)
            if bool(bad.any()) and bool(torch.isfinite(self.shadows.twin(leaf))[bad].any()):
                return True
        return False

    def _on_gradient(self, site: str, call: int, grad: Tensor | None) -> None:
        if grad is None or not grad.is_floating_point() or grad.layout != torch.strided:
            return
        with outside_program():
            twin = self.shadows.twin(grad)
            real = grad.detach()
            if self._loss_scale != 1:
                real, twin = real.float() / self._loss_scale, twin / self._loss_scale
            own = self.shadows.own_gradient(grad)
            self.gradients.append(
                GradDiff(
                    name=site,
                    kind="activation",
                    order=len(self.gradients),
                    dtype=short_dtype(grad.dtype),
                    shape=tuple(grad.shape),
                    error=self._settings.errors(real, twin),
                    call=call,
                    own=None if own is None else relative_l2(own, self.shadows.twin(grad)),
                    own_site=self._backward_site,
                )
            )

    def _on_parameter(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is None or parameter.grad.layout != torch.strided:
            return
        with outside_program():
            own = self.shadows.own_gradient(parameter.grad)
            if own is not None:
                self.own_of_parameters[name] = relative_l2(own, self.shadows.twin(parameter.grad))


@dataclass
class SeenOps:
    """What the operations of one pass told; keys begin with the module."""

    operations: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    flips: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    integers: dict[tuple[str, str], IntegerLoss] = field(default_factory=dict)
    mixes: dict[str, Mix] = field(default_factory=dict)
    faults: dict[tuple[str, bool], NonfiniteOp] = field(default_factory=dict)
    errors: list[OpError] = field(default_factory=list)
    other_ways: Counter[str] = field(default_factory=Counter)  # results that send Python code another way than in the reference


class OpWatcher:
    """`place()` names the module that runs: "" the model's own code, `LOSS` what comes after it. `order()` counts ended calls."""

    def __init__(self, settings: DiffSettings, place: Callable[[], str], order: Callable[[], int]) -> None:
        self._target, self._limits, self._closely = settings.target, settings.limits, settings.closely
        self._place, self._order = place, order
        self.shadows: Twins
        self.seen = SeenOps()
        self._makers: StorageMap[str] = StorageMap()  # the operation that filled a storage

    def __call__(self, op: Operation) -> None:
        backward = in_backward()
        if op.is_view or (backward and not self._closely):
            return
        if op.name == "_local_scalar_dense":
            self._look_for_branch(op)
            return
        first, twin = _first_results(op)
        if first is None:
            return
        site = self._place()
        if not backward:
            self._count(op, site, first)
        if twin is None or op.twin_out is op.out:
            return
        if not backward:
            self._compare(op, site, first, twin)
        if op.name in UNWRITTEN:
            return
        if self._closely and first.is_floating_point() and first.numel() and first.layout == torch.strided:
            name = self._maker(op, first)
            self._look_for_fault(op, name, site, first, twin, backward)
            self._keep_error(name, site, first, twin, backward)

    def _count(self, op: Operation, site: str, first: Tensor) -> None:
        self.seen.operations[(site, op.name, short_dtype(first.dtype))] += 1
        formula = flop_registry.get(op.func.overloadpacket)
        if formula is not None:
            self.seen.flops[site] += int(formula(*op.args, **op.kwargs, out_val=op.out))

    def _compare(self, op: Operation, site: str, first: Tensor, twin: Tensor) -> None:
        if first.dtype in LOW:
            if op.name in COUNT:
                self._look_for_integers(op.name, site, first, twin)
            if op.name in FACTORS or op.name == "convolution":
                self._look_for_mix(op, site)
        if op.name in DECISIONS or first.dtype == torch.bool:
            self._count_flips(op, site)

    def _look_for_branch(self, op: Operation) -> None:
        """A whole number or truth value that Python reads decides what runs next."""
        if isinstance(op.out, (bool, int)) and op.twin_out is not None and op.twin_out != op.out:
            self.seen.other_ways[self._place()] += 1

    def _look_for_mix(self, op: Operation, site: str) -> None:
        if op.name == "convolution":
            sizes = channel_contributions(op.args[0], op.args[1], transposed=op.args[6], groups=op.args[8])
        else:
            left, right = FACTORS[op.name]
            sizes = contributions(op.args[left], op.args[right])
        ratio, index = contribution_ratio(sizes) if sizes is not None else (1.0, 0)
        notable = self._limits.imbalance_notable_roundoffs / self._target.unit_roundoff
        if notable < ratio < math.inf and (site not in self.seen.mixes or self.seen.mixes[site].ratio < ratio):
            self.seen.mixes[site] = Mix(site, op.name, ratio, index)

    def _maker(self, op: Operation, first: Tensor) -> str:
        """A cast only stores what another operation has made: that one is named."""
        source = op.args[0] if op.name == "_to_copy" else None
        name = (self._makers.find(source) if isinstance(source, Tensor) and has_storage(source) else None) or op.name
        if has_storage(first):
            self._makers.put(first, name)
        return name

    def _look_for_fault(self, op: Operation, name: str, site: str, first: Tensor, twin: Tensor, backward: bool) -> None:
        if (site, backward) in self.seen.faults or is_finite(first):
            return
        operands = list(float_leaves((op.args, dict(op.kwargs))))
        spoiled = ~torch.isfinite(first) & torch.isfinite(twin)
        if not bool(spoiled.any()) or not all(is_finite(t) for t in operands):
            return
        reached = twin[torch.isfinite(twin)].abs()
        self.seen.faults[(site, backward)] = NonfiniteOp(
            site=site,
            op=name,
            nan=bool(first.isnan().any()),
            reference_absmax=float(reached.max()),
            input_absmax=tuple(float(t.abs().max()) for t in operands),
            input_absmin=tuple(float(t.abs().min()) for t in operands),
            backward=backward,
        )

    def _keep_error(self, name: str, site: str, first: Tensor, twin: Tensor, backward: bool) -> None:
        """Tells the operations inside a module, the model's own code or the loss apart."""
        own = self.shadows.own_gradient(first) if backward else self.shadows.own_value(first)
        if own is None or len(self.seen.errors) >= _MOST_ERRORS:
            return
        error = compare(own, twin, self._target, self._limits)
        plain = self._limits.rel_l2_warn_roundoffs * self._target.unit_roundoff
        if error.spoiled or 4 * error.rel_l2 > plain or 4 * (error.centred or 0.0) > self._limits.diff_centred_warn:
            self.seen.errors.append(OpError(site, name, error.rel_l2, error.centred, error.spoiled, backward, self._order()))

    def _count_flips(self, op: Operation, site: str) -> None:
        reals = op.out if isinstance(op.out, (tuple, list)) else [op.out]
        twins = op.twin_out if isinstance(op.twin_out, (tuple, list)) else [op.twin_out]
        for real, twin in zip(reals, twins):
            if isinstance(real, Tensor) and not real.is_floating_point() and real.numel():
                flipped, count = self.seen.flips.get((site, op.name), (0, 0))
                self.seen.flips[(site, op.name)] = (flipped + int((real != twin).sum()), count + real.numel())

    def _look_for_integers(self, name: str, site: str, real: Tensor, twin: Tensor) -> None:
        line, wide = real.reshape(-1), twin.reshape(-1)
        step = max(line.numel() // _INTEGERS_LOOKED_AT, 1)
        wide = wide[::step]
        if not wide.numel() or not bool((wide[:64] == wide[:64].round()).all()):
            return
        largest = float(wide.abs().max())
        if largest <= format_of(real.dtype).exact_integers or not bool((wide == wide.round()).all()):
            return
        changed = float((line[::step].to(wide.dtype) != wide).double().mean())
        if changed and len(wide.unique()) > 2:
            self.seen.integers.setdefault((site, name), IntegerLoss(site, name, largest, changed))


def _first_results(op: Operation) -> tuple[Tensor | None, Tensor | None]:
    """The first tensor that an operation gives, and its reference."""
    reals = op.out if isinstance(op.out, (tuple, list)) else [op.out]
    twins = op.twin_out if isinstance(op.twin_out, (tuple, list)) else [op.twin_out] * len(reals)
    return next(((r, t) for r, t in zip(reals, twins) if isinstance(r, Tensor)), (None, None))
