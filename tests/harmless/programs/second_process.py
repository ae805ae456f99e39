"""The process around the training: streams, limits, clocks, imports, threads, environment."""

from __future__ import annotations

import asyncio
import atexit
import builtins
import concurrent.futures
import contextlib
import contextvars
import ctypes
import gc
import io
import json
import locale
import logging
import mmap
import multiprocessing
import os
import pathlib
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from ..program import Program, mlp, program, training


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

    @program(f"second_streams_that_raise_{_where}", "second: process")
    def raising_streams(seed: int, around: bool = _around) -> Program:
        """sys.stdout and sys.stderr raise at each write and flush."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with contextlib.redirect_stdout(Raises()), contextlib.redirect_stderr(Raises()):
                yield

        return _inside(context, around)

    @program(f"second_streams_that_are_none_{_where}", "second: process")
    def no_streams(seed: int, around: bool = _around) -> Program:
        """sys.stdout and sys.stderr are None, as below pythonw and some daemons."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
                yield

        return _inside(context, around)

    @program(f"second_no_file_descriptors_left_{_where}", "second: process")
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

    @program(f"second_files_may_not_grow_{_where}", "second: process")
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

    @program(f"second_open_and_makedirs_raise_{_where}", "second: process")
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

    @program(f"second_no_new_threads_{_where}", "second: process")
    def no_threads(seed: int, around: bool = _around) -> Program:
        """Thread.start raises: can't start new thread."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
                yield

        return _inside(context, around)

    @program(f"second_clocks_stand_still_or_run_back_{_where}", "second: process")
    def clocks(seed: int, around: bool = _around) -> Program:
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

    @program(f"second_nothing_new_may_be_imported_{_where}", "second: process")
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

    @program(f"second_numpy_errors_raise_{_where}", "second: process")
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

    @program(f"second_json_is_patched_{_where}", "second: process")
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


@program("second_environment_is_empty", "second: process")
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


@program("second_working_directory_is_deleted", "second: process")
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


@program("second_output_directory_vanishes", "second: process")
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


@program("second_context_of_contextvars_changes", "second: process")
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


@program("second_asyncio_tasks_interleave_forwards", "second: process")
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


@program("second_async_loop_with_steps_in_two_tasks", "second: process")
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


@program("second_exception_thrown_in_from_another_thread", "second: process")
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


@program("second_alarm_raises_in_backward", "second: process")
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


@program("second_interval_timer_ticks_all_the_time", "second: process")
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


@program("second_unraisable_and_thread_errors_noted", "second: process")
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


@program("second_census_of_the_process_after_close", "second: process")
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


@program("second_growth_over_many_tools", "second: process")
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


@program("second_audit_hook_forbids_opening", "second: process")
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


@program("second_sockets_are_forbidden", "second: process")
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


@program("second_collector_at_each_allocation", "second: process")
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


@program("second_flush_denormal_and_thread_count", "second: process")
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


@program("second_print_options_and_locale", "second: process")
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


@program("second_warning_machinery_replaced", "second: process")
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


@program("second_frames_of_recursion_nearly_used_up", "second: process")
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


@program("second_forward_in_a_thread_pool_while_main_trains", "second: process")
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


@program("second_hogwild_children_train_shared_memory", "second: process")
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


@program("second_weights_in_read_only_memory", "second: process")
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


@program("second_weights_mapped_from_a_file", "second: process")
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


@program("second_numpy_and_dlpack_views_of_weights", "second: process")
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
