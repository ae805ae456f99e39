"""What a forward does besides computing, and how long tensors live, on steps that go wrong and are made again."""

from __future__ import annotations

import array
import atexit
import collections
import contextlib
import contextvars
import csv
import ctypes
import functools
import gc
import hashlib
import io
import itertools
import logging
import mmap
import os
import pathlib
import queue
import random
import socket
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..program import NAN, Program, batch, bits, mlp, program, training

_calls = [0]  # of a variable of this file


_total = 0.0


def _count() -> float:
    global _total
    _total += 1.0
    _calls[0] += 1
    return _total + _calls[0]


class _Stateful(nn.Module):
    """Remembers in a place that no state_dict knows; a call too many is seen in every later result."""

    calls = 0

    def __init__(self, place: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.draw = getattr(self, f"from_{place}")
        self.numpy, self.python, self.torch = np.random.default_rng(3), random.Random(3), torch.Generator().manual_seed(3)
        self.holder = types.SimpleNamespace(n=0, deep=[[0], collections.deque([1, 2, 3])])
        self.cache = torch.ones(3)  # no buffer
        self.count = itertools.count()
        self.lock = threading.Lock()
        for name in {"count", "lock"} - {place}:  # what nobody can put back
            delattr(self, name)
        step = 0

        def closure() -> float:
            nonlocal step
            step += 1
            return float(step)

        self.closure = closure

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + 0.01 * self.draw())

    def from_numpy(self) -> float:
        return float(self.numpy.random())

    def from_python(self) -> float:
        return self.python.random()

    def from_torch(self) -> float:
        return float(torch.rand((), generator=self.torch))

    def from_holder(self) -> float:
        self.holder.n += 1
        self.holder.deep[0][0] += 1
        self.holder.deep[1].rotate()
        return float(self.holder.n + self.holder.deep[0][0] * self.holder.deep[1][0])

    def from_cache(self) -> float:
        self.cache.add_(1)
        return float(self.cache.sum())

    def from_class(self) -> float:
        _Stateful.calls += 1
        return float(_Stateful.calls)

    def from_closure(self) -> float:
        return self.closure()

    def from_file(self) -> float:
        return _count()

    def from_count(self) -> float:
        return float(next(self.count))

    def from_lock(self) -> float:
        with self.lock:
            self.holder.n += 1
        return float(self.holder.n)


for _place in ("numpy", "python", "torch", "holder", "cache", "class", "closure", "file", "count", "lock"):

    @program(f"bad_step_with_state_in_{_place}", "state")
    def state_in(seed: int, place: str = _place) -> Program:
        global _total
        _calls[0], _total, _Stateful.calls = 0, 0.0, 0
        model = _Stateful(place)

        def loss(i: int) -> torch.Tensor:
            out = model(batch(i) * (NAN if i in (2, 4) else 1))
            return out.nan_to_num().square().mean() + (NAN if i == 4 else 0)

        def step(i: int) -> Any:
            optimizer.zero_grad()
            value = loss(i)
            value.backward()
            if i not in (2, 4):
                optimizer.step()
            return value

        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        return Program([model], [optimizer], step, steps=8)


