"""What belongs to the process: limits, files, imports, signals, forks, and functions of Python replaced for all of it."""

from __future__ import annotations

import atexit
import builtins
import collections
import concurrent.futures
import contextlib
import ctypes
import ctypes.util
import decimal
import enum
import faulthandler
import functools
import gc
import importlib
import importlib.abc
import json
import logging
import multiprocessing
import operator
import os
import pathlib
import pickle
import queue
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import tracemalloc
import warnings
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..program import NAN, TESTS, Program, batch, mlp, program, sick, training
from .lifecycle import _PRELUDE
from .loops import _loop


@program("files_may_not_grow_beyond_a_limit", "process")
def file_limit(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters())
    old: list[Any] = []
    told: list[int] = []

    def loop(watch: Any) -> None:
        old.append((resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, lambda *more: told.append(1))))
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[0][0][1]))
        try:
            for i in range(40):
                with watch.step(i):
                    optimizer.zero_grad()
                    model(sick(i, 30)).square().mean().backward()
                    optimizer.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old[0][0])
            signal.signal(signal.SIGXFSZ, old[0][1])

    return Program([model], [optimizer], lambda i: None, loop=loop, extra=lambda: told)


@program("files_of_the_program_are_named_like_those_of_python", "process")
def shadowed(seed: int) -> Program:
    folder = tempfile.mkdtemp()
    log: list[str] = []
    builtins.shadow_log = log  # type: ignore[attr-defined]
    for name in sorted(sys.stdlib_module_names - set(sys.modules)):
        with open(os.path.join(folder, f"{name}.py"), "w") as file:
            file.write(f"import builtins\nbuiltins.shadow_log.append({name!r})\nraise SystemError('a file of the program')\n")
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loop(watch: Any) -> None:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            for i in range(8):
                with watch.step(i):
                    optimizer.zero_grad()
                    with torch.autocast("cpu", torch.bfloat16):
                        value = model(sick(i, 5)).float().square().mean()
                    value.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
        finally:
            sys.path.remove(folder)
            del builtins.shadow_log  # type: ignore[attr-defined]

    return Program([model], [optimizer], lambda i: None, loop=loop, extra=lambda: log)


