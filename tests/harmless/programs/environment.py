"""What is around a training: streams, clocks, imports, environment, random states, libraries, handlers."""

from __future__ import annotations

import asyncio
import atexit
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
import locale
import logging
import mmap
import multiprocessing
import os
import pathlib
import pickle
import random
import resource
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed
import torch.utils.benchmark
from torch import nn
from torch.nn import functional as F

from ..program import NAN, Program, batch, mlp, program, sick, training


@program("clocks_go_backward_and_fail", "surroundings")
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
                    value = model(sick(i)).mean()
                    value.backward()
                    optimizer.step()
                made.see(value)

    made.loop = loop
    return made


@program("functions_of_python_fail_inside_steps", "surroundings")
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
                    value = model(sick(i, 5)).mean()
                    value.backward()
                    optimizer.step()
            made.see(value)

    made.loop = loop
    return made


@program("no_streams_and_no_threads_are_left", "surroundings")
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
                    value = model(sick(i)).mean() * (1 if i < 4 else 1e38)
                    value.backward()
                    optimizer.step()
                made.see(value)

    made.loop = loop
    return made


@program("patches_of_the_program_cross_the_steps", "surroundings")
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
            value = model(sick(i, 4)).mean()
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


@program("random_state_forked_across_the_steps", "surroundings")
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
            value = model(sick(i)).mean() + torch.rand(())
            fork.__exit__(None, None, None)
            generator = torch.default_generator.clone_state()
            value = value + torch.rand((), generator=generator) + torch.randn(())
            value.backward()
            optimizer.step()
            watch.end()
            made.see(value)

    made.loop = loop
    return made


@program("strict_numbers", "settings")
def strict_numbers(seed: int) -> Program:
    """numpy raises at everything, integers have few digits, the encoding is ASCII."""
    model = mlp()
    made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1e18 if i == 4 else 1)).square().mean(), steps=6)

    def loop(watch: Any) -> None:
        digits = sys.get_int_max_str_digits()
        before = np.seterr(all="raise")
        sys.set_int_max_str_digits(640)
        try:
            for i in range(6):
                with watch.step(i):
                    made.see(made.step(i))
            watch.close()
        finally:
            np.seterr(**before)
            sys.set_int_max_str_digits(digits)

    made.loop = loop
    return made


@program("steps_in_contexts_of_their_own", "settings")
def own_contexts(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(batch(i)).square().mean(), steps=5)
    mark: contextvars.ContextVar[int] = contextvars.ContextVar("mark", default=0)

    def loop(watch: Any) -> None:
        def one(i: int) -> None:
            mark.set(i)
            with watch.step(i):
                made.see(made.step(i))

        for i in range(5):
            context = contextvars.copy_context()
            context.run(one, i)
            made.see(sorted(v for k, v in context.items() if k is mark))

    made.loop = loop
    return made


@program("random_modules_used_by_nobody_else", "settings")
def quiet_randoms(seed: int) -> Program:
    """Own generators of all kinds, and the global ones, give the same numbers between and inside steps."""
    model = mlp()
    own = [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)]
    notes: list[float] = []

    def loss(i: int) -> torch.Tensor:
        notes.extend([random.random(), float(np.random.rand()), float(torch.rand(())), own[0].random(), float(own[1].random())])
        notes.append(float(torch.rand((), generator=own[2])))
        if i == 3:
            random.seed(5), np.random.seed(5), torch.manual_seed(5)
        return F_dropout(model(batch(i) * (NAN if i == 4 else 1))).square().mean()

    return training(model, loss, steps=7, extra=lambda: notes)


def F_dropout(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5)


def _usual(**more: Any) -> tuple[Program, nn.Module, torch.Tensor]:
    model, x = mlp(), torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), **more), model, x


def _inside(context: Callable[[], Any], around: bool = False) -> Program:
    """The usual training with `context` inside each step, or around the whole loop and the close."""
    made, _, _ = _usual()
    inner = made.step
    if not around:

        def step(i: int) -> Any:
            with context():
                return inner(i)

        made.step = step
        return made

    def loop(watch: Any) -> None:
        with context():
            for i in range(3):
                with watch.step(i):
                    value = inner(i)
                made.see(value)
            watch.close()

    made.loop = loop
    return made


