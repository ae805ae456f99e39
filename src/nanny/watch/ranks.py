"""What one of several processes knows by itself: whether there are others, its own gradients before they meet those of others,
and which of its parameters others hold as well.

Nothing in here talks to another process: a collective of ours that one of them does not join would stop them all. What ranks have
to tell each other they write down, each into its own file, and whoever reads the files compares.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .hooks import add_hook
from .names import Held
from .tensors import gradient_of, in_backward, outside_program

_GRAD: Any = Tensor.grad
LOOKED_AGAIN = 2  # the step before which FSDP2 has gathered everything once


def has_group() -> bool:
    """Not `is_initialized`: tests of a program replace that, and there is no group to ask."""
    return dist.is_available() and dist.GroupMember.WORLD is not None


def many_processes() -> bool:
    """Does this process train together with others?"""
    return has_group() and dist.get_world_size() > 1


class LocalGradients:
    """Names the parameters whose gradient is not finite on this process, before it is reduced over all.

    DDP starts to reduce a gradient when torch has accumulated it, after the hooks on the parameter. The sum of a tensor is finite
    only if all of it is: one pass over memory that was written a moment ago. On traced steps it also keeps what `measure` makes
    of each of them, to be compared with what the reduction gives.
    """

    def __init__(
        self,
        parameters: Mapping[int, str],
        owners: Mapping[int, Held],
        guard: Callable[..., None],
        measure: Callable[[Tensor], Tensor],
        when_first_bad: Callable[[], None] = lambda: None,
    ) -> None:
        """`when_first_bad` is called in the midst of backward, once a step."""
        self._names = parameters
        self._guard, self._measure, self._when_first_bad = guard, measure, when_first_bad
        self._measures = False
        self.sent: dict[str, Tensor] = {}
        self._gathered: dict[int, str] = {}  # FSDP2 makes a parameter whole before it is used, and its gradient is whole, too
        self._passes: Counter[str] = Counter()
        self._begun = 0
        self._unhook: list[Callable[[], Any]] = []
        self._hooked: list[Callable[[], Tensor | None]] = []
        self._sums: list[tuple[str, Tensor]] = []  # where the host cannot look at once
        self._bad: dict[str, None] = {}
        self.seen = False
        self.seconds = 0.0  # that the guard has not counted
        for owner in owners.values():
            parameter = owner()
            if parameter is not None and parameter.requires_grad and parameter.is_leaf and not hasattr(parameter, "to_local"):
                self._listen(parameter, owner)

    def _listen(self, parameter: Tensor, owner: Callable[[], Tensor | None]) -> None:
        self._unhook.append(add_hook(parameter.register_post_accumulate_grad_hook, self._after_accumulation))
        self._hooked.append(owner)

    def are_of(self, parameters: Mapping[int, str]) -> bool:
        if self._names is not parameters and self._names.keys() == parameters.keys():
            self._names = parameters
        return self._names is parameters

    def begin(self, traced: bool, sharded: Sequence[nn.Module]) -> None:
        """`sharded`: models that may hold shards; what FSDP2 gathers is there after it was used once."""
        self._bad, self._sums, self.seen, self.seconds = {}, [], False, 0.0
        self._measures, self.sent = traced, {}
        self._passes.clear()
        self._begun += 1
        if traced or self._begun == LOOKED_AGAIN:
            for shard, whole, owner in gathered_parameters(sharded):
                if id(shard) in self._names and id(whole) not in self._gathered:
                    self._gathered[id(whole)] = self._names[id(shard)]
                    self._listen(whole, owner)

    def close(self) -> None:
        while self._unhook:
            self._unhook.pop()()
        for owner in self._hooked:  # torch leaves an empty dictionary behind
            parameter = owner()
            if parameter is not None and not getattr(parameter, "_post_accumulate_grad_hooks", True):
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    def _after_accumulation(self, parameter: Tensor) -> None:
        started = time.perf_counter()
        is_usual = False
        with suppress(Exception):  # what fails here fails again behind the guard, which tells
            is_usual = not self._measures and self._is_plainly_finite(parameter)
        if is_usual:
            self.seconds += time.perf_counter() - started
        else:
            self._guard(self._look, parameter)

    def _is_plainly_finite(self, parameter: Tensor) -> bool:
        """The usual case, without asking who else is watching: a tenth of the time, once per parameter and step."""
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or torch.is_grad_enabled():
            return False
        gradient = _GRAD.__get__(parameter)
        if type(gradient) is not Tensor or gradient.dtype is not torch.float32 or not gradient.is_cpu:
            return False
        self.seen = True
        return gradient.layout is torch.strided and math.isfinite(gradient.sum().item())

    def _look(self, parameter: Tensor) -> None:
        gradient, name = gradient_of(parameter), self._names.get(id(parameter)) or self._gathered.get(id(parameter), "")
        if gradient is None or gradient.layout is not torch.strided or gradient.is_meta:
            return
        self.seen = True
        with outside_program():
            total = torch.sum(gradient, dtype=torch.float32 if gradient.element_size() < 4 else None)
            if gradient.device.type != "cpu":
                self._sums.append((name, total))
            elif not math.isfinite(total.item()) and not bool(gradient.isfinite().all()):
                if not self._bad:
                    self._when_first_bad()
                self._bad[name] = None
            if self._measures:
                self._passes[name] += 1
                self.sent[name] = self._measure(gradient)
            if id(parameter) in self._gathered and self._passes[name] > 1:
                del self.sent[name]  # whether several passes are added here or after the reduction is FSDP2's affair

    def take(self) -> tuple[tuple[str, ...], list[tuple[str, Tensor]]] | None:
        """Parameters with a bad gradient, in the order of backward; and sums that are still on a device. None: none was seen."""
        return (tuple(self._bad), self._sums) if self.seen else None


class SummedParts:
    """Gradients of which each rank has a part (those of a norm in sequence parallel), and their sums as the program makes them,
    in clipping or in the optimizer. Asked for by us, a sum would be a collective.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._shapes = {tuple(p._local_tensor.shape) for p in parameters}
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}  # by the part, which is kept: nobody else gets its id
        mine, dispatch = weakref.ref(self), sys.modules.get("torch.distributed.tensor._dispatch")
        original = getattr(dispatch, "redistribute_local_tensor", None)  # private; tests/distributed fails if it goes

        def redistribute_local_tensor(local: Tensor, given: Any, wanted: Any, *args: Any, **kwargs: Any) -> Any:
            assert original is not None
            result = original(local, given, wanted, *args, **kwargs)
            summed = mine()
            if summed is not None and not torch.is_grad_enabled() and not in_backward():
                with suppress(Exception):  # it is the program's
                    summed._keep(local, result, given, wanted)
            return result

        def put_back() -> None:
            if getattr(dispatch, "redistribute_local_tensor", None) is redistribute_local_tensor:
                dispatch.redistribute_local_tensor = original  # type: ignore[union-attr]

        if original is not None:
            dispatch.redistribute_local_tensor = redistribute_local_tensor  # type: ignore[union-attr]
        self.close = weakref.finalize(self, put_back)

    def _keep(self, local: Tensor, result: Tensor, given: Any, wanted: Any) -> None:
        if tuple(local.shape) in self._shapes and _is_part(given) and not _is_part(wanted):
            self._sums.setdefault(id(local), (local, result))

    def forget(self) -> None:
        self._sums.clear()

    def whole(self, gradient: Any) -> Tensor | None:
        """None: it is a part, and nobody has made the sum yet."""
        if not hasattr(gradient, "placements") or not _is_part(gradient):
            return cast(Tensor, gradient)
        return self._sums.get(id(gradient._local_tensor), (None, None))[1]