@program("all_activations_die_by_counting_alone", "lifetimes")
def counted_alone(seed: int) -> Program:
    """With the collector off, what a step made is gone when the step is: nothing in a cycle, nothing held."""
    import gc

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    alive: list[Any] = []

    def step(i: int) -> Any:
        made: list[Any] = []
        handles = [m.register_forward_hook(lambda m, a, out: made.append(weakref.ref(out))) for m in model]
        value = model(batch(i)).square().mean()
        made.append(weakref.ref(value))
        value.backward()
        made += [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        number = float(value.detach())
        del value
        for handle in handles:
            handle.remove()
        alive.append([ref() is not None for ref in made])
        return number

    made = Program([model], [optimizer], step, extra=lambda: alive)

    def loop(watch: Any) -> None:
        gc.disable()
        try:
            for i in range(5):
                with watch.step(i):
                    made.see(step(i))
        finally:
            gc.enable()

    made.loop = loop
    return made


@program("weak_keys_for_every_tensor", "lifetimes")
def weak_keys(seed: int) -> Program:
    from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

    model = mlp()
    known: Any = WeakTensorKeyDictionary()
    modules: Any = WeakIdKeyDictionary()
    sizes: list[int] = []

    def loss(i: int) -> torch.Tensor:
        x = model[0](batch(i))
        y = model[2](model[1](x))
        for tensor in (x, y, *model.parameters()):
            known[tensor] = i
        for module in model.modules():
            modules[module] = i
        sizes.append(len(known))
        return y.square().mean()

    def extra() -> Any:
        return sizes, len(known), len(modules)

    return training(model, loss, extra=extra)


@program("storage_is_taken_away_after_forward", "lifetimes")
def storage_taken(seed: int) -> Program:
    """The input's memory is given back between forward and backward, as some offloaders do."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())

    def loss(i: int) -> torch.Tensor:
        x = batch(i)
        out = model(x)
        kept = x.clone()
        x.untyped_storage().resize_(0)
        out.register_hook(lambda g: (x.untyped_storage().resize_(kept.untyped_storage().nbytes()), x.data.copy_(kept), None)[2])
        return out.square().mean()

    return training(model, loss)


@program("inputs_are_overwritten_after_forward", "lifetimes")
def inputs_overwritten(seed: int) -> Program:
    """One buffer for every batch, filled anew while the step still runs; the bad step comes later."""
    model = mlp()
    buffer = torch.zeros(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            buffer.data.copy_(batch(i) * (NAN if i == 3 else 1))
        out = model(buffer.clone())
        buffer.data.fill_(1e30)
        return out.square().mean()

    return training(model, loss, steps=6, extra=lambda: buffer)


BAD_LOSS, BAD_GRADIENT = (2, 5), 4


def _loss_of(out: torch.Tensor, i: int) -> torch.Tensor:
    """At one step finite, with gradients that are not."""
    value = out.square().mean()
    return value + (out * 0).square().sum().sqrt() if i == BAD_GRADIENT else value


def _given(i: int) -> torch.Tensor:
    return batch(i) * (NAN if i in BAD_LOSS else 1)


def _with_bad_steps(model: nn.Module, extra: Callable[[], Any] | None = None, optimizer: Any = None) -> Program:
    """Two steps with a bad loss and one with bad gradients, which are not taken."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = _loss_of(model(_given(i)), i)
        value.backward()
        if i not in (*BAD_LOSS, BAD_GRADIENT):
            optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=8, extra=extra)


class Effect(nn.Module):
    """Calls a method of the program's in the middle of forward, and adds what it gives."""

    def __init__(self, effect: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.effect = effect

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + float(self.effect(x)) * 1e-3)


def _effect(name: str) -> Callable[[Any], Any]:
    """`make() -> (effect, what it has led to)`."""

    def register(make: Callable[[], tuple[Callable[[torch.Tensor], float], Callable[[], Any]]]) -> Any:
        @program(f"forward_{name}", "effects")
        def built(seed: int) -> Program:
            effect, seen = make()
            return _with_bad_steps(Effect(effect), seen)

        return make

    return register


class Counts(io.TextIOBase):
    def __init__(self) -> None:
        self.lines = 0

    def write(self, text: str) -> int:
        self.lines += "calls so far" in text
        return len(text)


@program("forward_prints", "effects")
def prints(seed: int) -> Program:
    out, calls = Counts(), [0]

    def effect(x: torch.Tensor) -> float:
        calls[0] += 1
        print("calls so far", calls[0])
        return 0.0

    made = _with_bad_steps(Effect(effect), lambda: [out.lines, calls])

    def loop(watch: Any) -> None:
        before, sys.stdout = sys.stdout, out  # type: ignore[assignment]
        try:
            for i in range(8):
                with watch.step(i):
                    made.step(i)
        finally:
            sys.stdout = before

    made.loop = loop
    return made