class Raises(io.TextIOBase):
    """A stream that cannot be written."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")

    def flush(self) -> None:
        raise BrokenPipeError("nobody reads")


for _around in (False, True):
    _where = "around" if _around else "inside"

    @program(f"streams_that_raise_{_where}", "process")
    def raising_streams(seed: int, around: bool = _around) -> Program:
        """sys.stdout and sys.stderr raise at each write and flush."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with contextlib.redirect_stdout(Raises()), contextlib.redirect_stderr(Raises()):
                yield

        return _inside(context, around)

    @program(f"streams_that_are_none_{_where}", "process")
    def streams_that_are_none(seed: int, around: bool = _around) -> Program:
        """sys.stdout and sys.stderr are None, as below pythonw and some daemons."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
                yield

        return _inside(context, around)

    @program(f"no_file_descriptors_left_{_where}", "process")
    def no_descriptors(seed: int, around: bool = _around) -> Program:
        """Every file descriptor that the process may have is taken."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
            taken = []
            try:
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.open(os.devnull, os.O_RDONLY))
                yield
            finally:
                for fd in taken:
                    os.close(fd)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        return _inside(context, around)

    @program(f"files_may_not_grow_{_where}", "process")
    def no_growth(seed: int, around: bool = _around) -> Program:
        """RLIMIT_FSIZE is 0: any write to a file is an OSError, like a full disk."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        return _inside(context, around)

    @program(f"open_and_makedirs_raise_{_where}", "process")
    def no_open(seed: int, around: bool = _around) -> Program:
        """open, os.open, os.makedirs, os.replace and Path.mkdir are patched to raise, as test sandboxes do."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            error = PermissionError("sandboxed")
            with contextlib.ExitStack() as stack:
                for target in ("builtins.open", "io.open", "os.open", "os.makedirs", "os.mkdir", "os.replace", "os.rename"):
                    stack.enter_context(mock.patch(target, side_effect=error))
                stack.enter_context(mock.patch.object(pathlib.Path, "mkdir", side_effect=error))
                yield

        return _inside(context, around)

    @program(f"no_new_threads_{_where}", "process")
    def no_threads(seed: int, around: bool = _around) -> Program:
        """Thread.start raises: can't start new thread."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
                yield

        return _inside(context, around)

    @program(f"clocks_stand_still_or_run_back_{_where}", "process")
    def standing_clocks(seed: int, around: bool = _around) -> Program:
        """time.time, monotonic and perf_counter are frozen, run backwards or give nan, as time-freezing libraries do."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            back = iter(range(10**9, 0, -1))
            with (
                mock.patch.object(time, "time", lambda: float("nan")),  # noqa: PT008
                mock.patch.object(time, "monotonic", lambda: float(next(back))),  # noqa: PT008
                mock.patch.object(time, "perf_counter", lambda: 0.0),  # noqa: PT008
                mock.patch.object(time, "perf_counter_ns", lambda: 0),  # noqa: PT008
                mock.patch.object(time, "time_ns", lambda: -1),  # noqa: PT008
            ):
                yield

        return _inside(context, around)

    @program(f"nothing_new_may_be_imported_{_where}", "process")
    def no_imports(seed: int, around: bool = _around) -> Program:
        """An import guard forbids modules that are not loaded yet, as hot-path checks and bundles do."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            real = builtins.__import__

            def guarded(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
                if level == 0 and name not in sys.modules:
                    raise ImportError(f"{name} is not allowed any more")
                return real(name, globals, locals, fromlist, level)

            with mock.patch.object(builtins, "__import__", guarded):
                yield

        return _inside(context, around)

    @program(f"numpy_errors_raise_{_where}", "process")
    def numpy_raises(seed: int, around: bool = _around) -> Program:
        """np.seterr(all="raise") while values overflow, underflow and become NaN."""
        model, x = mlp(), torch.randn(4, 8)
        made = training(model, lambda i: (model(x * 10.0 ** (38 - i)) * 1e-30).square().mean() * (float("nan") if i == 2 else 1))

        def loop(watch: Any) -> None:
            for i in range(3):
                with np.errstate(all="raise") if around else contextlib.nullcontext(), watch.step(i), np.errstate(all="raise"):
                    value = made.step(i)
                made.see(value)
            with np.errstate(all="raise"):
                watch.close()

        made.loop = loop
        return made

    @program(f"json_is_patched_{_where}", "process")
    def json_patched(seed: int, around: bool = _around) -> Program:
        """json.dumps, json.dump and JSONEncoder.default are replaced by the user (as orjson shims do), and raise."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with (
                mock.patch.object(json, "dumps", side_effect=TypeError("not serialisable")),
                mock.patch.object(json, "dump", side_effect=TypeError("not serialisable")),
                mock.patch.object(json.JSONEncoder, "default", side_effect=TypeError("not serialisable")),
            ):
                yield

        return _inside(context, around)


