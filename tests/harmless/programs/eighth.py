"""Eighth round: by someone who knows the promise and torch alone. Signatures that collide with those of hooks, classes that are
two things at once or refuse what others do to them, clocks and streams that lie, ranks that are threads, backward passes in each
other, packed weights of C++, children started in odd ways, and the ways in which a program looks at itself."""

from __future__ import annotations

import abc
import array
import ast
import asyncio
import bdb
import builtins
import collections
import concurrent.futures
import contextlib
import contextvars
import ctypes
import functools
import gc
import io
import json
import multiprocessing
import operator
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import types
import unittest
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ..program import Program, mlp, program, training
from .fourth_process import batch

NAN = float("nan")


def _sick(i: int, at: int = 2) -> torch.Tensor:
    return batch(i) * (NAN if i == at else 1)


# ---- signatures and classes ----


@program("eighth_arguments_named_like_those_of_hooks", "eighth signatures")
def hook_names(seed: int) -> Program:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(
            own, /, x: torch.Tensor, *rest: Any, self: Any = 1, module: Any = 2, input: Any = 3, output: Any = 4,
            args: Any = 5, kwargs: Any = 6, result: Any = 7, func: Any = 8, step: Any = 9, name: Any = 10, **more: Any,
        ) -> Any:  # fmt: skip
            total = own.inner(x) * (module + input + output + args + kwargs + result + func + step + name)
            return {"x": total + sum(more.values()), "rest": rest}

    class Mapping(collections.UserDict):  # type: ignore[type-arg]
        pass

    model = Named()
    inside = functools.partial(model.__call__, module=1)

    def loss(i: int) -> torch.Tensor:
        one = model(
            _sick(i), None, ..., **Mapping(module=1, input=2, output=3, args=1, kwargs=2, result=1, func=1, step=i, name=1)
        )
        two = inside(batch(i), hook=1, fn=2, cls=3, tensor=4, forward=5, callback=torch.ones(()))
        return (one["x"] + two["x"]).square().mean()

    return training(model, loss, steps=4)


