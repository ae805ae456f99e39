"""Watches one run of a model under carried shadows: every module call, gradient and decision beside its reference."""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..diff_records import CallDiff, ErrorStats, GradDiff, IntegerLoss, Mix, OpFault
from ..formats import Format, format_of
from ..limits import Limits
from ..measure.errors import compare, contribution_ratio, dimension_errors
from ..records import NannyError
from .names import float_leaves, short_dtype
from .shadow import LOW, CarriedShadows, Operation, aside, in_backward

# Decisions: their results pick, route or mask. Comparisons count apart from them.
DECISIONS = frozenset(["argmax", "argmin", "topk", "sort", "argsort", "multinomial", "searchsorted", "bucketize", "kthvalue"])
_INTEGERS_LOOKED_AT = 4096
_MATMULS = frozenset(["mm", "addmm"])


class PairWatcher:
    """Hooks for one pass. `calls` and what follows fill up while the model runs."""

    def __init__(self, target: Format, limits: Limits, activation_grads: bool = True, look_for_faults: bool = False) -> None:
        self._target = target
        self._limits = limits
        self._activation_grads = activation_grads
        self._look_for_faults = look_for_faults
        self._last: tuple[weakref.ref[Tensor], int, ErrorStats] | None = None
        self._sites: list[str] = []
        self._seen: Counter[str] = Counter()
        self._outer_error = sys.exc_info()[1]
        self.loss_scale = 1.0
        self.failed_at: str | None = None
        self.calls: list[CallDiff] = []
        self.gradients: list[GradDiff] = []
        self.flips: dict[tuple[str, str], tuple[int, int]] = {}
        self.operations: Counter[tuple[str, str, str]] = Counter()
        self.integers: dict[tuple[str, str], IntegerLoss] = {}
        self.faults: dict[str, OpFault] = {}
        self.mixes: dict[str, Mix] = {}
        self.shadows: CarriedShadows

    @property
    def site(self) -> str:
        return self._sites[-1] if self._sites else ""

    @contextmanager
    def watching(self, model: nn.Module, shadows: CarriedShadows) -> Iterator[None]:
        self.shadows = shadows
        handles: list[Any] = []
        if type(model).__name__ == "RecursiveScriptModule":
            raise NannyError("the model is a ScriptModule, which cannot be watched; give the Python module it was made from")
        try:
            for name, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(partial(self._before, name)))
                handles.append(module.register_forward_hook(partial(self._after, name), with_kwargs=True, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, site: str, module: nn.Module, args: Any) -> None:
        if not in_backward():  # a checkpoint runs its modules again
            self._sites.append(site)
            self.shadows.open_frame()

    def _after(self, site: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward() or not self._sites:
            return
        error = sys.exc_info()[1]
        raised = output is None and error is not None and error is not self._outer_error
        if raised:
            self.failed_at = self.failed_at if self.failed_at is not None else site
        else:
            self._measure(site, module, (args, kwargs), output)
        self.shadows.close_frame()
        self._sites.pop()

    def _measure(self, site: str, module: nn.Module, inputs: Any, output: Any) -> None:
        leaves = list(float_leaves(output))
        if not leaves:
            return
        call = self._seen[site]
        self._seen[site] += 1
        with aside():
            pairs = [(leaf.detach(), self.shadows.twin(leaf)) for leaf in leaves]
            passed_through = self._last_error(leaves)
            errors = [passed_through] if passed_through else [
                compare(real, twin, self._spacing(real), self._limits) for real, twin in pairs
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
        if self._activation_grads and torch.is_grad_enabled() and not passed_through:
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
        own = compare(value, twin, self._spacing(leaf), self._limits)
        difference = (leaf.detach().to(twin.dtype) - value.to(twin.dtype)).nan_to_num(0.0, 0.0, 0.0)
        size = error.reference_norm
        return own, float(torch.linalg.vector_norm(difference, dtype=torch.float64)) / size if size else None

    def _spacing(self, real: Tensor) -> Format:
        return format_of(real.dtype) if real.dtype in LOW else self._target

    def _remarkable(self, error: ErrorStats, own: ErrorStats | None) -> bool:
        limit = self._limits.rel_l2_warn_roundoffs * self._target.unit_roundoff
        return error.spoiled > 0 or error.worst > limit or (own is not None and own.worst > limit)

    def _any_spoiled(self, inputs: Any) -> bool:
        for leaf in float_leaves(inputs):
            bad = ~torch.isfinite(leaf)
            if bool(bad.any()) and bool(torch.isfinite(self.shadows.twin(leaf))[bad].any()):
                return True
        return False

    def _on_gradient(self, site: str, call: int, grad: Tensor) -> None:
        if not grad.is_floating_point() or grad.layout != torch.strided:
            return
        with aside():
            twin = self.shadows.twin(grad)
            real = grad.detach()
            if self.loss_scale != 1:
                real, twin = real.float() / self.loss_scale, twin / self.loss_scale
            self.gradients.append(
                GradDiff(
                    name=site,
                    kind="activation",
                    order=len(self.gradients),
                    dtype=short_dtype(grad.dtype),
                    shape=tuple(grad.shape),
                    error=compare(real, twin, self._spacing(grad), self._limits),
                    call=call,
                )
            )

    def on_op(self, op: Operation) -> None:
        """Counts what ran in which dtype, decisions that flip and whole numbers that are lost. Runs inside the dispatch."""
        if op.is_view or in_backward():
            return
        first = next((t for t in (op.out if isinstance(op.out, (tuple, list)) else [op.out]) if isinstance(t, Tensor)), None)
        if first is None:
            return
        self.operations[(self.site, op.name, short_dtype(first.dtype))] += 1
        if op.twin_out is None or op.twin_out is op.out:
            return
        if first.dtype in LOW and op.name in ("_to_copy", "arange", "cumsum", "linspace", "embedding", "add", "mul"):
            self._look_for_integers(op.name, first, op.twin_out)
        if op.name in _MATMULS and first.dtype in LOW:
            self._look_for_mix(op)
        if op.name in DECISIONS or first.dtype == torch.bool:
            self._count_flips(op)
        if self._look_for_faults and first.is_floating_point() and self.site not in self.faults:
            self._look_for_fault(op, first)

    def _look_for_mix(self, op: Operation) -> None:
        a, b = op.args[-2:] if op.name == "mm" else op.args[1:3]
        ratio, index = contribution_ratio(a, b)
        notable = self._limits.imbalance_notable_roundoffs / self._target.unit_roundoff
        if notable < ratio < math.inf and (self.site not in self.mixes or self.mixes[self.site].ratio < ratio):
            self.mixes[self.site] = Mix(self.site, op.name, ratio, index)

    def _look_for_fault(self, op: Operation, first: Tensor) -> None:
        if not first.numel() or _is_finite(first):
            return
        twin = op.twin_out[0] if isinstance(op.twin_out, (tuple, list)) else op.twin_out
        operands = list(float_leaves((op.args, dict(op.kwargs))))
        spoiled = ~torch.isfinite(first) & torch.isfinite(twin)
        if not bool(spoiled.any()) or not all(_is_finite(t) for t in operands):
            return
        reached = twin[torch.isfinite(twin)].abs()
        self.faults[self.site] = OpFault(
            site=self.site,
            op=op.name,
            nan=bool(first.isnan().any()),
            reference_absmax=float(reached.max()),
            input_absmax=tuple(float(t.abs().max()) for t in operands),
            input_absmin=tuple(float(t.abs().min()) for t in operands),
        )

    def _count_flips(self, op: Operation) -> None:
        reals = op.out if isinstance(op.out, (tuple, list)) else [op.out]
        twins = op.twin_out if isinstance(op.twin_out, (tuple, list)) else [op.twin_out]
        for real, twin in zip(reals, twins):
            if isinstance(real, Tensor) and not real.is_floating_point() and real.numel():
                flipped, count = self.flips.get((self.site, op.name), (0, 0))
                self.flips[(self.site, op.name)] = (flipped + int((real != twin).sum()), count + real.numel())

    def _look_for_integers(self, name: str, real: Tensor, twin: Tensor) -> None:
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
            self.integers.setdefault((self.site, name), IntegerLoss(self.site, name, largest, changed))


def _is_finite(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