@program("environment_is_empty", "process")
def empty_environment(seed: int) -> Program:
    """os.environ is cleared inside steps: no HOME, no PATH, a TMPDIR that does not exist."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with mock.patch.dict(os.environ, {"TMPDIR": "/nowhere/at/all", "COLUMNS": "x"}, clear=True):
            tempdir, tempfile.tempdir = tempfile.tempdir, None
            try:
                yield
            finally:
                tempfile.tempdir = tempdir

    return _inside(context, around=True)


@program("working_directory_is_deleted", "process")
def directory_deleted(seed: int) -> Program:
    """The process stands in a directory that no longer exists: os.getcwd raises."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        home, lost = os.getcwd(), tempfile.mkdtemp()
        os.chdir(lost)
        os.rmdir(lost)
        try:
            yield
        finally:
            os.chdir(home)

    return _inside(context, around=True)


@program("output_directory_vanishes", "process")
def output_vanishes(seed: int) -> Program:
    """Somebody cleans up: what the tool wrote so far is deleted between and inside steps, once replaced by a file."""
    made, _, _ = _usual()

    def remove(watch: Any, again_as_file: bool = False) -> None:
        folder = getattr(watch, "output_dir", None)
        if folder is None:
            return
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(folder)
        if again_as_file:
            pathlib.Path(folder).write_text("not a directory")

    def loop(watch: Any) -> None:
        for i in range(4):
            with watch.step(i):
                value = made.step(i)
                remove(watch)
            made.see(value)
            remove(watch, again_as_file=i == 2)
        watch.close()

    made.loop = loop
    return made


@program("context_of_contextvars_changes", "process")
def contexts(seed: int) -> Program:
    """Steps begin in one contextvars context and end in another, which gives other tokens."""
    made, _, _ = _usual()

    def loop(watch: Any) -> None:
        for i in range(3):
            one, two = contextvars.Context(), contextvars.copy_context()
            one.run(watch.begin, i)
            value = contextvars.Context().run(made.step, i)
            two.run(watch.end)
            made.see(value)
        for i in range(3, 5):
            frame = watch.step(i)
            contextvars.Context().run(frame.__enter__)
            value = made.step(i)
            contextvars.Context().run(frame.__exit__, None, None, None)
            made.see(value)

    made.loop = loop
    return made