@program("nothing_more_can_be_imported", "process")
def no_imports(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    asked: list[str] = []

    class Refuse(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            asked.append(name)
            raise PermissionError(f"{name}: nothing more is imported")

    def loop(watch: Any) -> None:
        refuse = Refuse()
        with torch.autocast("cpu", torch.bfloat16):
            model(batch(0)).sum().backward()  # what torch imports late
        optimizer.step()
        sys.meta_path.insert(0, refuse)
        try:
            for i in range(6):
                with watch.step(i):
                    optimizer.zero_grad()
                    model(sick(i, 3)).float().square().mean().backward()
                    optimizer.step()
        finally:
            sys.meta_path.remove(refuse)

    return Program([model], [optimizer], lambda i: None, loop=loop)


@program("json_writes_otherwise_for_the_whole_process", "process")
def patched_json(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loop(watch: Any) -> None:
        plain, default = json.dumps, json.JSONEncoder.default

        def dumps(value: Any, **more: Any) -> Any:
            return plain(value, **{"ensure_ascii": False, "separators": (",", ":"), "sort_keys": True, **more})

        json.dumps = dumps
        json.JSONEncoder.default = lambda self, thing: str(thing)  # type: ignore[method-assign]
        try:
            for i in range(5):
                with watch.step(i):
                    optimizer.zero_grad()
                    model(sick(i)).square().mean().backward()
                    optimizer.step()
        finally:
            json.dumps, json.JSONEncoder.default = plain, default  # type: ignore[method-assign]

    return Program([model], [optimizer], lambda i: None, loop=loop)


@program("tensors_print_as_the_program_likes", "process")
def lovely(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    shown: list[str] = []

    def loop(watch: Any) -> None:
        kept = {name: getattr(torch.Tensor, name) for name in ("__repr__", "__format__")}

        def pretty(self: Any, *more: Any, **keywords: Any) -> str:
            shown.append(str(tuple(self.shape)))
            return f"tensor of {self.float().mean().item():.3f}"

        torch.Tensor.__repr__ = pretty  # type: ignore[method-assign]
        torch.Tensor.__format__ = lambda self, spec: pretty(self)  # type: ignore[method-assign]
        try:
            for i in range(5):
                with watch.step(i):
                    optimizer.zero_grad()
                    value = model(sick(i)).square().mean()
                    value.backward()
                    optimizer.step()
                    shown.append(f"{value}")
        finally:
            for name, function in kept.items():
                setattr(torch.Tensor, name, function)

    return Program([model], [optimizer], lambda i: None, loop=loop, extra=lambda: shown)


@program("exits_and_signals_ask_the_model_when_all_is_over", "process")
def at_the_end(seed: int) -> Program:
    model = mlp()
    log: list[Any] = []

    def late() -> None:
        with torch.no_grad():
            log.append(model(batch(0)).sum())

    def handler(number: int, frame: Any) -> None:
        late()
        signal.raise_signal(signal.SIGUSR2) if number == signal.SIGUSR1 else None

    def loss(i: int) -> torch.Tensor:
        if i == 0:
            atexit.register(late)
        old = [signal.signal(one, handler) for one in (signal.SIGUSR1, signal.SIGUSR2)]
        value = model(sick(i)).square().mean()
        signal.raise_signal(signal.SIGUSR1)
        for one, before in zip((signal.SIGUSR1, signal.SIGUSR2), old):
            signal.signal(one, before)
        return value

    return training(model, loss, steps=4, extra=lambda: log)


@program("tracers_of_memory_profiles_and_faults_come_and_go", "process")
def tracers(seed: int) -> Program:
    model = mlp()
    calls: collections.Counter[str] = collections.Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if "programs" in frame.f_code.co_filename:
            calls[f"{frame.f_code.co_name} {event}"] += 1

    def loss(i: int) -> torch.Tensor:
        tracemalloc.start(3)
        faulthandler.enable(open(os.devnull, "w"))  # noqa: SIM115
        sys.setprofile(profile)
        threading.setprofile(profile)
        try:
            return checkpoint(model, sick(i), use_reentrant=False).square().mean()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            tracemalloc.stop()
            faulthandler.disable()

    return training(model, loss, steps=4, extra=lambda: {k: v for k, v in calls.items() if "profile" not in k})


@program("collector_callbacks_and_weak_sets_see_each_tensor_go", "process")
def callbacks(seed: int) -> Program:
    model = mlp()
    seen: list[int] = []
    log: list[Any] = []

    def callback(phase: str, info: Any) -> None:
        if phase == "stop":
            with torch.no_grad():
                seen.append(int(model(batch(0)).isnan().sum()))

    def loss(i: int) -> torch.Tensor:
        value = model(sick(i))
        known = weakref.WeakSet([value, model])
        weakref.finalize(value, log.append, i)
        gc.callbacks.append(callback)
        gc.collect(0)
        gc.callbacks.remove(callback)
        out = value.square().mean()
        del value
        log.append(len(known))
        return out

    return training(model, loss, steps=4, extra=lambda: log)


@program("decimal_float_and_integer_limits_of_the_program", "process")
def number_limits(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loop(watch: Any) -> None:
        digits = sys.get_int_max_str_digits()
        context = decimal.getcontext().copy()
        decimal.getcontext().traps[decimal.FloatOperation] = True
        decimal.getcontext().traps[decimal.Inexact] = True
        decimal.getcontext().prec = 1
        sys.set_int_max_str_digits(640)
        old = np.seterr(all="raise")
        try:
            for i in range(5):
                with watch.step(i):
                    optimizer.zero_grad()
                    (model(sick(i)) * 1e30).square().mean().backward()
                    optimizer.step()
        finally:
            np.seterr(**old)
            sys.set_int_max_str_digits(digits)
            decimal.setcontext(context)

    return Program([model], [optimizer], lambda i: None, loop=loop)


@program("umask_and_folder_of_temporary_files_are_taken_away", "process")
def umask(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loop(watch: Any) -> None:
        mask = os.umask(0o777)
        kept, environment = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = "/does/not/exist"
        try:
            for i in range(5):
                with watch.step(i):
                    optimizer.zero_grad()
                    model(sick(i)).square().mean().backward()
                    optimizer.step()
        finally:
            os.umask(mask)
            tempfile.tempdir = kept
            if environment is not None:
                os.environ["TMPDIR"] = environment

    return Program([model], [optimizer], lambda i: None, loop=loop)


@program("threads_call_backward_of_parts_of_one_graph", "process")
def threads_backward(seed: int) -> Program:
    model = mlp(out=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        out = model(sick(i, 3))
        done: queue.Queue[Any] = queue.Queue()
        for k in range(4):
            thread = threading.Thread(target=lambda k=k: done.put((k, out[:, k].square().mean().backward(retain_graph=True))))
            thread.start()
            thread.join()
        optimizer.step()
        return sorted(done.get()[0] for _ in range(4))

    return Program([model], [optimizer], step, steps=5)


@program("gradients_go_over_a_socket_to_a_forked_child_and_back", "process")
def over_a_socket(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i)).square().mean()
        value.backward()
        here, there = socket.socketpair()
        child = os.fork()
        if not child:
            here.close()
            with there.makefile("rwb") as stream:
                sizes = struct.unpack("<i", stream.read(4))[0]
                found = pickle.loads(stream.read(sizes))
                stream.write(pickle.dumps([np.nan_to_num(one) * 0.5 for one in found]))
            os._exit(0)
        there.close()
        with here, here.makefile("rwb") as stream:
            data = pickle.dumps([p.grad.numpy() for p in model.parameters()])
            stream.write(struct.pack("<i", len(data)) + data)
            stream.flush()
            for p, one in zip(model.parameters(), pickle.load(stream)):
                p.grad.copy_(torch.from_numpy(one))
        os.waitpid(child, 0)
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=4)


@program("log_records_are_made_by_a_factory_that_trains", "process")
def log_factory(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    counted = [0]

    def loop(watch: Any) -> None:
        factory = logging.getLogRecordFactory()
        logging.captureWarnings(True)
        handler = logging.NullHandler()
        logging.getLogger("py.warnings").addHandler(handler)

        def make(*args: Any, **more: Any) -> Any:
            counted[0] += 1
            return factory(*args, **more)

        logging.setLogRecordFactory(make)
        try:
            for i in range(5):
                with watch.step(i):
                    optimizer.zero_grad()
                    model(sick(i)).square().mean().backward()
                    optimizer.step()
                    logging.getLogger("torch").warning("step %s", i) if i == 9 else None
        finally:
            logging.setLogRecordFactory(factory)
            logging.getLogger("py.warnings").removeHandler(handler)
            logging.captureWarnings(False)

    return Program([model], [optimizer], lambda i: None, loop=loop)


@program("enums_flags_and_functools_carry_the_tensors", "process")
def carriers(seed: int) -> Program:
    model = mlp()

    class Phase(enum.Enum):
        A = enum.auto()
        B = enum.auto()

    @functools.total_ordering
    class Score:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __eq__(self, other: object) -> bool:
            return bool(self.tensor == other.tensor)  # type: ignore[attr-defined]

        def __lt__(self, other: Any) -> bool:
            return bool(self.tensor < other.tensor)

        __hash__ = None  # type: ignore[assignment]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        @functools.cached_property
        def table(self) -> Any:
            return {phase: self.inner[0].weight.detach().clone() for phase in Phase}

        def forward(self, x: torch.Tensor) -> Any:
            out = self.inner(x)
            return {Phase.A: Score(out.mean()), Phase.B: functools.reduce(operator.add, out.unbind(1)), type(self): self.table}

    net = Net()

    def loss(i: int) -> torch.Tensor:
        out = net(sick(i))
        best = max(out[Phase.A], Score(torch.zeros(())))
        return best.tensor + out[Phase.B].square().mean() + out[Net][Phase.B].sum()

    return training(net, loss, steps=4)


@program("memory_of_c_is_written_behind_the_weights", "process")
def memory_of_c(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i, 3)).square().mean()
        value.backward()
        weight = model[0].weight
        array = np.ctypeslib.as_array((ctypes.c_float * weight.numel()).from_address(weight.data_ptr()))
        gradient = weight.grad.detach().numpy().reshape(-1)
        gradient *= 0.5
        array -= np.float32(0.01) * np.nan_to_num(gradient)
        memoryview(model[2].bias.detach().numpy())[0] = float(i)
        optimizer.step()
        return value, array.copy()

    return Program([model], [optimizer], step, steps=5)


def _small_training(*_: Any) -> float:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    model(torch.ones(1, 2)).sum().backward()
    return float(model.weight.grad.sum())


@program("children_that_train_before_they_become_another_program", "processes")
def before_exec(seed: int) -> Program:
    model = mlp()
    seen: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        warnings.simplefilter("ignore")
        value = model(sick(i)).mean()
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


@program("pool_of_forked_children_gives_the_gradient", "processes")
def pool_gradient(seed: int) -> Program:
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen: list[Any] = []

    def step(i: int) -> Any:
        warnings.simplefilter("ignore")
        value = model(sick(i)).mean()
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            seen.append(list(pool.map(_small_training, range(3))))
        value.backward()
        for p in model.parameters():
            p.grad = p.grad + sum(seen[-1])
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=3, extra=lambda: seen)


@program("orphan_of_a_double_fork_reports_through_a_file", "processes")
def orphan(seed: int) -> Program:
    model = mlp()
    seen: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        value = model(sick(i)).mean()
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


@program("another_interpreter_runs_inside_a_step", "processes")
def subinterpreter(seed: int) -> Program:
    import _xxsubinterpreters as interpreters  # type: ignore[import-not-found]

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i)).mean()
        value.backward()
        optimizer.step()
        if i == 3:  # after one has been there torch refuses to go back
            other = interpreters.create()
            interpreters.run_string(other, "import sys, gc, threading; gc.collect(); x = [sys.getrecursionlimit()]")
            interpreters.destroy(other)
        return value

    return Program([model], [optimizer], step, steps=4)


@program("wakeup_descriptor_and_profiling_timer", "processes")
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
                    value = model(sick(i)).mean()
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


_ALONE = {
    "all_descriptors_closed": "for i in range(2):\n with watch.step(i): step(i)\nsys.stdout.flush()\nos.closerange(3, 4096)\n"
    "mine = [open(f'mine{n}.txt', 'w') for n in range(12)]\nfor i in range(2, 8):\n with watch.step(i): step(i)\n"
    "for n, one in enumerate(mine): one.write(str(n)); one.close()\nwatch.close()\n"
    "text = str([open(f'mine{n}.txt', 'rb').read() for n in range(12)]) + told()\nos.write(1, text.encode())\nos._exit(0)",
    "float_traps_are_on": "import ctypes\nlibm = ctypes.CDLL('libm.so.6')\nlibm.feenableexcept(1 | 4 | 8)\n"
    "for i in (0, 1, 2, 4, 5):\n with watch.step(i): step(i)\nwatch.close()\nlibm.fedisableexcept(61)\nprint(told())",
    "everything_printed_twice": "os.dup2(1, 2)\nprint('begin', flush=True)\nfor i in range(3):\n with watch.step(i): step(i)\n"
    "watch.close()\nos.write(1, b'')\nprint(told(), flush=True)",
}


def _alone(name: str, body: str) -> None:
    @program(f"{name}", "processes")
    def ending(seed: int) -> Program:
        model, notes = nn.Linear(2, 2), []  # type: tuple[Any, list[Any]]
        made = Program([model], [], lambda i: None, extra=lambda: notes)

        def loop(watch: Any) -> None:
            home = pathlib.Path("alone").resolve()
            home.mkdir()
            (home / "train.py").write_text(_PRELUDE + body)
            ended = subprocess.run(
                [sys.executable, "train.py", getattr(watch, "setting", "plain"), TESTS],
                cwd=home, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            told = ended.stdout.splitlines()
            notes.extend([ended.returncode, told[-1:] if name == "everything_printed_twice" else told])
            shutil.rmtree(home, ignore_errors=True)

        return _loop(made, loop)


for _name, _body in _ALONE.items():
    _alone(_name, _body)


@program("no_descriptors_left", "limits")
def no_descriptors(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=6)

    def loop(watch: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken: list[int] = []
        try:
            for i in range(6):
                if i == 1:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
                    with contextlib.suppress(OSError):
                        while True:
                            taken.append(os.open(os.devnull, os.O_RDONLY))
                with watch.step(i):
                    made.see(made.step(i))
            watch.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for descriptor in taken:
                os.close(descriptor)

    made.loop = loop
    return made


@program("no_descriptors_from_the_start", "limits")
def none_from_start(seed: int) -> Program:
    made = no_descriptors(seed)
    inner = made.loop
    assert inner is not None

    def loop(watch: Any) -> None:
        other = watch.another(made.models[0])
        other.close()
        inner(watch)

    made.loop = loop
    return made


def _file_size(limit: int) -> None:
    @program(f"files_may_have_{limit}_bytes", "limits")
    def small_files(seed: int) -> Program:
        """A quota: what is written beyond it fails (and sends a signal that Python ignores)."""
        model = mlp()
        made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=8)

        def loop(watch: Any) -> None:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            try:
                for i in range(8):
                    if i == 2:
                        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
                    with watch.step(i):
                        made.see(made.step(i))
                watch.close()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        made.loop = loop
        return made


_file_size(0)


_file_size(70_000)


@program("right_to_write_is_lost", "limits")
def right_lost(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=8)

    def loop(watch: Any) -> None:
        root = os.geteuid() == 0
        mask = os.umask(0o777)
        try:
            for i in range(8):
                if i == 2:
                    folder = getattr(watch, "output_dir", None)
                    if folder:
                        os.chmod(folder, 0o500)
                    if root:
                        os.seteuid(65534)
                with watch.step(i):
                    made.see(made.step(i))
            watch.close()
        finally:
            if root:
                os.seteuid(0)
            os.umask(mask)

    made.loop = loop
    return made


@program("small_stack_in_a_thread", "limits")
def small_stack(seed: int) -> Program:
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.ReLU())])
    made = training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=5)

    def loop(watch: Any) -> None:
        def steps() -> None:
            for i in range(5):
                with watch.step(i):
                    made.see(made.step(i))

        before = threading.stack_size(512 << 10)
        try:
            thread = threading.Thread(target=steps)
            thread.start()
            thread.join()
        finally:
            threading.stack_size(before)

    made.loop = loop
    return made