def _is_part(laid_out: Any) -> bool:
    return any(how.is_partial() for how in laid_out.placements)


def gathered_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[Tensor, Tensor, Callable[[], Tensor | None]]]:
    """Shards of FSDP2, the whole parameters that stand for them while a module runs, and who gives these if they still are."""
    for module in (module for model in models for module in model.modules()):
        state = getattr(type(module), "_get_fsdp_state", None)  # private; tests/distributed fails if it goes
        for group in getattr(state(module), "_fsdp_param_groups", ()) if state is not None else ():
            for one in group.fsdp_params:
                whole = getattr(one, "_unsharded_param", None)
                if whole is not None and not hasattr(whole, "to_local") and whole.requires_grad:
                    yield one.sharded_param, whole, functools.partial(_attribute, weakref.ref(one), "_unsharded_param")


def _attribute(owner: weakref.ref[Any], name: str) -> Any:
    return getattr(owner(), name, None)


def compiles_backward() -> bool:
    """Then hooks on parameters become part of what is compiled, so there must be none of ours."""
    if (dynamo := sys.modules.get("torch._dynamo")) is None:
        return False
    return is_backward_compiled() or bool(getattr(dynamo.config, "compiled_autograd", False))


def is_backward_compiled() -> bool:
    """One that would begin now: a compiled function that asks for it has switched this on around it."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


class Replicas:
    """Which parameters others hold as well, bit by bit: those that DistributedDataParallel keeps alike; and which belong to a
    stage of a pipeline, with how many ranks hold the same stage.

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
        stage = _stage_class()
        staged: set[str] = set()
        first: list[bool] = []
        for found in gc.get_objects():
            if issubclass(type(found), DistributedDataParallel) and hasattr(found, "process_group"):
                self._add(found)
            elif stage and issubclass(type(found), stage) and hasattr(found, "submod"):
                mine = [self._names[id(p)] for p in found.submod.parameters() if id(p) in self._names]
                staged.update(mine)
                first += [bool(getattr(found, "is_first", True))] if mine else []
        self.receives = bool(first) and not any(first)  # what goes into these models comes from the ranks of earlier stages
        self.stages = {name: len(self.groups[self._group[name] - 1]) if name in self._group else 1 for name in staged}

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
        """Not where a pipeline may have been made since: it can come as late as in the first step."""
        return self._names.keys() == parameters.keys() and not (_stage_class() and not self.stages)

    def group_of(self, name: str, parameter: Tensor) -> int:
        """From 1 on in the order of `groups`; 0: nobody said so; -1: it is this rank's own, a shard or meant to differ."""
        if self.drift_on_purpose or hasattr(parameter, "to_local") or self.stages.get(name) == 1:
            return -1
        return self._group.get(name, 0)

    @property
    def are_synced(self) -> bool:
        """Not inside `no_sync`."""
        return all(getattr(w, "require_backward_grad_sync", True) for ref in self._wrappers if (w := ref()) is not None)


def _stage_class() -> Any:
    """None of a pipeline can be there before its module is."""
    return getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", ())


def shards_of(parameters: Mapping[int, str], owners: Mapping[int, Held]) -> dict[str, int]:
    """Parameters of which a rank holds a part (DTensor), and how many ranks hold the same part."""
    held = {name: parameter for key, name in parameters.items() if (parameter := owners[key]()) is not None}
    return {name: _copies(parameter) for name, parameter in held.items() if hasattr(parameter, "placements")}


def summed_parts(parameters: Mapping[int, str], owners: Mapping[int, Held]) -> SummedParts | None:
    """For parameters that a mesh holds more than once: only their gradients come in parts."""
    held = [owners[key]() for key in parameters]
    copied = [p for p in held if hasattr(p, "placements") and _copies(p) > 1]
    return SummedParts(copied) if copied else None


def _copies(sharded: Any) -> int:
    return math.prod(sharded.device_mesh.size(i) for i, how in enumerate(sharded.placements) if how.is_replicate())