@program("asyncio_tasks_interleave_forwards", "process")
def interleaved(seed: int) -> Program:
    """Two asyncio tasks run one model's submodules in turns inside one step; forward itself is a coroutine."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        async def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y = self.inner(x)
            await asyncio.sleep(0)
            return y.tanh()

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Slow(), Slow(), Slow()])

        async def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            for part in self.parts:
                x = await part(x)
            return x

    model = Chain()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        async def both() -> Any:
            return await asyncio.gather(model(x), model(x * 0.5), model(-x))

        return torch.stack(asyncio.run(both())).square().mean()

    return training(model, loss)


@program("async_loop_with_steps_in_two_tasks", "process")
def async_steps(seed: int) -> Program:
    """Two tasks of one event loop each hold a step of a tool of their own open across awaits: steps overlap, not nest."""
    made, _model, _x = _usual()
    other, y = mlp(), torch.randn(4, 8)
    other_optimizer = torch.optim.SGD(other.parameters(), 0.1)
    made.models.append(other)

    def loop(watch: Any) -> None:
        second = watch.another(other, other_optimizer)

        async def one() -> None:
            for i in range(3):
                with watch.step(i):
                    await asyncio.sleep(0)
                    value = made.step(i)
                    await asyncio.sleep(0)
                made.see(value)

        async def two() -> None:
            for i in range(3):
                await asyncio.sleep(0)
                with second.step(i):
                    other_optimizer.zero_grad()
                    other(y).mean().backward()
                    await asyncio.sleep(0)
                    other_optimizer.step()

        async def all_() -> None:
            await asyncio.gather(one(), two())

        asyncio.run(all_())

    made.loop = loop
    return made


@program("exception_thrown_in_from_another_thread", "process")
def thrown_in(seed: int) -> Program:
    """An asynchronous exception is set on the thread inside forward and arrives there, caught around the step."""

    class Timeout(Exception):
        pass

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.armed = nn.Linear(8, 8), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if self.armed:
                self.armed = False
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Timeout))
                for _ in range(10**7):
                    pass
            return y

    model = nn.Sequential(Waits(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())

    def loop(watch: Any) -> None:
        for i in range(4):
            model[0].armed = i % 2 == 0
            try:
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
            except Timeout:
                made.see("timeout")

    made.loop = loop
    return made


@program("alarm_raises_in_backward", "process")
def alarm(seed: int) -> Program:
    """A signal handler that raises is triggered inside forward of one step and inside a gradient hook of another."""

    class Alarm(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise Alarm(f"signal {number}")

    model, x = mlp(), torch.randn(4, 8)
    when: dict[str, int] = {"i": -1}

    def hook(grad: torch.Tensor) -> None:
        if when["i"] == 2:
            signal.raise_signal(signal.SIGALRM)

    def loss(i: int) -> torch.Tensor:
        when["i"] = i
        h = model[0](x)
        if i == 1:
            signal.raise_signal(signal.SIGALRM)
        h.register_hook(hook)
        return model[2](model[1](h)).square().mean()

    made = training(model, loss)

    def loop(watch: Any) -> None:
        old = signal.signal(signal.SIGALRM, handler)
        try:
            for i in range(4):
                try:
                    with watch.step(i):
                        value = made.step(i)
                    made.see(value)
                except Alarm as error:
                    made.see(error)
        finally:
            signal.signal(signal.SIGALRM, old)

    made.loop = loop
    return made


@program("interval_timer_ticks_all_the_time", "process")
def ticking(seed: int) -> Program:
    """SIGALRM arrives each millisecond; its handler runs the model and collects garbage wherever it lands."""
    made, model, x = _usual()
    ticks: list[int] = []

    def handler(number: int, frame: Any) -> None:
        if len(ticks) < 50:
            ticks.append(1)
            with torch.no_grad():
                model(x)
            gc.collect(0)

    def loop(watch: Any) -> None:
        old = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            for i in range(6):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)

    made.loop = loop
    return made


@program("unraisable_and_thread_errors_noted", "process")
def unraisable(seed: int) -> Program:
    """sys.unraisablehook, threading.excepthook and sys.excepthook note whatever dies silently, until after close."""
    made, _model, _x = _usual()
    noted: list[str] = []

    def loop(watch: Any) -> None:
        with (
            mock.patch.object(sys, "unraisablehook", lambda info: noted.append(repr(info.exc_value))),
            mock.patch.object(threading, "excepthook", lambda info: noted.append(repr(info.exc_value))),
        ):
            for i in range(3):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
            watch.close()
            gc.collect()

    made.loop = loop
    made.extra = lambda: noted
    return made


@program("census_of_the_process_after_close", "process")
def census(seed: int) -> Program:
    """Counts threads, descriptors, exit functions, collector callbacks, filters, loggers, weakrefs before and after."""
    made, model, _x = _usual()

    def count() -> dict[str, Any]:
        gc.collect()
        return {
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "exit": atexit._ncallbacks(),
            "collector": len(gc.callbacks),
            "filters": len(warnings.filters),
            "handlers": len(logging.root.handlers),
            "path": len(sys.path),
            "meta_path": len(sys.meta_path),
            "switch": sys.getswitchinterval(),
            "thresholds": gc.get_threshold(),
            "weakrefs": [weakref.getweakrefcount(m) for m in model.modules()],
            "tensor weakrefs": [weakref.getweakrefcount(p) for p in model.parameters()],
            "referrers": [len([r for r in gc.get_referrers(p) if not isinstance(r, list)]) for p in model.parameters()],
            "hooks": [p._backward_hooks is None and p._post_accumulate_grad_hooks is None for p in model.parameters()],
            "fork": sorted(signal.getsignal(n) is None for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)),
        }

    def loop(watch: Any) -> None:
        for i in range(2):
            with watch.step(i):
                value = made.step(i)
            made.see(value)
        watch.close()

    made.loop = loop
    made.extra = lambda: {k: v for k, v in count().items() if k not in ("exit", "descriptors", "threads")}
    return made


@program("growth_over_many_tools", "process")
def growth(seed: int) -> Program:
    """Five tools one after another on one model: threads, descriptors and exit functions must not grow with each."""
    made, model, _x = _usual()
    grown: list[Any] = []

    def count() -> Any:
        return threading.active_count(), len(os.listdir("/proc/self/fd")), atexit._ncallbacks(), len(gc.callbacks)

    def loop(watch: Any) -> None:
        watch.close()
        counts = []
        for _ in range(5):
            other = watch.another(model, made.optimizers[0])
            for i in range(2):
                with other.step(i):
                    value = made.step(i)
            made.see(value)
            other.close()
            counts.append(count())
        grown.append(counts[-1] == counts[1])

    made.loop = loop
    made.extra = lambda: grown
    return made


@program("audit_hook_forbids_opening", "process")
def audited(seed: int) -> Program:
    """An audit hook (which can never be taken away) raises at open, mkdir, subprocess and socket while steps run."""
    made, _, _ = _usual()
    armed = [False]

    def hook(event: str, args: Any) -> None:
        if armed and armed[0] and event in ("open", "os.mkdir", "os.rename", "subprocess.Popen", "socket.connect"):
            raise PermissionError(event)

    def loop(watch: Any) -> None:
        sys.addaudithook(hook)
        for i in range(3):
            armed[0] = True
            try:
                with watch.step(i):
                    value = made.step(i)
            finally:
                armed[0] = False
            made.see(value)

    made.loop = loop
    return made


@program("sockets_are_forbidden", "process")
def no_sockets(seed: int) -> Program:
    """socket.socket, gethostname, os.system and os.getlogin raise, as below test plugins that forbid the network."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        error = RuntimeError("no network")
        with contextlib.ExitStack() as stack:
            for thing, name in ((socket, "socket"), (socket, "gethostname"), (os, "system"), (os, "getlogin")):
                stack.enter_context(mock.patch.object(thing, name, side_effect=error))
            yield

    return _inside(context, around=True)