class Handles(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


@_effect("logs")
def logs() -> Any:
    handler, logger = Handles(), logging.Logger("effects")
    logger.addHandler(handler)

    def effect(x: torch.Tensor) -> float:
        logger.warning("called")
        return handler.count

    return effect, lambda: handler.count


@_effect("warns_each_time")
def warns() -> Any:
    shown: list[str] = []

    def effect(x: torch.Tensor) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *rest, **named: shown.append(str(message))
            warnings.warn("a forward", stacklevel=1)
        return 0.0

    return effect, lambda: shown


@_effect("appends_to_a_file")
def appends() -> Any:
    def effect(x: torch.Tensor) -> float:
        with open("calls.txt", "a") as out:
            out.write("called\n")
        return pathlib.Path("calls.txt").stat().st_size

    return effect, lambda: pathlib.Path("calls.txt").read_text()


@_effect("writes_to_a_descriptor")
def descriptor() -> Any:
    where = os.open("raw.txt", os.O_CREAT | os.O_WRONLY)

    def effect(x: torch.Tensor) -> float:
        return os.write(where, b"x")

    def seen() -> Any:
        with contextlib.suppress(OSError):
            os.close(where)
        return pathlib.Path("raw.txt").read_bytes()

    return effect, seen


@_effect("writes_rows_of_csv")
def rows() -> Any:
    text = io.StringIO()
    writer = csv.writer(text)

    def effect(x: torch.Tensor) -> float:
        return writer.writerow(["called"])  # type: ignore[no-any-return]

    return effect, lambda: text.getvalue()


@_effect("counts_in_the_environment")
def environment() -> Any:
    os.environ["SIXTH"] = "0"

    def effect(x: torch.Tensor) -> float:
        os.environ["SIXTH"] = str(int(os.environ["SIXTH"]) + 1)
        return int(os.environ["SIXTH"])

    return effect, lambda: os.environ.pop("SIXTH", "")


@_effect("counts_in_a_variable_of_a_context")
def context() -> Any:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("effects", default=0)

    def effect(x: torch.Tensor) -> float:
        variable.set(variable.get() + 1)
        return variable.get()

    return effect, variable.get


@_effect("counts_in_a_variable_of_its_thread")
def thread() -> Any:
    own = threading.local()

    def effect(x: torch.Tensor) -> float:
        own.calls = getattr(own, "calls", 0) + 1
        return own.calls  # type: ignore[no-any-return]

    return effect, lambda: own.calls


class Trainer:
    calls = 0


@_effect("counts_behind_a_weak_reference")
def weak() -> Any:
    trainer = Trainer()
    ref, keys = weakref.ref(trainer), weakref.WeakKeyDictionary({trainer: 0})
    del_me = [trainer]
    _ALIVE.extend(del_me)

    def effect(x: torch.Tensor) -> float:
        mine = ref()
        assert mine is not None
        mine.calls += 1
        keys[mine] += 1
        return mine.calls

    return effect, lambda: [ref().calls, list(keys.values())]  # type: ignore[union-attr]


_ALIVE: list[Any] = []


@_effect("hashes_what_it_is_given")
def hashes() -> Any:
    digest = hashlib.sha256()

    def effect(x: torch.Tensor) -> float:
        digest.update(b"called")
        return digest.digest()[0]

    return effect, digest.hexdigest


@_effect("keeps_numbers_in_arrays")
def arrays() -> Any:
    numbers, objects = array.array("f"), np.array([0, None], dtype=object)

    def effect(x: torch.Tensor) -> float:
        numbers.append(1.0)
        objects[0] += 1
        return len(numbers) + objects[0]

    return effect, lambda: [list(numbers), objects[0]]


@_effect("counts_in_memory_of_c")
def in_c() -> Any:
    number, mapped = ctypes.c_int(0), mmap.mmap(-1, 4096)

    def effect(x: torch.Tensor) -> float:
        number.value += 1
        mapped[0] += 1
        return number.value + mapped[0]

    return effect, lambda: [number.value, mapped[0]]


@_effect("sends_to_a_thread")
def sends() -> Any:
    sent: Any = queue.Queue()
    total = [0]

    def work() -> None:
        while (one := sent.get()) is not None:
            total[0] += one
            sent.task_done()

    worker = threading.Thread(target=work, daemon=True)
    worker.start()

    def effect(x: torch.Tensor) -> float:
        sent.put(1)
        sent.join()
        return total[0]

    def seen() -> Any:
        sent.put(None)
        worker.join()
        return total

    return effect, seen


@_effect("sends_through_a_socket")
def through_a_socket() -> Any:
    ours, theirs = socket.socketpair()

    def effect(x: torch.Tensor) -> float:
        return ours.send(b"x")

    def seen() -> Any:
        ours.close()
        with theirs:
            return theirs.recv(100)

    return effect, seen


@_effect("asks_a_cached_function")
def cached() -> Any:
    @functools.lru_cache(maxsize=2)
    def doubled(number: int) -> int:
        return 2 * number

    return lambda x: doubled(7), lambda: list(doubled.cache_info())


class _Left(Effect):
    pass


class _Right(Effect):
    pass


@program("forward_changes_its_class", "effects")
def changes_class(seed: int) -> Program:
    calls: list[str] = []

    def effect(x: torch.Tensor) -> float:
        calls.append(type(model).__name__)
        model.__class__ = _Right if type(model) is _Left else _Left
        return len(calls)

    model: Any = _Left(effect)
    return _with_bad_steps(model, lambda: [calls, type(model).__name__])


@program("forward_registers_for_the_end", "effects")
def registers(seed: int) -> Program:
    """At the end of the process, at the death of an activation, and with the garbage collector."""
    died: list[int] = []

    def at_end() -> None: ...

    def effect(x: torch.Tensor) -> float:
        weakref.finalize(x, died.append, 1)
        atexit.register(at_end)
        return 0.0

    def seen() -> Any:
        gc.collect()
        before = atexit._ncallbacks()
        atexit.unregister(at_end)
        return [died, before - atexit._ncallbacks()]

    return _with_bad_steps(Effect(effect), seen)


@program("memory_bank_that_backward_needs", "effects")
def bank(seed: int) -> Program:
    """A tensor that is no buffer is written in forward before it is used: backward checks that nobody has written since."""

    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
            self.rows = {"all": torch.eye(8)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            self.rows["all"].mul_(0.9).add_(x.detach().nan_to_num().mean(0), alpha=0.1)
            return self.last(x @ self.rows["all"])

    model = Bank()
    return _with_bad_steps(model, lambda: model.rows)


@program("batches_die_when_they_are_let_go", "memory")
def batches_die(seed: int) -> Program:
    """Inputs of several kinds, each asked behind backward whether anybody still has it."""
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        rows = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
        x = torch.from_numpy(rows) if i % 2 else _given(i)
        refs = [weakref.ref(rows), weakref.ref(x)]
        value = model(x).square().mean()
        del x, rows
        value.backward()
        notes.append([ref() is None for ref in refs])
        value = value.detach()
        optimizer.step()
        notes.append([ref() is None for ref in refs])
        return value

    return Program([model], [optimizer], step, steps=6, extra=lambda: notes)


@program("static_buffers_are_filled_between_passes", "memory")
def static_buffers(seed: int) -> Program:
    """As a captured graph has them: inputs, outputs and gradients stay where they are, and are written over."""
    model = mlp()
    x, out = torch.zeros(4, 8), torch.zeros(4, 4)
    gradients = [torch.zeros_like(p) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(i: int) -> Any:
        x.data.copy_(_given(i))
        for p, gradient in zip(model.parameters(), gradients):
            p.grad = gradient.zero_()
        value = _loss_of(model(x), i)
        value.backward()
        out.copy_(model(x).detach())
        x.data.zero_()
        if i not in (*BAD_LOSS, BAD_GRADIENT):
            optimizer.step()
        return [value.detach(), out.clone(), [g.data_ptr() == p.grad.data_ptr() for g, p in zip(gradients, model.parameters())]]

    return Program([model], [optimizer], step, steps=8)


@program("weights_given_from_outside", "memory")
def from_outside(seed: int) -> Program:
    """The model's own weights are never used: each call is given others, an ensemble of them at times."""
    from torch.func import functional_call, stack_module_state, vmap

    model = mlp()
    members = [mlp() for _ in range(3)]
    weights, _ = stack_module_state(members)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(weights.values(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        x = _given(i)
        outs = vmap(lambda w, x: functional_call(model, w, (x,)), (0, None))(weights, x)
        one = functional_call(model, {name: w[0] for name, w in weights.items()}, (x,))
        value = _loss_of(outs.mean(0) + one, i)
        value.backward()
        if i not in (*BAD_LOSS, BAD_GRADIENT):
            optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=8, extra=lambda: weights)


@program("weights_swapped_between_the_passes", "memory")
def swapped(seed: int) -> Program:
    """Weights are exchanged for those of an average between forward and backward, and back, by swapping and by `.data`."""
    model = mlp()
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = _loss_of(model(_given(i)), i)
        for name, p in model.named_parameters():
            p.data, average[name] = average[name], p.data
        with torch.no_grad():
            other = model(batch(i))
        for name, p in model.named_parameters():
            p.data, average[name] = average[name], p.data
        value.backward()
        if i not in (*BAD_LOSS, BAD_GRADIENT):
            optimizer.step()
        torch._foreach_lerp_(list(average.values()), [p.data for p in model.parameters()], 0.1)
        if i == 6:
            torch.utils.swap_tensors(model[0].bias, nn.Parameter(torch.ones(8)))
            optimizer.param_groups[0]["params"] = list(model.parameters())
        return [value.detach(), other]

    return Program([model], [optimizer], step, steps=8, extra=lambda: average)


@program("gradients_switched_on_and_off_in_forward", "memory")
def switched(seed: int) -> Program:
    """Which weights learn is decided inside forward, by turns, and the grad mode is left other than it was found."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.turn = nn.Linear(8, 8), nn.Linear(8, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.turn += 1
            torch.set_grad_enabled(False)
            x = x.mean(0, keepdim=True) + x
            torch.set_grad_enabled(True)
            for p in self.first.parameters():
                p.requires_grad_(self.turn % 2 == 0)
            torch.manual_seed(self.turn)
            return self.last(F.dropout(self.first(x)))

    return _with_bad_steps(Turns())


@program("mapped_weights_and_foreign_inputs", "memory")
def mapped_weights(seed: int) -> Program:
    """Weights lie in a file that is mapped, inputs in memory of Python that is taken away as soon as it is free."""
    model = mlp()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    file = torch.from_file("weights.bin", shared=True, size=start.numel(), dtype=torch.float32)
    file.copy_(start)
    at = 0
    for p in model.parameters():
        p.data = file[at : at + p.numel()].view(p.shape)
        at += p.numel()
    notes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        memory = mmap.mmap(-1, 4096)
        memory[:128] = _given(i).numpy().tobytes()
        x = torch.frombuffer(memory, dtype=torch.float32, count=32).reshape(4, 8)
        value = model(x).square().mean()
        graph_free = value.detach().clone()
        value.backward()
        del x, value
        try:
            memory.close()
            notes.append("closed")
        except BufferError as error:
            notes.append(str(error))
        return graph_free

    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = loss(i)
        if i not in BAD_LOSS:
            optimizer.step()
        return value

    made = Program([model], [optimizer], step, steps=8)
    made.extra = lambda: [notes, bits(np.fromfile("weights.bin", np.float32))]
    return made


@program("updates_in_place_that_overflow", "memory")
def overflowing(seed: int) -> Program:
    """FP32 weights and a running sum of which one number becomes infinite, in place: the others are moved once, as ever."""
    model = nn.Linear(8, 4)
    total = torch.zeros(8)

    def step(i: int) -> Any:
        with torch.no_grad():
            model.weight[0, 0] = 3e38
            total[0] = 3e38
        value = model(batch(i) * torch.tensor([0.0] + [1.0] * 7)).square().mean()
        value.backward()
        with torch.no_grad():
            model.weight.grad[0, 0] = -3e38
            model.weight.sub_(model.weight.grad)
            total.add_(torch.full((8,), 1.0).index_fill(0, torch.tensor([0]), 3e38))
        model.zero_grad()
        return [value.detach(), total.clone()]

    return Program([model], [], step, steps=4, extra=lambda: total)