@program("forward_backward_and_update_in_three_threads", "threads")
def three_threads(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    pools = [concurrent.futures.ThreadPoolExecutor(1) for _ in range(3)]
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        for i in range(5):
            with watch.step(i):
                value = pools[0].submit(lambda i=i: model(batch(i) * (NAN if i == 3 else 1)).square().mean()).result()
                pools[1].submit(value.backward).result()
                pools[2].submit(optimizer.step).result()
                optimizer.zero_grad()
            made.see(value)
        for pool in pools:
            pool.shutdown()

    made.loop = loop
    return made


@program("signal_handler_trains_another_model", "threads")
def handler_trains(seed: int) -> Program:
    model, other = mlp(), mlp()
    small = torch.optim.SGD(other.parameters(), 0.1)
    notes: list[float] = []

    def handler(*args: Any) -> None:
        small.zero_grad()
        with torch.enable_grad():
            value = other(batch(1)).square().mean()
        value.backward()
        small.step()
        notes.append(float(value.detach()))

    def loss(i: int) -> torch.Tensor:
        x = model[0](batch(i))
        os.kill(os.getpid(), signal.SIGUSR1)
        y = model[2](model[1](x))
        y.register_hook(lambda g: os.kill(os.getpid(), signal.SIGUSR1))
        return y.square().mean()

    made = training(model, loss, steps=4, extra=lambda: [len(notes), list(other.state_dict().values())])

    def loop(watch: Any) -> None:
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            for i in range(4):
                with watch.step(i):
                    made.see(made.step(i))
        finally:
            signal.signal(signal.SIGUSR1, before)

    made.loop = loop
    return made


@program("descriptors_of_a_child", "children")
def child_descriptors(seed: int) -> Program:
    """A command started inside a step inherits nothing of a tool: descriptors, environment, ignored signals."""
    model, notes = mlp(), []  # type: tuple[Any, list[str]]
    code = (
        "import os, signal; print(sorted(os.environ), [f for f in range(3, 200) if os.path.exists(f'/proc/self/fd/{f}')"
        " and 'fd' not in os.readlink(f'/proc/self/fd/{f}')], signal.getsignal(signal.SIGPIPE),"
        " os.nice(0) - os.getpriority(os.PRIO_PROCESS, os.getppid()))"
    )

    def loss(i: int) -> torch.Tensor:
        if i < 2:
            ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], close_fds=False, capture_output=True, text=True)
            notes.append(ended.stdout + ended.stderr)
        return model(batch(i)).square().mean()

    return training(model, loss, extra=lambda: notes)


