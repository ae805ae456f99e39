"""What one of several processes knows by itself: whether there are others, its own gradients before they meet those of others,
and which of its parameters others hold as well.

Nothing in here talks to another process: a collective of ours that one of them does not join would stop them all. What ranks have
to tell each other they write down, each into its own file, and whoever reads the files compares.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .hooks import add_hook
from .names import Held
from .tensors import gradient_of, outside_program


def many_processes() -> bool:
    """Does this process train together with others?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class LocalGradients:
    """Names the parameters whose gradient is not finite on this process, before it is reduced over all.

    DDP starts to reduce a gradient when torch has accumulated it, after the hooks on the parameter. The sum of a tensor is finite
    only if all of it is: one pass over memory that was written a moment ago.
    """

    def __init__(self, parameters: Mapping[int, str], owners: Mapping[int, Held], guard: Callable[..., None]) -> None:
        self._names = parameters
        self._guard = guard
        self._unhook: list[Callable[[], Any]] = []
        self._hooked: list[Held] = []
        self._sums: list[tuple[str, Tensor]] = []  # where the host cannot look at once
        self._bad: dict[str, None] = {}
        self.seen = False
        for owner in owners.values():
            parameter = owner()
            if parameter is not None and parameter.requires_grad and parameter.is_leaf and not hasattr(parameter, "to_local"):
                self._unhook.append(add_hook(parameter.register_post_accumulate_grad_hook, self._accumulated))
                self._hooked.append(owner)

    def are_of(self, parameters: Mapping[int, str]) -> bool:
        if self._names is not parameters and self._names.keys() == parameters.keys():
            self._names = parameters
        return self._names is parameters

    def begin(self) -> None:
        self._bad, self._sums, self.seen = {}, [], False

    def close(self) -> None:
        while self._unhook:
            self._unhook.pop()()
        for owner in self._hooked:  # torch leaves an empty dictionary behind
            parameter = owner()
            if parameter is not None and not getattr(parameter, "_post_accumulate_grad_hooks", True):
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    def _accumulated(self, parameter: Tensor) -> None:
        self._guard(self._look, parameter)

    def _look(self, parameter: Tensor) -> None:
        gradient, name = gradient_of(parameter), self._names.get(id(parameter), "")
        if gradient is None or gradient.layout is not torch.strided or gradient.is_meta:
            return
        self.seen = True
        with outside_program():
            total = torch.sum(gradient, dtype=torch.float32 if gradient.element_size() < 4 else None)
            if gradient.device.type != "cpu":
                self._sums.append((name, total))
            elif not math.isfinite(total.item()) and not bool(gradient.isfinite().all()):
                self._bad[name] = None

    def take(self) -> tuple[tuple[str, ...], list[tuple[str, Tensor]]] | None:
        """Parameters with a bad gradient, in the order of backward; and sums that are still on a device. None: none was seen."""
        return (tuple(self._bad), self._sums) if self.seen else None


def compiles_backward() -> bool:
    """Then hooks on parameters become part of what is compiled, so there must be none of ours."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(getattr(dynamo.config, "compiled_autograd", False))


class Replicas:
    """Which parameters others hold as well, bit by bit: those that DistributedDataParallel keeps alike.

    Wrappers are looked for among all objects, once: one that the loop goes round, or that was made after the model was shown to
    us, counts too.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self._names = parameters
        self.groups: list[tuple[int, ...]] = []  # ranks that are alike
        self._group: dict[str, int] = {}
        self._wrappers: list[weakref.ref[Any]] = []
        self.drift_on_purpose = False
        for found in gc.get_objects():
            if issubclass(type(found), DistributedDataParallel) and hasattr(found, "process_group"):
                self._add(found)

    def _add(self, wrapper: Any) -> None:
        mine = [(n, p) for n, p in wrapper.module.named_parameters() if id(p) in self._names]
        if not mine:
            return
        self._wrappers.append(weakref.ref(wrapper))
        ranks = tuple(dist.get_process_group_ranks(wrapper.process_group))
        if ranks not in self.groups:
            self.groups.append(ranks)
        left_out: Sequence[str] = getattr(wrapper, "parameters_to_ignore", ())
        for name, parameter in mine:
            if name not in left_out and parameter.requires_grad:
                self._group[self._names[id(parameter)]] = 1 + self.groups.index(ranks)
        hooks = [getattr(hook, "__module__", "") for hook, _ in getattr(wrapper, "_comm_hooks", ())]
        self.drift_on_purpose |= any(str(module).endswith("post_localSGD_hook") for module in hooks)

    def are_of(self, parameters: Mapping[int, str]) -> bool:
        return self._names.keys() == parameters.keys()

    def group_of(self, name: str, parameter: Tensor) -> int:
        """From 1 on in the order of `groups`; 0: nobody said so; -1: it is this rank's own, a shard or meant to differ."""
        if self.drift_on_purpose or hasattr(parameter, "to_local"):
            return -1
        return self._group.get(name, 0)

    @property
    def are_synced(self) -> bool:
        """Not inside `no_sync`."""
        return all(getattr(w, "require_backward_grad_sync", True) for ref in self._wrappers if (w := ref()) is not None)