class _Counted:
    """A descriptor that gives another function each time it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __get__(self, thing: Any, kind: Any = None) -> Any:
        if thing is None:
            return self
        self.reads += 1
        sign = -1 if self.reads % 2 else 1
        return lambda x: thing.inner(x) * sign


@program("eighth_forward_differs_each_time_it_is_read", "eighth signatures")
def read_forward(seed: int) -> Program:
    counted = _Counted()

    class Moody(nn.Module):
        forward = counted

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

    model = nn.Sequential(Moody(), nn.ReLU())
    return training(model, lambda i: model(_sick(i)).sum(), steps=5, extra=lambda: counted.reads)


class _Jealous(type(nn.Module)):  # type: ignore[misc]
    asked = 0

    def __instancecheck__(cls, thing: Any) -> bool:
        _Jealous.asked += 1
        return super().__instancecheck__(thing)

    def __subclasscheck__(cls, kind: Any) -> bool:
        raise TypeError("nobody asks for my subclasses")


@program("eighth_classes_refuse_subclasses_and_questions", "eighth classes")
def refuse_subclasses(seed: int) -> Program:
    _Jealous.asked = 0

    def final(cls: Any, **more: Any) -> None:
        raise TypeError(f"{cls.__name__} derives from a class that is final")

    class Layer(nn.Linear, metaclass=_Jealous):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__class__":
                raise TypeError("my class is mine")
            super().__setattr__(name, value)

    class Step(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]

        def __setattr__(self, name: str, value: Any) -> None:
            if vars(self).get("closed"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    class Scale(torch.amp.GradScaler):
        __hash__ = None  # type: ignore[assignment]

        def __setattr__(self, name: str, value: Any) -> None:
            if vars(self).get("closed") and not name.startswith("_"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    for kind in (Layer, Step, Scale):
        kind.__init_subclass__ = classmethod(final)  # type: ignore[method-assign, assignment]
    model = nn.Sequential(Layer(8, 8), nn.ReLU(), Layer(8, 2))
    optimizer, scaler = Step(model.parameters(), 0.05), Scale("cpu", init_scale=256.0)
    optimizer.closed = scaler.closed = True

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(_sick(i)).square().mean()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        return value

    return Program([model], [optimizer], step, steps=5, scaler=scaler, extra=lambda: _Jealous.asked)


@program("eighth_modules_that_are_also_dictionaries_errors_and_threads", "eighth classes")
def two_things(seed: int) -> Program:
    class Cache(nn.Linear, dict):  # type: ignore[misc]
        __hash__ = object.__hash__

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self[len(self)] = float(x.detach().sum())
            return super().forward(x)

    class Failing(nn.Linear, ValueError):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.args:
                self.args = (1,)
                raise self
            return super().forward(x)

    class Around(nn.Module, contextlib.ContextDecorator):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.depth = 0

        def __enter__(self) -> Around:
            self.depth += 1
            return self

        def __exit__(self, *error: Any) -> bool:
            self.depth -= 1
            return isinstance(error[1], ValueError)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.depth

    cache, failing, around = Cache(8, 8), Failing(8, 8), Around()
    model = nn.ModuleList([cache, failing, around])

    def loss(i: int) -> torch.Tensor:
        out = cache(_sick(i))
        with around:
            out = failing(out)
        with around:
            return around(out).mean()

    return training(model, loss, torch.optim.Adam(model.parameters()), steps=5, extra=lambda: [dict(cache), len(failing.args)])


@program("eighth_call_is_made_of_other_callables", "eighth classes")
def odd_calls(seed: int) -> Program:
    class Twice(nn.Linear):
        def _run(self, times: int, x: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                x = nn.Module.__call__(self, x).tanh()
            return x

        __call__ = functools.partialmethod(_run, 2)  # type: ignore[assignment]

    class Chosen(nn.Linear):
        @functools.singledispatchmethod
        def forward(self, x: Any) -> Any:
            raise TypeError(type(x).__name__)

        @forward.register
        def _(self, x: torch.Tensor) -> Any:
            return F.linear(x, self.weight, self.bias)

        @forward.register
        def _(self, x: list) -> Any:  # type: ignore[type-arg]
            return [self(one) for one in x]

    class Called(nn.Linear):
        __call__ = property(lambda self: operator.methodcaller("forward", batch(1)).__call__)  # type: ignore[assignment]

    model = nn.Sequential(Twice(8, 8), Chosen(8, 8), Called(8, 8))

    def loss(i: int) -> torch.Tensor:
        x = model[0](_sick(i))
        one, (two, three) = model[1](x), model[1]([x, x + 1])
        with contextlib.suppress(TypeError):
            model[1]("x")
        return (one + two + three).mean() + model[2].forward(x).mean()

    return training(model, loss, steps=4)


@program("eighth_outputs_of_structures_torch_and_python_have", "eighth outputs")
def structures(seed: int) -> Program:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, kind: int) -> Any:
            y = self.inner(x)
            return [
                lambda: torch.max(y, 1),
                lambda: torch.sort(y, stable=True),
                lambda: nn.utils.rnn.pack_sequence([y[0:1], y[1:2]]),
                lambda: types.MappingProxyType({"a": y, "b": types.MappingProxyType({"c": y})}),
                lambda: collections.ChainMap({"a": y}, {"b": y}),
                lambda: collections.deque([y, y], maxlen=1),
                lambda: collections.UserList([y]),
                lambda: memoryview(y.detach().numpy()),
                lambda: array.array("f", y.flatten().tolist()),
                lambda: (ctypes.c_float * 3)(*y.flatten().tolist()[:3]),
                lambda: np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
                lambda: y.shape,
                lambda: y.grad_fn,
                lambda: torch.linalg.svd(y),
                lambda: (y.untyped_storage(), y.dtype, y.device, torch.finfo(y.dtype)),
                lambda: weakref.WeakValueDictionary({1: y}),
                lambda: map(torch.sum, [y]),
                lambda: {y: y, (1, y): 2},
                lambda: ast.parse("a + b"),
            ][kind]()

    model = Odd()

    def loss(i: int) -> torch.Tensor:
        total = torch.zeros(())
        for kind in range(19):
            out = model(_sick(i, 4) if kind != 13 else batch(i), kind)
            match kind:
                case 0 | 1:
                    total = total + out.values.sum()
                case 2:
                    total = total + out.data.sum()
                case 3:
                    total = total + out["b"]["c"].sum()
                case 13:
                    total = total + out.S.sum()
                case 16:
                    total = total + next(out)
        return total

    return training(model, loss, steps=5)


# ---- what the program looks at ----


@program("eighth_asks_torch_which_modes_and_states_are_on", "eighth looks")
def asks(seed: int) -> Program:
    seen: list[Any] = []

    def look() -> None:
        seen.append(
            [
                torch._C._len_torch_function_stack(), type(torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)),
                torch._C._is_torch_function_mode_enabled(), torch._C._is_torch_function_enabled(), torch.jit.is_tracing(),
                torch.compiler.is_compiling(), torch._C._get_tracing_state() is None, torch.is_anomaly_enabled(),
                torch._C._current_graph_task_id() != -1, torch._C._autograd._profiler_enabled(), torch.is_grad_enabled(),
                str(torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()), torch.get_num_threads(),
                str(torch.overrides._get_current_function_mode()), sys.gettrace() is None, sys.getprofile() is None,
                threading.active_count() < 100, gc.isenabled(), sys.getrecursionlimit(),
            ]
        )  # fmt: skip

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            look()
            out = super().forward(x)
            if out.requires_grad:
                out.register_hook(lambda grad: look())
            return out * (1 + torch._C._len_torch_function_stack())

    model = nn.Sequential(Looks(8, 8), nn.ReLU(), Looks(8, 2))
    return training(model, lambda i: model(_sick(i)).square().mean(), steps=5, extra=lambda: seen)


@program("eighth_counts_the_dispatch_modes_that_are_on", "eighth looks")
def counts_modes(seed: int) -> Program:
    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + torch._C._len_torch_dispatch_stack())

    model = nn.Sequential(Counts(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return training(model, lambda i: model(_sick(i)).square().mean(), steps=5)


@program("eighth_referrers_and_ages_of_its_own_tensors", "eighth looks")
def referrers(seed: int) -> Program:
    seen: list[Any] = []
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        x = _sick(i)
        out = model(x)
        value = out.mean()
        seen.append([sys.getrefcount(x), sys.getrefcount(out), sys.getrefcount(value), out._version, x._version])
        value.backward()
        optimizer.step()
        seen.append([sys.getrefcount(x), sys.getrefcount(out), sys.getrefcount(value)])
        seen.append([x.untyped_storage()._use_count() if hasattr(x.untyped_storage(), "_use_count") else 0, out._use_count()])
        gone = weakref.ref(out)
        del out
        seen.append([gone() is None])
        return value

    return Program([model], [optimizer], step, steps=5, extra=lambda: seen)


@program("eighth_tensor_rises_from_the_dead", "eighth looks")
def resurrected(seed: int) -> Program:
    kept: list[Any] = []

    class Risen(torch.Tensor):
        def __del__(self) -> None:
            if len(kept) < 6:
                kept.append(self)

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).as_subclass(Risen)  # type: ignore[arg-type]

    model = nn.Sequential(Layer(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def loss(i: int) -> torch.Tensor:
        out = model(_sick(i)).square().mean()
        return out + sum(float(one.detach().nan_to_num().sum()) for one in kept[:2]) * 0.001

    return training(model, loss, steps=5, extra=lambda: len(kept))


@program("eighth_under_a_debugger_that_stops_at_each_line", "eighth looks")
def debugger(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    lines: list[int] = []

    class Stops(bdb.Bdb):
        def user_line(self, frame: Any) -> None:
            if frame.f_code.co_filename == __file__:
                lines.append(frame.f_lineno)
            self.set_step()

        def user_exception(self, frame: Any, error: Any) -> None:
            if frame.f_code.co_filename == __file__:
                lines.append(-frame.f_lineno)

    def one(i: int) -> Any:
        optimizer.zero_grad()
        value = model(_sick(i)).square().mean()
        try:
            if i == 1:
                raise LookupError(i)
        except LookupError:
            value = value * 2
        value.backward()
        optimizer.step()
        return value

    made = Program([model], [optimizer], one, extra=lambda: lines)

    def loop(watch: Any) -> None:
        for i in range(4):
            with watch.step(i):
                made.see(Stops(skip=["torch*", "nanny*"]).runcall(one, i))

    made.loop = loop
    return made


@program("eighth_as_a_test_case_with_warnings_and_subtests", "eighth looks")
def test_case(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    counts: list[Any] = []
    made = Program([model], [optimizer], lambda i: None, extra=lambda: counts)

    def loop(watch: Any) -> None:
        class Case(unittest.TestCase):
            def test_all(self) -> None:
                for i in range(5):
                    with self.subTest(i=i), self.assertWarns(UserWarning) as caught, self.assertNoLogs("torch", "DEBUG"):
                        with watch.step(i):
                            optimizer.zero_grad()
                            value = model(_sick(i)).mean()
                            warnings.warn("mine", stacklevel=1)
                            value.backward()
                            optimizer.step()
                            made.see(value)
                            assert bool(value.isfinite())
                        counts.append(str(caught.warning))

        result = unittest.TextTestRunner(io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(Case))
        counts.append([result.testsRun, len(result.failures), len(result.errors)])

    made.loop = loop
    return made


# ---- surroundings that lie ----


@program("eighth_clocks_go_backward_and_fail", "eighth surroundings")
def clocks(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    made = Program([model], [optimizer], lambda i: None)
    ticks = iter([1e9, 5.0, -1.0, NAN, float("inf"), 0.0] * 100000)

    def lying() -> float:
        return next(ticks)

    def lying_ns() -> int:
        value = next(ticks)
        return int(value) if value == value and abs(value) < 1e300 else -(10**30)

    def failing() -> float:
        raise OSError("no clock")

    def loop(watch: Any) -> None:
        for i in range(8):
            clock, clock_ns = (lying, lying_ns) if i < 5 else (failing, failing)
            with contextlib.ExitStack() as patched:
                if i:
                    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
                        patched.enter_context(mock.patch.object(time, name, clock))
                        patched.enter_context(mock.patch.object(time, f"{name}_ns", clock_ns))
                with watch.step(i):
                    optimizer.zero_grad()
                    value = model(_sick(i)).mean()
                    value.backward()
                    optimizer.step()
                made.see(value)

    made.loop = loop
    return made


@program("eighth_functions_of_python_fail_inside_steps", "eighth surroundings")
def functions_fail(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    made = Program([model], [optimizer], lambda i: None)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not now")

    ask, here = threading.get_ident, threading.get_ident()

    def refuse_here() -> int:  # in every thread, and none could end
        if ask() == here:
            raise RuntimeError("not now")
        return ask()

    targets = [
        (json, "dumps"), (json, "loads"), (sqlite3, "connect"), (os, "getpid"), (os, "stat"), (os.path, "exists"),
        (builtins, "open"), (threading, "Lock"), (threading, "current_thread"), (pickle, "dumps"), (random, "random"),
        (os, "urandom"), (sys, "_getframe"), (builtins, "repr"), (builtins, "print"), (builtins, "sorted"), (gc, "get_objects"),
    ]  # fmt: skip

    def loop(watch: Any) -> None:
        for i in range(8):
            with watch.step(i):
                optimizer.zero_grad()
                with contextlib.ExitStack() as patched:
                    for space, name in targets if i else []:
                        patched.enter_context(mock.patch.object(space, name, refuse))
                    patched.enter_context(mock.patch.object(threading, "get_ident", refuse_here if i else ask))
                    value = model(_sick(i, 5)).mean()
                    value.backward()
                    optimizer.step()
            made.see(value)

    made.loop = loop
    return made


@program("eighth_no_streams_and_no_threads_are_left", "eighth surroundings")
def no_streams(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    made = Program([model], [optimizer], lambda i: None)

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise ValueError("I/O operation on closed file")

        flush = property(lambda self: 1 / 0)  # type: ignore[assignment]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("can't start new thread")

    def loop(watch: Any) -> None:
        with (
            mock.patch.object(sys, "stdout", None), mock.patch.object(sys, "stderr", Closed()),
            mock.patch.object(sys, "__stderr__", None), mock.patch.object(warnings, "showwarning", refuse),
            mock.patch.object(threading, "_start_new_thread", refuse),
        ):  # fmt: skip
            for i in range(6):
                with watch.step(i):
                    optimizer.zero_grad()
                    value = model(_sick(i)).mean() * (1 if i < 4 else 1e38)
                    value.backward()
                    optimizer.step()
                made.see(value)

    made.loop = loop
    return made


@program("eighth_patches_of_the_program_cross_the_steps", "eighth surroundings")
def crossed(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    counts: collections.Counter[str] = collections.Counter()
    made = Program([model], [optimizer], lambda i: None, extra=lambda: dict(counts))

    def counting(space: Any, name: str) -> Any:
        original = getattr(space, name)

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return mock.patch.object(space, name, counted)

    targets = [
        (torch.Tensor, "backward"), (nn.Module, "__call__"), (nn.Module, "_call_impl"), (torch.optim.SGD, "step"),
        (torch.autograd, "backward"), (torch.optim.Optimizer, "zero_grad"), (nn.Linear, "forward"), (F, "linear"),
    ]  # fmt: skip

    def loop(watch: Any) -> None:
        patches: list[Any] = []
        for i in range(8):
            if i % 2 == 0:
                patches = [counting(space, name) for space, name in targets]
                for patch in patches:
                    patch.start()
                watch.begin(i)
            else:
                watch.begin(i)
            optimizer.zero_grad()
            value = model(_sick(i, 4)).mean()
            value.backward()
            if i % 2:
                optimizer.step()
                for patch in reversed(patches):
                    patch.stop()
                watch.end()
            else:
                optimizer.step()
                watch.end()
            made.see(value)

    made.loop = loop
    return made


@program("eighth_random_state_forked_across_the_steps", "eighth surroundings")
def forked_randoms(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        for i in range(6):
            fork = torch.random.fork_rng(devices=[], enabled=bool(i % 2))
            fork.__enter__()
            watch.begin(i)
            optimizer.zero_grad()
            value = model(_sick(i)).mean() + torch.rand(())
            fork.__exit__(None, None, None)
            generator = torch.default_generator.clone_state()
            value = value + torch.rand((), generator=generator) + torch.randn(())
            value.backward()
            optimizer.step()
            watch.end()
            made.see(value)

    made.loop = loop
    return made


# ---- backward ----


@program("eighth_backward_inside_backward_a_hundred_deep", "eighth backward")
def reentrant(seed: int) -> Program:
    model = mlp(8, 8)

    class Deeper(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            if ctx.depth:
                (x,) = ctx.saved_tensors
                with torch.enable_grad():
                    inner = x.detach().requires_grad_()
                    Deeper.apply(model[2](inner), ctx.depth - 1).sum().backward()
                grad = grad + 1e-3 * inner.grad.nan_to_num()
            return grad, None

    return training(model, lambda i: Deeper.apply(model(_sick(i)), 40 if i else 3).mean(), steps=4)


@program("eighth_saving_a_tensor_trains_another_model", "eighth backward")
def pack_trains(seed: int) -> Program:
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.05)
    busy = [False]
    counts = [0, 0]

    def train(which: int, x: torch.Tensor) -> torch.Tensor:
        counts[which] += 1
        if not busy[0]:
            busy[0] = True
            with torch.enable_grad():
                other(batch(1)).mean().backward()
            busy[0] = False
        return x

    def loss(i: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(train, 0), functools.partial(train, 1)):
            return model(_sick(i)).square().mean()

    made = training(model, loss, optimizer, steps=4, extra=lambda: counts)
    made.models.append(other)
    return made


class _Loss(torch.Tensor):
    backwards: ClassVar[list[Any]] = []

    def backward(self, gradient: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        _Loss.backwards.append([tuple(args), sorted(kwargs)])
        return super().backward(gradient if gradient is not None else torch.full((), 0.5), *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Loss.backwards.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@program("eighth_loss_with_a_backward_of_its_own_notes_every_call", "eighth backward")
def own_backward(seed: int) -> Program:
    _Loss.backwards = []
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        return F.mse_loss(model(_sick(i)), torch.zeros(4, 4)).as_subclass(_Loss)  # type: ignore[arg-type]

    return training(model, loss, steps=4, extra=lambda: _Loss.backwards)


@program("eighth_complex_half_and_complex_gradients_given", "eighth backward")
def complex_half(seed: int) -> Program:
    model = nn.Linear(8, 4, dtype=torch.complex64)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        x = torch.complex(_sick(i), batch(i + 1))
        out = model(x)
        half = out.to(torch.complex32)
        value = half.to(torch.complex64).sum() + torch.view_as_real(out).prod(-1).sum() + out.conj().mH.sum()
        value.backward(gradient=torch.tensor(1 - 1j))
        optimizer.step()
        return [value, half.detach().to(torch.complex64)]

    return Program([model], [optimizer], step, steps=4)


class _Exit(BaseException):
    def __init__(self, code: int, *, why: str) -> None:
        self.code, self.why = code, why


@program("eighth_exits_thrown_in_hooks_and_tried_again", "eighth backward")
def exits(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen: list[str] = []
    made = Program([model], [optimizer], lambda i: None, extra=lambda: seen)
    errors = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), _Exit(1, why="x"), StopIteration(4)]

    def loop(watch: Any) -> None:
        for i, error in enumerate(errors):
            for again in (False, True):
                try:
                    with watch.step(2 * i + again):
                        optimizer.zero_grad()
                        out = model[0](_sick(i, 3))

                        def raises(grad: Any, error: BaseException = error, again: bool = again) -> None:
                            if not again:
                                raise error

                        out.register_hook(raises)
                        value = model[2](model[1](out)).mean()
                        value.backward()
                        optimizer.step()
                        made.see(value)
                except BaseException as raised:  # noqa: BLE001
                    seen.append(f"{type(raised).__name__} {raised.args} {raised is error}")

    made.loop = loop
    return made


# ---- operators and packed weights ----


_LIBRARY = torch.library.Library("nanny_eighth", "DEF")
_LIBRARY.define("move(Tensor(a!)[] xs, Tensor[] by, *, float alpha=1.0, str? how=None) -> ()")
_LIBRARY.define("parts(Tensor x, int[] sizes, bool[2] which, ScalarType? dtype=None) -> (Tensor[], int, float, bool, str)")
_LIBRARY.define("view(Tensor(a) x) -> Tensor(a)")
_MOVES: list[float] = []


def _move(xs: list[torch.Tensor], by: list[torch.Tensor], *, alpha: float = 1.0, how: str | None = None) -> None:
    _MOVES.append(alpha)
    for x, y in zip(xs, by):
        x.add_(y, alpha=-alpha)


def _parts(x: torch.Tensor, sizes: list[int], which: list[bool], dtype: Any = None) -> Any:
    _MOVES.append(len(sizes))
    parts = list(x.to(dtype or x.dtype).split(sizes, 1))
    return [p.clone() for p in parts], len(sizes), float(len(_MOVES)), which[0], "text"


_LIBRARY.impl("move", _move, "CompositeExplicitAutograd")
_LIBRARY.impl("parts", _parts, "CompositeExplicitAutograd")
_LIBRARY.impl("view", lambda x: x.view(-1), "CompositeExplicitAutograd")


@program("eighth_operators_of_lists_texts_and_numbers", "eighth operators")
def odd_operators(seed: int) -> Program:
    _MOVES.clear()
    model = mlp()

    def step(i: int) -> Any:
        model.zero_grad()
        value = model(_sick(i)).mean()
        value.backward()
        with torch.no_grad():
            parts, count, moves, flag, text = torch.ops.nanny_eighth.parts(batch(i), [3, 5], [True, False], torch.bfloat16)
            weights = list(model.parameters())
            torch.ops.nanny_eighth.move(weights, [p.grad for p in weights], alpha=0.05, how=text)
            torch.ops.nanny_eighth.view(model[0].weight).mul_(0.999)
        return [value, parts, count, moves, flag, text]

    return Program([model], [], step, steps=5, extra=lambda: _MOVES)


@program("eighth_packed_weights_of_a_quantised_teacher", "eighth operators")
def packed_weights(seed: int) -> Program:
    from torch.ao.nn.quantized import dynamic

    warnings.simplefilter("ignore")
    teacher = nn.Sequential(dynamic.Linear(8, 8), nn.ReLU(), dynamic.Linear(8, 4))
    for layer in (teacher[0], teacher[2]):  # made of memory that nobody has filled
        weight = torch.quantize_per_tensor(torch.randn(layer.out_features, 8), 0.02, 0, torch.qint8)
        layer.set_weight_bias(weight, torch.zeros(layer.out_features))
    model = nn.ModuleDict({"student": mlp(), "teacher": teacher})

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            target = model["teacher"](batch(i))
        return F.mse_loss(model["student"](_sick(i)), target)

    return training(model, loss, torch.optim.SGD(model["student"].parameters(), 0.05), steps=5)


@program("eighth_hybrid_sparse_and_block_sparse_losses", "eighth operators")
def hybrid(seed: int) -> Program:
    warnings.simplefilter("ignore")
    model = nn.ParameterDict({"sparse": nn.Parameter(torch.randn(3, 2)), "dense": nn.Parameter(torch.randn(4, 4))})

    def loss(i: int) -> torch.Tensor:
        indices = torch.tensor([[0, 1, 1], [2, 0, 0]])
        scale = NAN if i == 2 else 1.0
        mixed = torch.sparse_coo_tensor(indices, model["sparse"] * scale, (2, 3, 2))
        soft = torch.sparse.softmax(torch.sparse_coo_tensor(indices, model["sparse"][:, 0], (2, 3)), 1)
        blocks = model["dense"].detach().to_sparse_bsr((2, 2))
        product = torch.sparse.mm(torch.sparse_coo_tensor([[0, 1], [1, 3]], model["dense"][0, :2], (4, 4)), model["dense"])
        summed = torch.sparse.sum(mixed, dim=0).to_dense().square().sum() + soft.to_dense().sum()
        return summed + (blocks @ model["dense"].detach()).sum() + product.mean()

    return training(model, loss, steps=4)


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.calls = 0

    @torch.jit.ignore
    def python(self, x):  # type: ignore[no-untyped-def]
        return (F.silu(x).double() * 2).float()

    @torch.jit.export
    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.python(self.other(x)) + self.one(x)


@program("eighth_scripted_model_calls_ignored_python", "eighth operators")
def ignored(seed: int) -> Program:
    warnings.simplefilter("ignore")

    inner = torch.jit.script(_Mixed())
    model = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 2))

    def loss(i: int) -> torch.Tensor:
        traced = torch.jit.trace_module(nn.Linear(8, 8), {"forward": batch(0)}) if i == 1 else None
        value = model(_sick(i)).mean() + inner.other(batch(i)).mean()
        return value if traced is None else value + traced(batch(i)).mean()

    return training(model, loss, steps=4)


@program("eighth_regions_marked_for_compilation_and_graphs_split", "eighth operators")
def regions(seed: int) -> Program:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append([sum(1 for _ in graph.graph.nodes), len(examples)])
        return graph.forward

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        @torch.compiler.nested_compile_region
        def region(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.region(x)
            if x.detach().abs().sum() > 1e6:
                x = x / 2
            return self.region(x)

    model = nn.Sequential(Block(), Block())
    model.compile(backend=backend)

    def loss(i: int) -> torch.Tensor:
        x = _sick(i, 3)[: 4 - i % 2]
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return model(x).square().mean()

    return training(model, loss, steps=5, extra=lambda: graphs)


# ---- processes ----


def _small_training(*_: Any) -> float:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    model(torch.ones(1, 2)).sum().backward()
    return float(model.weight.grad.sum())


@program("eighth_children_that_train_before_they_become_another_program", "eighth processes")
def before_exec(seed: int) -> Program:
    model = mlp()
    seen: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        warnings.simplefilter("ignore")
        value = model(_sick(i)).mean()
        read, write = os.pipe()

        def first() -> None:
            os.write(write, repr(_small_training()).encode())

        done = subprocess.run(
            [sys.executable, "-c", "print(1)"], preexec_fn=first, pass_fds=(write,), capture_output=True, text=True, check=False
        )
        os.close(write)
        seen.append([done.stdout, done.stderr, done.returncode, os.read(read, 100).decode()])
        os.close(read)
        return value

    return training(model, loss, steps=3, extra=lambda: seen)


@program("eighth_pool_of_forked_children_gives_the_gradient", "eighth processes")
def pool_gradient(seed: int) -> Program:
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen: list[Any] = []

    def step(i: int) -> Any:
        warnings.simplefilter("ignore")
        value = model(_sick(i)).mean()
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            seen.append(list(pool.map(_small_training, range(3))))
        value.backward()
        for p in model.parameters():
            p.grad = p.grad + sum(seen[-1])
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=3, extra=lambda: seen)


@program("eighth_orphan_of_a_double_fork_reports_through_a_file", "eighth processes")
def orphan(seed: int) -> Program:
    model = mlp()
    seen: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        value = model(_sick(i)).mean()
        read, write = os.pipe()
        if not (child := os.fork()):
            if not os.fork():
                try:
                    model(batch(i)).mean().backward()
                    os.write(write, repr([_small_training(), torch._C._len_torch_dispatch_stack()]).encode())
                finally:
                    os._exit(0)
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        seen.append(os.read(read, 200).decode())
        os.close(read)
        return value

    return training(model, loss, steps=3, extra=lambda: seen)


@program("eighth_another_interpreter_runs_inside_a_step", "eighth processes")
def subinterpreter(seed: int) -> Program:
    import _xxsubinterpreters as interpreters  # type: ignore[import-not-found]

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(_sick(i)).mean()
        value.backward()
        optimizer.step()
        if i == 3:  # after one has been there torch refuses to go back
            other = interpreters.create()
            interpreters.run_string(other, "import sys, gc, threading; gc.collect(); x = [sys.getrecursionlimit()]")
            interpreters.destroy(other)
        return value

    return Program([model], [optimizer], step, steps=4)


@program("eighth_wakeup_descriptor_and_profiling_timer", "eighth processes")
def wakeup(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    arrived: list[int] = []
    made = Program([model], [optimizer], lambda i: None, extra=lambda: sorted(set(arrived)))

    def loop(watch: Any) -> None:
        read, write = os.pipe2(os.O_NONBLOCK)
        before = signal.signal(signal.SIGUSR2, lambda number, frame: arrived.append(number))
        previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        try:
            for i in range(5):
                with watch.step(i):
                    optimizer.zero_grad()
                    value = model(_sick(i)).mean()
                    os.kill(os.getpid(), signal.SIGUSR2)
                    value.backward()
                    optimizer.step()
                made.see([value, len(os.read(read, 100))])
        finally:
            assert signal.set_wakeup_fd(previous) == write
            signal.signal(signal.SIGUSR2, before)
            os.close(read)
            os.close(write)

    made.loop = loop
    return made


# ---- many ranks, tasks and threads ----


@program("eighth_ranks_are_threads_of_one_process", "eighth ranks")
def thread_ranks(seed: int) -> Program:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    models = [mlp() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    made = Program(models, [], lambda i: None)
    losses: list[Any] = [[], []]
    made.extra = lambda: losses

    def loop(watch: Any) -> None:
        threaded._install_threaded_pg()
        store = dist.HashStore()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)

        def rank(number: int) -> None:
            dist.init_process_group("threaded", rank=number, world_size=2, store=store)
            try:
                model = models[number]
                optimizer = torch.optim.SGD(model.parameters(), 0.05)
                for i in range(4):
                    with watch.step(i) if not number else contextlib.nullcontext():
                        optimizer.zero_grad()
                        value = model(_sick(i + number)).mean()
                        value.backward()
                        for p in model.parameters():
                            dist.all_reduce(p.grad)
                        optimizer.step()
                        losses[number].append(value.detach())
            finally:
                dist.destroy_process_group()

        try:
            threads = [threading.Thread(target=rank, args=(n,)) for n in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
            threaded._uninstall_threaded_pg()

    made.loop = loop
    return made


@contextlib.contextmanager
def _fake_ranks(size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@program("eighth_eight_ranks_that_do_not_exist", "eighth ranks")
def fake_ranks(seed: int) -> Program:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import init_device_mesh

    made = Program([], [], lambda i: None)

    def loop(watch: Any) -> None:
        with _fake_ranks(8):
            mesh = init_device_mesh("cpu", (8,))
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            another = watch.another(model, optimizer)
            for i in range(4):
                with another.step(i):
                    optimizer.zero_grad()
                    value = model(_sick(i)).float().nan_to_num().mean()
                    value.backward()
                    optimizer.step()
                made.see([list(p.shape) for p in model.parameters()])
            another.close()

    made.models = [nn.Linear(1, 1)]
    made.loop = loop
    return made


@program("eighth_remote_calls_to_itself", "eighth ranks")
def remote(seed: int) -> Program:
    from torch.distributed import rpc

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.getcwd()}/rendezvous", num_worker_threads=2)
        rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=options)
        try:
            for i in range(4):
                with watch.step(i):
                    optimizer.zero_grad()
                    remote = rpc.remote("one", torch.add, args=(_sick(i), 1))
                    value = model(remote.to_here()).mean() + rpc.rpc_sync("one", torch.sum, args=(batch(i),))
                    value.backward()
                    optimizer.step()
                made.see(value)
        finally:
            rpc.shutdown()
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name)
            os.unlink("rendezvous") if os.path.exists("rendezvous") else None

    made.loop = loop
    return made


@program("eighth_local_steps_averaged_later_and_joined", "eighth ranks")
def local_steps(seed: int) -> Program:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    inner = mlp()
    made = Program([inner], [], lambda i: None)

    def loop(watch: Any) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = nn.parallel.DistributedDataParallel(inner)
            optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.05), PeriodicModelAverager(2))
            with model.join():
                for i in range(5):
                    with watch.step(i):
                        optimizer.zero_grad()
                        value = model(_sick(i, 3)).mean()
                        value.backward()
                        optimizer.step()
                    made.see(value)
            del model, optimizer
        finally:
            dist.destroy_process_group()

    made.loop = loop
    return made


_PRECISION: contextvars.ContextVar[torch.dtype] = contextvars.ContextVar("precision", default=torch.float32)


@program("eighth_tasks_choose_their_precision_by_context", "eighth ranks")
def tasks(seed: int) -> Program:
    class Chosen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kind = _PRECISION.get()
            return F.linear(x.to(kind), self.weight.to(kind), self.bias.to(kind)).float()

    model = nn.Sequential(Chosen(8, 8), nn.ReLU(), Chosen(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    made = Program([model], [optimizer], lambda i: None)

    async def one(i: int, kind: torch.dtype) -> torch.Tensor:
        _PRECISION.set(kind)
        await asyncio.sleep(0)
        out = await asyncio.to_thread(model, _sick(i))
        await asyncio.sleep(0)
        return out.mean()

    async def main(watch: Any) -> None:
        for i in range(4):
            async with contextlib.AsyncExitStack() as stack:
                stack.enter_context(watch.step(i))
                optimizer.zero_grad()
                async with asyncio.TaskGroup() as group:
                    made_tasks = [group.create_task(one(i, kind)) for kind in (torch.bfloat16, torch.float64, torch.float32)]
                value = sum(task.result() for task in made_tasks)
                await asyncio.to_thread(value.backward)
                optimizer.step()
            made.see(value)

    made.loop = lambda watch: asyncio.run(main(watch))
    return made


# ---- weights and optimizers ----


@program("eighth_updates_make_new_parameters", "eighth optimizers")
def new_parameters(seed: int) -> Program:
    model = mlp()

    class Functional(torch.optim.Optimizer):
        def __init__(self, model: nn.Module) -> None:
            self.names = dict(model.named_parameters())
            super().__init__(self.names.values(), {"lr": 0.05})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for name, old in list(self.names.items()):
                owner, _, leaf = name.rpartition(".")
                new = nn.Parameter((old - 0.05 * old.grad.nan_to_num()).detach())
                setattr(model.get_submodule(owner), leaf, new)
                self.names[name] = new
            self.param_groups[0]["params"] = list(self.names.values())

    optimizer = Functional(model)
    return training(model, lambda i: model(_sick(i)).square().mean(), optimizer, steps=6)


@program("eighth_optimizer_state_is_computed_when_read", "eighth optimizers")
def computed_state(seed: int) -> Program:
    model = mlp()
    reads = [0]

    class Fresh(torch.optim.SGD):
        @property
        def state(self) -> Any:
            reads[0] += 1
            return self.__dict__["real"]

        @state.setter
        def state(self, value: Any) -> None:
            self.__dict__["real"] = value

        def __getstate__(self) -> Any:
            raise TypeError("not for copying")

        def state_dict(self) -> Any:
            return {"reads": min(reads[0], 0)}

        def __repr__(self) -> str:
            raise RuntimeError("no words")

    optimizer = Fresh(model.parameters(), 0.05, momentum=0.9)
    return training(model, lambda i: model(_sick(i)).mean(), optimizer, steps=5, extra=lambda: reads)


@program("eighth_scale_of_the_loss_is_infinite_and_zero", "eighth optimizers")
def scale_infinite(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1, growth_factor=2.0**20, backoff_factor=1e-30)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            value = model(batch(i)).float().mean() * (1e-30 if i < 3 else 1)
        scaler.scale(value).backward()
        with contextlib.suppress(Exception):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if i == 5:
            scaler.update(torch.tensor(0.0))
        if i == 7:
            scaler.update(NAN)
        return [value, scaler.get_scale()]

    return Program([model], [optimizer], step, steps=10, scaler=scaler)


@program("eighth_registries_of_modules_count_their_readers", "eighth optimizers")
def registries(seed: int) -> Program:
    reads: collections.Counter[str] = collections.Counter()

    class Watching(dict):  # type: ignore[type-arg]
        def __init__(self, name: str, *args: Any) -> None:
            super().__init__(*args)
            self.name = name

        def pop(self, key: Any, *default: Any) -> Any:
            reads[f"{self.name} pop"] += 1
            return super().pop(key, *default)

        def __setitem__(self, key: Any, value: Any) -> None:
            reads[f"{self.name} set"] += 1
            super().__setitem__(key, value)

        def update(self, *args: Any, **kwargs: Any) -> None:
            reads[f"{self.name} update"] += 1
            super().update(*args, **kwargs)

    model = mlp()
    for module in model.modules():
        for name in ("_parameters", "_modules", "_buffers"):
            module.__dict__[name] = Watching(name, module.__dict__[name])
    model.__dict__["_modules"]["with.dots"] = nn.Identity()
    model.__dict__["_modules"][""] = nn.Identity()
    model.__dict__["_modules"]["none"] = None
    model.forward = lambda x: model.__dict__["_modules"]["2"](model.__dict__["_modules"][""](model.__dict__["_modules"]["0"](x)))  # type: ignore[method-assign]
    return training(model, lambda i: model(_sick(i)).mean(), steps=5, extra=lambda: dict(reads))


@program("eighth_functions_with_apply_of_their_own", "eighth optimizers")
def own_apply(seed: int) -> Program:
    seen: list[str] = []

    class Noted(torch.autograd.Function):
        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            seen.append(f"apply {len(args)} {sorted(kwargs)}")
            return super().apply(*args, *kwargs.values())

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: Any, table: Any) -> Any:
            ctx.scale, ctx.table = scale, table
            return x * scale, table

        @staticmethod
        def backward(ctx: Any, grad: Any, _: Any) -> Any:
            seen.append(f"backward {type(ctx).__name__} {ctx.name()}")
            return Noted.apply(grad, ctx.scale, table=ctx.table)[0] if grad.requires_grad else grad * ctx.scale, None, None

    model = mlp()

    def loss(i: int) -> torch.Tensor:
        out, table = Noted.apply(model(_sick(i)), 2.0, table={"a": [i]})
        (grad,) = torch.autograd.grad(out.square().sum(), model[0].weight, create_graph=True)
        return out.mean() + grad.square().mean() + table["a"][0]

    return training(model, loss, steps=4, extra=lambda: seen)


class _Deferred(torch.Tensor):
    """Computes nothing until it is read: operations are noted and run when somebody asks for numbers."""

    ran: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, make: Callable[[], torch.Tensor], like: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, requires_grad=False)

    def __init__(self, make: Callable[[], torch.Tensor], like: torch.Tensor) -> None:
        self.make, self.value = make, None

    def real(self) -> torch.Tensor:
        if self.value is None:
            self.value = self.make()
        return self.value

    def plain_tensors(self) -> list[torch.Tensor]:
        return [self.real()]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run() -> Any:
            cls.ran.append(str(func))
            return func(*tree_map(lambda a: a.real() if isinstance(a, cls) else a, args), **(kwargs or {}))

        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor):
            return cls(run, args[0])
        return run()


@program("eighth_tensors_compute_only_when_they_are_read", "eighth optimizers")
def deferred(seed: int) -> Program:
    _Deferred.ran = []
    model = mlp()

    class Front(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lazy = _Deferred(lambda: x, x) * 2 + 1
            unused = lazy * 3
            del unused
            return lazy

    front = Front()
    whole = nn.Sequential(front, model)
    return training(
        whole,
        lambda i: model(front(_sick(i)).sum(0, keepdim=True) * 1.0).mean(),
        torch.optim.SGD(model.parameters(), 0.01),
        steps=5,
        extra=lambda: _Deferred.ran,
    )


@program("eighth_checkpointed_part_changes_places_with_its_twin", "eighth optimizers")
def twins(seed: int) -> Program:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.a, x, use_reentrant=False, determinism_check="none")
            x = checkpoint(lambda y: self.b(F.dropout(y, 0.3)).relu(), x, use_reentrant=True)
            self._modules["a"], self._modules["b"] = self._modules["b"], self._modules["a"]
            return x

    model = nn.Sequential(Pair(), nn.Linear(8, 2))
    return training(model, lambda i: model(_sick(i).requires_grad_()).mean(), steps=6)


class _Shape(abc.ABC):  # noqa: B024
    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        if "Secret" in kind.__name__:
            raise PermissionError("do not ask")
        return NotImplemented


@program("eighth_abstract_classes_and_matching_choose_the_path", "eighth optimizers")
def matching(seed: int) -> Program:
    class Secret(nn.Linear):
        __match_args__ = ("in_features", "computed")
        reads: ClassVar[list[int]] = []

        @property
        def computed(self) -> int:
            Secret.reads.append(len(Secret.reads))
            if len(Secret.reads) > 12:
                raise RuntimeError("read too often")
            return 3

        @property
        def weight_sum(self) -> Any:
            raise AttributeError("inside of a property")

        @functools.cached_property
        def lazily(self) -> nn.Module:
            Secret.reads.append(-1)
            return nn.Identity()

    Secret.reads.clear()
    model = nn.Sequential(Secret(8, 8), nn.ReLU(), Secret(8, 2))

    def loss(i: int) -> torch.Tensor:
        with contextlib.suppress(PermissionError):
            isinstance(model[0], _Shape)
        match model[0]:
            case Secret(8, 3):
                scale = 1.0
            case _:
                scale = 2.0
        return model(_sick(i)).mean() * scale

    return training(model, loss, steps=5, extra=lambda: Secret.reads)
