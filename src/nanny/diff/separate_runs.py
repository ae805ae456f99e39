"""Two runs one after the other, matched by module and call: for models that twins cannot follow, and to check them.

Keeps every module's output of the first run until the second is done, so it takes memory that shadows do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.numbers import plain_name
from ..watch.op_stream import watching
from ..watch.snapshot import kept_state
from ..watch.tensors import float_leaves, in_backward, short_dtype
from .policy import apply_policy, precision
from .records import CallDiff, GradDiff
from .settings import DiffSettings, loss_of
from .watch import modules_by_site


@dataclass
class SeparateRun:
    """What one run left behind."""

    settings: DiffSettings
    scale: float
    outputs: dict[tuple[str, int], tuple[str, Tensor]] = field(default_factory=dict)  # with the module's class
    output_grads: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    loss: float | None = None
    calls: Counter[str] = field(default_factory=Counter)

    def hook(self, site: str, module: nn.Module, args: Any, output: Any) -> None:
        leaf = next(float_leaves(output), None)
        if leaf is None or in_backward():
            return
        key = (site, self.calls[site])
        self.calls[site] += 1
        self.outputs[key] = (type(module).__name__, leaf.detach().clone())
        if leaf.requires_grad:
            leaf.register_hook(partial(self._on_gradient, key))

    def _on_gradient(self, key: tuple[str, int], grad: Tensor | None) -> None:
        if grad is not None:
            self.output_grads[key] = grad.detach().clone()

    def beside(self, reference: SeparateRun) -> tuple[list[CallDiff], list[GradDiff], list[GradDiff]]:
        """Every call and gradient that both runs have, in the order of this one."""
        calls = [
            CallDiff(
                site=site,
                call=call,
                module=module,
                order=order,
                dtype=short_dtype(real.dtype),
                shape=tuple(real.shape),
                error=self.settings.errors(real, reference.outputs[(site, call)][1].float()),
            )
            for order, ((site, call), (module, real)) in enumerate(self.outputs.items())
            if (site, call) in reference.outputs and reference.outputs[(site, call)][1].shape == real.shape
        ]
        activations = [
            self._gradient(site, "activation", order, grad, reference.output_grads[(site, call)], call)
            for order, ((site, call), grad) in enumerate(self.output_grads.items())
            if (site, call) in reference.output_grads and reference.output_grads[(site, call)].shape == grad.shape
        ]
        parameters = [
            self._gradient(name, "parameter", order, grad, reference.grads[name])
            for order, (name, grad) in enumerate(self.grads.items())
            if name in reference.grads
        ]
        return calls, activations, parameters

    def _gradient(self, name: str, kind: str, order: int, real: Tensor, reference: Tensor, call: int = 0) -> GradDiff:
        error = self.settings.errors(real.float() / self.scale, reference.float() / self.scale)
        return GradDiff(name, kind, order, short_dtype(real.dtype), tuple(real.shape), error, call)


@contextmanager
def separate_run(settings: DiffSettings, scale: float, *, low: bool) -> Iterator[SeparateRun]:
    """One run in the target precision (`low`) or in FP32; the model is put back when the context ends."""
    model, (args, kwargs) = settings.model, settings.batch
    run = SeparateRun(settings, scale)
    with ExitStack() as stack:
        state = stack.enter_context(kept_state(model, (settings.batch, settings.labels)))
        stack.enter_context(watching(state))
        if low:
            args, kwargs = stack.enter_context(apply_policy(settings, None))
        for site, module in modules_by_site(model).items():
            stack.callback(module.register_forward_hook(partial(run.hook, site)).remove)
        stack.enter_context(torch.set_grad_enabled(settings.backward))
        with precision(settings) if low else torch.autocast(settings.device, enabled=False):
            output = model(*args, **kwargs)
            loss = loss_of(output, settings)[0] if settings.backward else None
        if loss is not None:
            (loss * scale).backward()
            run.loss = float(loss.detach())
            run.grads = {plain_name(n): p.grad.to_dense().clone() for n, p in model.named_parameters() if p.grad is not None}
        yield run
