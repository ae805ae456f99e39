"""What belongs to the process: limits, files, imports, signals, forks, and functions of Python replaced for all of it."""

from __future__ import annotations

import atexit
import builtins
import collections
import ctypes
import decimal
import enum
import faulthandler
import functools
import gc
import importlib
import importlib.abc
import json
import logging
import operator
import os
import pickle
import queue
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import tracemalloc
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..program import Program, mlp, program, training
from .fourth_process import batch

NAN = float("nan")


def _sick(i: int, at: int = 2) -> torch.Tensor:
    return batch(i) * (NAN if i == at else 1)


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
                    model(_sick(i, 30)).square().mean().backward()
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
                        value = model(_sick(i, 5)).float().square().mean()
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
                    model(_sick(i, 3)).float().square().mean().backward()
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
                    model(_sick(i)).square().mean().backward()
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
                    value = model(_sick(i)).square().mean()
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
        value = model(_sick(i)).square().mean()
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
            return checkpoint(model, _sick(i), use_reentrant=False).square().mean()
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
        value = model(_sick(i))
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
                    (model(_sick(i)) * 1e30).square().mean().backward()
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
                    model(_sick(i)).square().mean().backward()
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
        out = model(_sick(i, 3))
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
        value = model(_sick(i)).square().mean()
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
                    model(_sick(i)).square().mean().backward()
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
        out = net(_sick(i))
        best = max(out[Phase.A], Score(torch.zeros(())))
        return best.tensor + out[Phase.B].square().mean() + out[Net][Phase.B].sum()

    return training(net, loss, steps=4)


@program("memory_of_c_is_written_behind_the_weights", "process")
def memory_of_c(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(_sick(i, 3)).square().mean()
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