@program("collector_at_each_allocation", "process")
def eager_collector(seed: int) -> Program:
    """gc.set_threshold(1, 1, 1), a collector callback that runs the model, and gc.freeze inside a step."""
    made, model, x = _usual()
    inner = made.step
    calls = [0]

    def callback(phase: str, info: Any) -> None:
        if phase == "stop" and calls[0] < 5:
            calls[0] += 1
            with torch.no_grad():
                model(x)

    def step(i: int) -> Any:
        old = gc.get_threshold()
        gc.set_threshold(50, 1, 1)
        gc.callbacks.append(callback)
        try:
            return inner(i)
        finally:
            gc.callbacks.remove(callback)
            gc.set_threshold(*old)

    made.step = step
    return made


@program("flush_denormal_and_thread_count", "process")
def denormals(seed: int) -> Program:
    """Flushing of denormals and the thread count are switched inside steps while activations are denormal."""
    model, x = mlp(), torch.randn(4, 8) * 1e-38
    made = training(model, lambda i: (model[0](x) - model[0].bias).abs().sum() * 1e-3 + model(x).mean())
    inner = made.step

    def step(i: int) -> Any:
        supported = torch.set_flush_denormal(i % 2 == 0)
        torch.set_num_threads(1 + i % 2)
        try:
            return inner(i), (x[0, 0] * 1e-5), supported, torch.get_num_threads()
        finally:
            torch.set_flush_denormal(False)
            torch.set_num_threads(1)

    made.step = step
    return made


@program("print_options_and_locale", "process")
def print_options(seed: int) -> Program:
    """Print options, locale, int-to-text limits and a decimal context are changed inside steps and noted after each."""
    made, _, _ = _usual()
    inner = made.step
    notes: list[Any] = []

    def step(i: int) -> Any:
        torch.set_printoptions(precision=2 + i, sci_mode=bool(i % 2))
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(640)
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_NUMERIC, "C")
        value = inner(i)
        notes.append([repr(value.detach()), sys.get_int_max_str_digits()])
        sys.set_int_max_str_digits(limit)
        torch.set_printoptions(profile="default")
        return value

    made.step = step
    made.extra = lambda: notes
    return made


