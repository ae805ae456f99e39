"""Examines a forward pass that has already been: it is made once more beside FP32, and everything is put back.

The step that went wrong is at hand until the optimizer changes the weights. What cannot be made again without a trace (calls of
other processes, hooks of the user, inputs written over) is left alone, and why is said. Compiled parts run
as they were written: what is compared with FP32 is then not the very kernels of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]

from ..core.examination import Examination
from ..watch.aside import can_uncompile, uncompiled
from ..watch.calls import ModelCall
from ..watch.names import is_compiled
from ..watch.op_facts import is_collective
from ..watch.op_stream import Op, Stopped, watching
from ..watch.ranks import many_processes
from ..watch.snapshot import kept_state
from ..watch.tensors import tensors_in
from .sanitizer import Sanitizer


class NotAgain(Exception):
    """Why a forward pass cannot be made again, for people."""


def examine_again(
    calls: Sequence[ModelCall],
    models: Sequence[tuple[nn.Module, str]],
    step: int,
    scale: Callable[[], float | None] | None = None,
    try_remedies: bool = True,
) -> Examination:
    """The examination of these calls. Raises `NotAgain`; whatever happens, model, inputs and random numbers are as they were."""
    obstacle = _obstacle(calls)
    if obstacle:
        raise NotAgain(obstacle)
    compiled = any(is_compiled(part) for model, _ in models for part in model.modules())
    given = [tensor for call in calls for tensor in call.inputs]
    sanitizer = Sanitizer(models, step, scale, try_remedies=try_remedies)
    with ExitStack() as kept:
        for module in {id(call.module): call.module for call in calls}.values():
            # backward checks that nobody has written into what it saved: what is put back counts as never written
            written = [t for t in (*module.parameters(), *module.buffers(), *given) if not t.is_inference()]
            kept.enter_context(_unsafe_preserve_version_counter(tuple(written)))
            kept.enter_context(watching(kept.enter_context(kept_state(module, [(c.args, c.kwargs) for c in calls]))))
        if many_processes():
            kept.enter_context(watching(_NoCollectives()))
        sanitizer.open()
        try:
            with (
                uncompiled() if compiled else nullcontext(),
                torch._C._EnableTorchFunction(),
            ):  # for the program's own classes; hooks of ours run without
                results = [call.make_again() for call in calls]
                _make_backward_again(calls, results, sanitizer)
        except Stopped as error:
            raise NotAgain(str(error)) from None
        except Exception as error:  # noqa: BLE001 - the program's own, and no business of the run
            raise NotAgain(f"the second run raised {type(error).__name__}: {error}") from None
        finally:
            examination = sanitizer.close()
    same = [call.gave(result) for call, result in zip(calls, results)]
    other = {"uncompiled": True} if compiled else {"other_bits": True} if False in same else {}
    facts = {**examination.facts, "again": True} | other
    return replace(examination, facts=facts)


def _make_backward_again(calls: Sequence[ModelCall], results: Sequence[Any], sanitizer: Sanitizer) -> None:
    """From the gradients that arrived at the outputs, where they were kept. Nothing is added to any parameter's gradient."""
    pairs = [
        (out, call.gradients[i]) for call, r in zip(calls, results) for i, out in enumerate(tensors_in(r)) if i in call.gradients
    ]
    modules = [module for call in calls for module in call.module.modules()]
    weights = list(
        {id(p): p for module in modules for p in module._parameters.values() if p is not None and p.requires_grad}.values()
    )
    if not pairs or not weights or any(m._backward_hooks or m._backward_pre_hooks for m in modules):
        return
    if any(p._backward_hooks or not p.is_leaf for p in weights):
        return
    outputs, arrived = zip(*pairs)
    made = torch.autograd.grad(outputs, weights, arrived, allow_unused=True)
    sanitizer.note_gradients({id(p): g for p, g in zip(weights, made) if g is not None})


class _NoCollectives:
    """A second run of one process alone must not wait for the others, who do not know of it."""

    on_trouble: Callable[[Any], None] | None = None

    def before(self, op: Op) -> None:
        if is_collective(op.func) or op.func.namespace == "fsdp":
            raise Stopped(f"the model calls {op.name} in its forward pass, which one process cannot do alone")

    def after(self, op: Op, state: Any) -> None: ...

    def passed_by(self, op: Op) -> None:
        raise Stopped("the model computes with tensors that several processes hold together")


def _obstacle(calls: Sequence[ModelCall]) -> str:
    if not calls:
        return "no call of the model was seen"
    if not all(call.is_intact for call in calls):
        return "its inputs have been written over since"
    if any(call.has_modes for call in calls) or torch._C._len_torch_dispatch_stack():
        return "a mode of the program's own was on"
    for module in (part for call in calls for part in call.module.modules()):
        if is_compiled(module) and not can_uncompile():
            return "part of the model is compiled"
        if module._forward_hooks or module._forward_pre_hooks:
            return "the model has hooks, which would run a second time"
    return ""