@program("forked_child_trains_on_and_reports", "children")
def child_trains(seed: int) -> Program:
    """A fork between backward and update: parent and child take the same step from there."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reports: list[str] = []

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(batch(i)).square().mean()
        value.backward()
        if i == 1:
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    optimizer.step()
                    again = model(batch(2)).square().mean()
                    again.backward()
                    text = json.dumps([float(again.detach()), *[float(p.detach().double().sum()) for p in model.parameters()]])
                except BaseException as error:  # noqa: BLE001
                    text = repr(error)
                os.write(write, text.encode())
                os._exit(0)
            os.close(write)
            with os.fdopen(read) as lines:
                reports.append(lines.read())
            os.waitpid(child, 0)
        optimizer.step()
        return value

    return Program([model], [optimizer], step, extra=lambda: reports)


@program("memory_is_short", "process")
def short_memory(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))
    made = training(model, lambda i: model(torch.ones(8192, 64) * (float("nan") if i == 3 else 1)).square().mean(), steps=5)

    def loop(watch: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_AS)
        try:
            for i in range(5):
                if i == 1:
                    with open("/proc/self/statm") as lines:
                        size = int(lines.read().split()[0]) * resource.getpagesize()
                    resource.setrlimit(resource.RLIMIT_AS, (size + (130 << 20), before[1]))
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    made.loop = loop
    return made


@program("switch_interval_tiny_with_busy_threads", "process")
def switching(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(torch.ones(2, 8) * i).square().mean(), steps=6)

    def loop(watch: Any) -> None:
        done = threading.Event()

        def churn() -> None:
            while not done.is_set():
                things = [nn.Linear(2, 2) for _ in range(5)]
                torch.optim.SGD(things[0].parameters(), 0.1).zero_grad()
                with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                    things[1](torch.ones(1, 2))
                next(iter(torch.utils.data.DataLoader([1, 2])))
                gc.collect(0)

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        state = torch.get_rng_state()
        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for i in range(6):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            done.set()
            thread.join()
            sys.setswitchinterval(before)
            torch.set_rng_state(state)

    made.loop = loop
    return made


@program("tracemalloc_and_thread_profiles", "process")
def traced_memory(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(torch.ones(2, 8)).square().mean())

    def loop(watch: Any) -> None:
        tracemalloc.start(2)
        threading.setprofile(lambda *args: None)
        try:
            for i in range(3):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
            tracemalloc.take_snapshot()
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
            tracemalloc.stop()

    made.loop = loop
    return made


@program("exit_inside_step_is_caught_outside", "process")
def exits(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(torch.ones(2, 8)).square().mean())
    notes: list[Any] = []

    def loop(watch: Any) -> None:
        for i in range(4):
            try:
                with watch.step(i):
                    made.step(i)
                    if i == 1:
                        sys.exit(7)
                    if i == 2:
                        raise GeneratorExit
            except (SystemExit, GeneratorExit) as error:
                notes.append((type(error).__name__, error.__context__ is None, error.__cause__ is None, error.args))

    made.loop, made.extra = loop, lambda: notes
    return made