@program("warning_machinery_replaced", "process")
def warning_machinery(seed: int) -> Program:
    """warnings.warn raises inside steps, and so does every logger, old or new."""

    class Hostile(logging.Logger):
        def _log(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no logging here")

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        old = logging.getLoggerClass()
        logging.setLoggerClass(Hostile)
        logging.disable(logging.NOTSET)
        try:
            with mock.patch.object(warnings, "warn", side_effect=RuntimeError("no warnings here")):  # noqa: SIM117
                with mock.patch.object(logging.Logger, "handle", side_effect=RuntimeError("no logging here")):
                    yield
        finally:
            logging.setLoggerClass(old)

    return _inside(context)


@program("frames_of_recursion_nearly_used_up", "process")
def low_limit(seed: int) -> Program:
    """The recursion limit leaves about twice the frames that a module calling itself 40 times needs."""
    model, x = mlp(), torch.randn(4, 8)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            return self.inner(x) if depth == 40 else self(x, depth + 1)

    model = nn.Sequential(Deep(), nn.Linear(8, 4))
    made = training(model, lambda i: model(x).square().mean())
    inner = made.step

    def step(i: int) -> Any:
        old = sys.getrecursionlimit()
        depth = len(list(_frames()))
        sys.setrecursionlimit(depth + 300)
        try:
            return inner(i)
        finally:
            sys.setrecursionlimit(old)

    made.step = step
    return made


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


@program("forward_in_a_thread_pool_while_main_trains", "process")
def pool(seed: int) -> Program:
    """An evaluation of a frozen copy and of the watched model itself runs in a pool while the step is open."""
    made, model, x = _usual()
    inner = made.step

    def step(i: int) -> Any:
        with concurrent.futures.ThreadPoolExecutor(3) as executor:
            with torch.no_grad():
                pass
            futures = [executor.submit(lambda s: model(x * s).detach().sum(), float(s)) for s in range(6)]
            sums = [future.result() for future in futures]
        return inner(i), sums

    made.step = step
    return made


@program("hogwild_children_train_shared_memory", "process")
def hogwild(seed: int) -> Program:
    """The weights are in shared memory; a forked child trains them inside the parent's step and sends tensors back."""
    model = mlp()
    model.share_memory()
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1))
    inner = made.step

    def child(connection: Any) -> None:
        try:
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            model.zero_grad()
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            connection.send(loss.item())
        finally:
            connection.close()
            os._exit(0)

    def step(i: int) -> Any:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
        process.start()
        value = ours.recv()
        process.join()
        ours.close()
        theirs.close()
        return inner(i), value, process.exitcode

    made.step = step
    return made


@program("weights_in_read_only_memory", "process")
def read_only(seed: int) -> Program:
    """Frozen weights and a module's output lie in memory mapped read-only: whoever writes there dies of SIGSEGV."""
    model = mlp()
    x = torch.randn(4, 8)
    path = os.path.join(tempfile.mkdtemp(), "weights")
    pathlib.Path(path).write_bytes(np.arange(64, dtype=np.float32).tobytes())
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = torch.frombuffer(memory, dtype=torch.float32).view(8, 8)
    shutil.rmtree(os.path.dirname(path))

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(table, requires_grad=False)
            self.register_buffer("row", table[3])

        def forward(self, x: torch.Tensor) -> Any:
            return x @ self.weight * 1e-2, self.weight, self.row

    model.insert(0, Table())

    def loss(i: int) -> torch.Tensor:
        y, _whole, row = model[0](x)
        return model[3](model[2](model[1](y + row * 1e-2))).square().mean()

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    return training(model, loss, optimizer)


@program("weights_mapped_from_a_file", "process")
def mapped(seed: int) -> Program:
    """Weights come from torch.load(mmap=True) and load_state_dict(assign=True) in mid-run, others from torch.from_file."""
    model, x = mlp(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        optimizer = made.optimizers[0]
        with tempfile.TemporaryDirectory() as folder:
            for i in range(4):
                with watch.step(i):
                    if i == 1:
                        torch.save(model.state_dict(), f"{folder}/weights.pt")
                        model.load_state_dict(torch.load(f"{folder}/weights.pt", mmap=True), assign=True)
                        optimizer = torch.optim.SGD(model.parameters(), 0.1)
                    if i == 2:
                        shared = torch.from_file(f"{folder}/shared", shared=True, size=64).view(8, 8)
                        with torch.no_grad():
                            shared.copy_(model[0].weight)
                        model[0].weight = nn.Parameter(shared)
                        optimizer = torch.optim.SGD(model.parameters(), 0.1)
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                made.see(loss)

    made.loop = loop
    return made


@program("numpy_and_dlpack_views_of_weights", "process")
def array_views(seed: int) -> Program:
    """numpy trains the weights through views and dlpack capsules of parameters and gradients."""
    model, x = mlp(), torch.randn(4, 8)
    arrays = [p.detach().numpy() for p in model.parameters()]

    def step(i: int) -> Any:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for array, p in zip(arrays, model.parameters()):
            array -= 0.1 * np.from_dlpack(p.grad)
        return loss, arrays

    return Program([model], [], step)


class Quantity:
    """No tensor and no subclass of one; torch asks it all the same."""

    asked: ClassVar[dict[str, int]] = {}

    def __init__(self, value: torch.Tensor, unit: str) -> None:
        self.value, self.unit = value, unit

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked[func.__name__] = cls.asked.get(func.__name__, 0) + 1
        plain = [a.value if isinstance(a, Quantity) else a for a in args]
        unit = next(a.unit for a in args if isinstance(a, Quantity))
        out = func(*plain, **(kwargs or {}))
        return cls(out, unit) if isinstance(out, torch.Tensor) else out


@program("quantities_with_units_flow", "surroundings")
def quantities(seed: int) -> Program:
    Quantity.asked = {}

    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Quantity) -> Quantity:
            out: Any = torch.nn.functional.linear(x, self.inner.weight, self.inner.bias)  # type: ignore[arg-type]
            return torch.tanh(out)

    model = Metric()
    return training(
        model, lambda i: torch.mean(model(Quantity(sick(i, 3), "m"))).value, steps=5, extra=lambda: dict(Quantity.asked)
    )


