"""Watches one run of a model under carried shadows: every module call, gradient and decision beside its reference."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.finding import NannyError
from ..core.formats import Format, format_of
from ..core.limits import Limits
from ..measure.errors import compare, dimension_errors, relative_l2
from ..watch.names import plain_name
from ..watch.tensors import LOW, float_leaves, in_backward, is_plain, outside_program, short_dtype
from ..watch.twins import Twins
from .pair_ops import OpWatcher
from .records import LOSS, CallDiff, ErrorStats, GradDiff

_next_node = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_NO_NUMBER = 1 << 63  # AccumulateGrad belongs to no operation of the forward pass


class PairWatcher:
    """Hooks for one pass. `calls` and what follows fill up while the model runs."""

    def __init__(
        self,
        target: Format,
        limits: Limits,
        activation_grads: bool = True,
        closely: bool = False,
        on_call: Callable[[str], None] | None = None,
    ) -> None:
        self._target = target
        self._limits = limits
        self._activation_grads = activation_grads
        self._on_call = on_call
        self._last: tuple[weakref.ref[Tensor], int, ErrorStats] | None = None
        self._sites: list[str] = []
        self._again: list[str] = []
        self._since: list[tuple[int, str]] = []  # from this autograd node on, what is made belongs to this site
        self._backward_site = ""
        self._seen: Counter[str] = Counter()
        self._outer_error = sys.exc_info()[1]
        self.loss_scale = 1.0
        self.failed_at: str | None = None
        self.calls: list[CallDiff] = []
        self.gradients: list[GradDiff] = []
        self.own_of_parameters: dict[str, float] = {}  # error that the last backward step adds to each parameter's gradient
        self.ops = OpWatcher(target, limits, self.site, lambda: len(self.calls), closely)
        self.shadows: Twins

    def site(self) -> str:
        """Of the operation that runs now."""
        if in_backward():
            self.backward_frame()
            return self._backward_site
        return self._sites[-1] if self._sites else LOSS

    def backward_frame(self) -> str | None:
        """The module whose operation is now differentiated; None where that is no operation of the forward pass."""
        node: Any = torch._C._current_autograd_node()
        number = _NO_NUMBER if node is None else node._sequence_nr()
        if number >= _NO_NUMBER:
            return None
        at = bisect_right(self._since, number, key=lambda mark: mark[0]) - 1
        self._backward_site = self._since[at][1] if at >= 0 else LOSS
        return self._backward_site

    @contextmanager
    def watching(self, model: nn.Module, shadows: Twins) -> Iterator[None]:
        self.shadows = self.ops.shadows = shadows
        handles: list[Any] = []
        if type(model).__name__ == "RecursiveScriptModule":
            raise NannyError("the model is a ScriptModule, which cannot be watched; give the Python module it was made from")
        try:
            for name, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(partial(self._before, name)))
                handles.append(module.register_forward_hook(partial(self._after, name), with_kwargs=True, always_call=True))
            for name, parameter in model.named_parameters() if self._activation_grads else ():
                if parameter.requires_grad and parameter.is_leaf:
                    handles.append(parameter.register_post_accumulate_grad_hook(partial(self._on_parameter, plain_name(name))))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, site: str, module: nn.Module, args: Any) -> None:
        if in_backward():  # a checkpoint runs its modules again; their nodes are new ones
            self._again.append(site)
            self._since.append((_next_node(), site))
            return
        self._sites.append(site)
        self._since.append((_next_node(), site))
        self.shadows.open_frame()
        if self._on_call is not None:
            self._on_call(site)

    def _after(self, site: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward():
            self._again.pop()
            self._since.append((_next_node(), self._again[-1] if self._again else LOSS))
            return
        if not self._sites:
            return
        error = sys.exc_info()[1]
        raised = output is None and error is not None and error is not self._outer_error
        if raised:
            self.failed_at = self.failed_at if self.failed_at is not None else site
        else:
            self._measure(site, module, (args, kwargs), output)
        self.shadows.close_frame()
        self._sites.pop()
        self._since.append((_next_node(), self.site()))

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
        with outside_program():
            twin = self.shadows.twin(grad)
            real = grad.detach()
            if self.loss_scale != 1:
                real, twin = real.float() / self.loss_scale, twin / self.loss_scale
            own = self.shadows.own_gradient(grad)
            self.gradients.append(
                GradDiff(
                    name=site,
                    kind="activation",
                    order=len(self.gradients),
                    dtype=short_dtype(grad.dtype),
                    shape=tuple(grad.shape),
                    error=compare(real, twin, self._spacing(grad), self._limits),
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
