"""Functions of Python and torch that the program replaces, refuses or counts."""

from __future__ import annotations

import contextlib
import copy
import pathlib
import queue
import sqlite3
import sys
import warnings
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from ..program import NAN, Program, batch, mlp, program, training
from .loops import _loop, _usual_but_one


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("not in this house")


def _refused(name: str, *places: tuple[Any, str]) -> None:
    @program(f"{name}_refused", "patches")
    def refused(seed: int) -> Program:
        made = _usual_but_one(6)

        def loop(watch: Any) -> None:
            with contextlib.ExitStack() as patches:
                for i in range(6):
                    if i == 1:
                        for owner, attribute in places:
                            patches.enter_context(mock.patch.object(owner, attribute, _refuse))
                    with watch.step(i):
                        value = made.step(i)
                    made.seen.append(i)
                    del value
                    if i == 4:
                        watch.close()

        return _loop(made, loop)


_refused("databases_are", (sqlite3, "connect"))


_refused("queues_and_copies_are", (queue, "Queue"), (queue, "SimpleQueue"), (copy, "copy"), (copy, "deepcopy"))


_refused("printing_is", (sys.modules["builtins"], "print"), (sys.modules["builtins"], "sorted"))


_refused(
    "reads_by_the_host_are",
    *((torch.Tensor, name) for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")),
)


_refused(
    "sums_and_norms_are",
    *((torch, name) for name in ("stack", "cat", "isfinite", "aminmax", "zeros", "empty", "tensor", "_foreach_norm")),
    (torch.linalg, "vector_norm"),
)


@program("functions_of_torch_counted", "patches")
def counted(seed: int) -> Program:
    """The program counts its calls of functions of torch, as test doubles do; calls of others are not its own."""
    model, calls = mlp(), {}  # type: tuple[Any, dict[str, int]]

    def counting(name: str, original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__") == __name__:
                calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        return wrapper

    def loss(i: int) -> torch.Tensor:
        return torch.cat([model(batch(i)), torch.zeros(1, 4)]).square().mean()

    made = training(model, loss, extra=lambda: calls)

    def loop(watch: Any) -> None:
        with contextlib.ExitStack() as patches:
            for name in ("cat", "zeros", "stack", "isfinite"):
                patches.enter_context(mock.patch.object(torch, name, counting(name, getattr(torch, name))))
            for i in range(3):
                with watch.step(i):
                    made.see(made.step(i))

    return _loop(made, loop)


@program("operations_that_warn_each_time", "patches")
def warns_each_time(seed: int) -> Program:
    """Warnings of torch's own kernels are counted by a `showwarning` of the user: a second run of them would warn again."""
    model, shown = mlp(), []  # type: tuple[Any, list[str]]

    def loss(i: int) -> torch.Tensor:
        out = model(batch(i))
        target = torch.zeros(4, 4) if i else torch.zeros(1, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, category, *rest, **named: shown.append(category.__name__)
            long = torch.searchsorted(torch.arange(8.0)[::2].expand(4, 4).t(), torch.ones(4, 4).t())
            return F.mse_loss(out, target) + torch.range(0, 3).mean() + long.sum() + torch.std(out[:1, :1]) * 0

    return training(model, loss, extra=lambda: shown)


@program("warning_with_a_stack_level_is_told_once", "patches")
def stack_level(seed: int) -> Program:
    """A forward warns in the name of its caller; Python tells it once for each line, so the line must stay the same one."""
    shown: list[Any] = []

    class Old(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            warnings.warn("use New", DeprecationWarning, stacklevel=2)
            return super().forward(x)

    model = nn.Sequential(Old(8, 8), nn.ReLU(), Old(8, 4))
    made = training(model, lambda i: model(batch(i)).square().mean(), steps=4, extra=lambda: shown)

    def loop(watch: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, category, file, *rest, **named: shown.append(pathlib.Path(file).name)
            for i in range(4):
                with watch.step(i):
                    made.see(made.step(i))

    return _loop(made, loop)


@program("parameters_registered_by_a_patched_method", "patches")
def patched_registration(seed: int) -> Program:
    """`nn.Module.register_parameter` is replaced while a child is made inside a step, on the meta device, and filled later."""
    model = mlp()
    made = training(model, lambda i: model(batch(i)).square().mean(), steps=4)
    usual = made.step

    def step(i: int) -> Any:
        if i == 1:
            original = nn.Module.register_parameter

            def empty(self: Any, name: str, param: Any) -> None:
                original(self, name, param)
                if param is not None:
                    self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

            nn.Module.register_parameter = empty
            try:
                model[0] = nn.Linear(8, 8)
            finally:
                nn.Module.register_parameter = original
            model[0].to_empty(device="cpu")
            nn.init.constant_(model[0].weight, 0.1)
            nn.init.zeros_(model[0].bias)
            made.optimizers[0].state.clear()
            made.optimizers[0].param_groups[0]["params"] = list(model.parameters())
        return usual(i)

    made.step = step
    return made


def _around(name: str, theme: str, **patches: Any) -> None:
    """Functions of Python replaced while training, as tools that freeze time or the disk do."""

    @program(name, theme)
    def patched(seed: int) -> Program:
        model = mlp()
        made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=6)

        def loop(watch: Any) -> None:
            before: list[tuple[Any, str, Any]] = []
            try:
                for i in range(6):
                    if i == 1:
                        for path, value in patches.items():
                            space, _, attribute = path.partition("__")
                            thing = sys.modules[space]
                            before.append((thing, attribute, getattr(thing, attribute)))
                            setattr(thing, attribute, value)
                    with watch.step(i):
                        made.see(made.step(i))
                    if i == 4:
                        watch.close()
            finally:
                for thing, attribute, value in before:
                    setattr(thing, attribute, value)

        made.loop = loop
        return made


class _Backwards:
    now = 1e9

    def __call__(self) -> float:
        self.now -= 3600.0
        return self.now


_around("time_stands_still", "patches", time__time=lambda: 0.0, time__monotonic=lambda: 0.0,
        time__perf_counter=lambda: 0.0, time__process_time=lambda: 0.0, time__thread_time=lambda: 0.0)  # fmt: skip


_around("time_runs_backwards", "patches", time__time=_Backwards(), time__monotonic=_Backwards(),
        time__perf_counter=_Backwards(), time__process_time=_Backwards(), time__sleep=_refuse)  # fmt: skip


_around("time_is_no_number", "patches", time__time=lambda: NAN, time__monotonic=lambda: None,
        time__perf_counter=lambda: "noon", time__process_time=_refuse)  # fmt: skip


_around("no_disk_for_python", "patches", os__stat=_refuse, os__open=_refuse, os__makedirs=_refuse, os__fsync=_refuse)


_around("open_is_refused", "patches", builtins__open=_refuse)


_around("json_and_random_are_refused", "patches", json__dumps=_refuse, random__random=_refuse, math__isfinite=_refuse)


_around("threads_are_refused", "patches", threading__Thread=_refuse, threading__RLock=_refuse, threading__local=_refuse)


_around("inspection_is_refused", "patches", sys___getframe=_refuse, inspect__signature=_refuse, gc__get_objects=_refuse)


_around("warnings_and_process_are_refused", "patches", warnings__warn=_refuse, os__getpid=_refuse, os__getcwd=_refuse)


@program("own_modules_forgotten", "patches")
def forgotten(seed: int) -> Program:
    """Modules of a tool and of the standard library vanish from sys.modules, as reloaders do."""
    model = mlp()
    made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=6)

    def loop(watch: Any) -> None:
        gone: dict[str, Any] = {}
        try:
            for i in range(6):
                if i == 2:
                    for name in list(sys.modules):
                        if name.partition(".")[0] in ("nanny", "sqlite3", "zlib", "struct", "statistics"):
                            gone[name] = sys.modules.pop(name)
                with watch.step(i):
                    made.see(made.step(i))
            watch.close()
        finally:
            for name in list(sys.modules):
                if name.partition(".")[0] == "nanny":
                    del sys.modules[name]
            sys.modules.update(gone)

    made.loop = loop
    return made