@program("forward_chosen_by_the_type_of_its_input", "surroundings")
def dispatching(seed: int) -> Program:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        @functools.singledispatchmethod
        def forward(self, x: Any) -> torch.Tensor:
            raise TypeError(type(x).__name__)

        @forward.register
        def _(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

        @forward.register
        def _(self, x: dict) -> torch.Tensor:  # type: ignore[type-arg]
            return self.inner(x["rows"]) * x["by"]  # type: ignore[no-any-return]

        @forward.register
        def _(self, x: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
            return self.inner(torch.from_numpy(x))  # type: ignore[no-any-return]

    model: Any = Choosing()
    kinds: list[Callable[[int], Any]] = [
        lambda i: sick(i, 3),
        lambda i: {"rows": sick(i, 3), "by": 2.0},
        lambda i: sick(i, 3).numpy(),
    ]
    return training(model, lambda i: model(kinds[i % 3](i)).square().mean(), steps=6)


@program("numpy_in_the_middle_and_rows_that_cannot_be_written", "surroundings")
def numpy_inside(seed: int) -> Program:
    np.linspace(-1, 1, 64, dtype=np.float32).tofile("rows.bin")
    rows = np.memmap("rows.bin", np.float32, "r", shape=(8, 8))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            factor = np.float32(np.median(x.detach().numpy()))
            mask = torch.from_numpy((np.random.rand(*x.shape) > 0.3).astype(np.float32))
            return self.last(x * mask + factor)  # type: ignore[no-any-return]

    model = Mixed()

    def loss(i: int) -> torch.Tensor:
        given = torch.as_tensor(rows[i % 4 : i % 4 + 4])
        return model(given).square().mean() * (NAN if i == 3 else 1)

    return training(model, loss, steps=5)


@program("handlers_of_logs_compute", "surroundings")
def computing_handler(seed: int) -> Program:
    model = mlp()
    norms: list[Any] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with torch.no_grad():
                parts = [p.grad.norm() if p.grad is not None else p.norm() for p in model.parameters()]
                norms.append([record.getMessage(), torch.stack(parts).norm()])

    log = logging.getLogger("seventh")
    log.propagate, log.handlers = False, [Handler()]
    log.setLevel(logging.DEBUG)

    def loss(i: int) -> torch.Tensor:
        log.info("forward %d", i)
        value = model(sick(i, 3)).square().mean()
        value.register_hook(lambda grad: log.debug("backward %d", i))
        return value

    return training(model, loss, steps=5, extra=lambda: norms)


@program("model_is_timed_inside_a_step", "surroundings")
def timed(seed: int) -> Program:
    model, calls = mlp(), [0]
    model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def loss(i: int) -> torch.Tensor:
        timer = torch.utils.benchmark.Timer("model(x)", globals={"model": model, "x": batch(i)}, num_threads=1)
        measured = timer.timeit(3)
        return model(sick(i, 3)).square().mean() * (1.0 if measured.number_per_run == 3 else NAN)

    return training(model, loss, steps=4, extra=lambda: calls)


@program("weights_published_in_shared_memory", "surroundings")
def published(seed: int) -> Program:
    model = mlp()
    size = sum(p.numel() for p in model.parameters()) * 4
    block = shared_memory.SharedMemory(create=True, size=size)
    board = np.ndarray(size // 4, np.float32, buffer=block.buf)
    seen: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            board[:] = torch.cat([p.flatten() for p in model.parameters()]).numpy()
        reader = torch.frombuffer(block.buf, dtype=torch.float32)
        seen.append(float(reader.sum()))
        return model(sick(i, 3)).square().mean() + 0 * reader.mean()

    def loop(watch: Any) -> None:
        nonlocal board
        try:
            for i in range(5):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            del board, value
            model.zero_grad()
            gc.collect()
            block.unlink()

    made = training(model, loss, steps=5, extra=lambda: seen)
    made.loop = loop
    return made


@program("parameters_named_anew_each_step", "surroundings")
def named_anew(seed: int) -> Program:
    class Shelf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterDict({"w 0": torch.randn(8, 4) * 0.1, "b/0": torch.zeros(4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = next(v for k, v in self.parts.items() if k.startswith("w"))
            bias = next(v for k, v in self.parts.items() if k.startswith("b"))
            return x @ weight + bias

    model = Shelf()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(sick(i, 3)).square().mean()
        loss.backward()
        optimizer.step()
        names = list(model.parts.keys())
        moved = {f"{name[0]}{'_/-'[i % 3]}{i}": model.parts.pop(name) for name in names}
        model.parts.update(moved)
        return loss

    return Program([model], [optimizer], step, steps=5)


@program("forward_catches_whatever_is_raised", "surroundings")
def catches(seed: int) -> Program:
    """A second run that is stopped inside must not take the other way and leave its traces."""
    told, failures = open("told.txt", "w"), []  # noqa: SIM115

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            try:
                told.write("once\n")
            except BaseException as error:  # noqa: BLE001
                failures.append(type(error).__name__)
                os.write(told.fileno(), b"otherwise\n")
            return self.last(x)  # type: ignore[no-any-return]

    model = Stubborn()

    def outcome() -> Any:
        told.close()
        with open("told.txt") as lines:
            return [lines.read(), failures]

    return training(model, lambda i: model(sick(i, 3)).square().mean(), steps=5, extra=outcome)


@torch.library.custom_op("nanny_counted::counted", mutates_args=())
def _counted(x: torch.Tensor) -> torch.Tensor:
    _counts.append(len(_counts))
    return x * 2


_counts: list[int] = []


_counted.register_autograd(lambda ctx, grad: grad * 2)


@program("operator_behind_a_net", "surroundings")
def behind_a_net(seed: int) -> Program:
    _counts.clear()
    nets = [0]

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return _counted(self.inner(x))  # type: ignore[no-any-return]
            except Exception:  # noqa: BLE001
                nets[0] += 1
                return self.inner(x) + 1  # type: ignore[no-any-return]

    model = Careful()
    return training(model, lambda i: model(sick(i, 3)).square().mean(), steps=5, extra=lambda: [_counts, nets])


def _pretends(name: str, *patches: tuple[Any, str, Any], variables: dict[str, str] | None = None) -> None:
    @program(f"{name}", "surroundings")
    def pretending(seed: int) -> Program:
        model = mlp()
        made = training(model, lambda i: model(sick(i, 3)).square().mean(), steps=5)

        def loop(watch: Any) -> None:
            with contextlib.ExitStack() as stack:
                for owner, attribute, value in patches:
                    stack.enter_context(mock.patch.object(owner, attribute, value))
                stack.enter_context(mock.patch.dict(os.environ, variables or {}))
                for i in range(5):
                    with watch.step(i):
                        value = made.step(i)
                    made.see(value)

        made.loop = loop
        return made


_pretends("cuda_is_said_to_be_there", (torch.cuda, "is_available", lambda: True), (torch.cuda, "device_count", lambda: 8))


_pretends("a_group_is_said_to_be_there", (torch.distributed, "is_initialized", lambda: True))


_pretends("one_of_four_by_its_variables", variables={"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})


_pretends("autocast_cannot_be_asked", (torch, "is_autocast_enabled", lambda *_: 1 / 0))


@program("libraries_of_c_are_forbidden", "surroundings")
def no_libraries(seed: int) -> Program:
    """A sandbox that refuses to load libraries of C or to ask for their functions, from before the tool's first step on."""
    model, asked, forbids = mlp(), [], [True]  # type: tuple[Any, list[str], list[bool]]

    def audit(event: str, args: Any) -> None:
        if forbids[0] and event in ("ctypes.dlopen", "ctypes.dlsym"):
            raise PermissionError("no libraries here")

    made = training(model, lambda i: model(sick(i, 3)).square().mean(), steps=5, extra=lambda: asked)

    def loop(watch: Any) -> None:
        sys.addaudithook(audit)
        try:
            for i in range(5):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            forbids[0] = False

    made.loop = loop
    return made
