"""Sixth round: what a forward does besides computing, where nobody looks for it, on steps that go wrong and are made again."""

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
import logging
import mmap
import os
import pathlib
import pickle
import queue
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from ..program import Program, bits, mlp, program
from .fourth_process import batch

NAN = float("nan")
BAD_LOSS, BAD_GRADIENT = (2, 5), 4


def _loss_of(out: torch.Tensor, i: int) -> torch.Tensor:
    """At one step finite, with gradients that are not."""
    value = out.square().mean()
    return value + (out * 0).square().sum().sqrt() if i == BAD_GRADIENT else value


def _given(i: int) -> torch.Tensor:
    return batch(i) * (NAN if i in BAD_LOSS else 1)


def _sick(model: nn.Module, extra: Callable[[], Any] | None = None, optimizer: Any = None) -> Program:
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
        @program(f"sixth_forward_{name}", "sixth effects")
        def built(seed: int) -> Program:
            effect, seen = make()
            return _sick(Effect(effect), seen)

        return make

    return register


# ---- what a forward does besides computing ----


class Counts(io.TextIOBase):
    def __init__(self) -> None:
        self.lines = 0

    def write(self, text: str) -> int:
        self.lines += "calls so far" in text
        return len(text)


@program("sixth_forward_prints", "sixth effects")
def prints(seed: int) -> Program:
    out, calls = Counts(), [0]

    def effect(x: torch.Tensor) -> float:
        calls[0] += 1
        print("calls so far", calls[0])
        return 0.0

    made = _sick(Effect(effect), lambda: [out.lines, calls])

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
    handler, logger = Handles(), logging.Logger("sixth")
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
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("sixth", default=0)

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


@program("sixth_forward_changes_its_class", "sixth effects")
def changes_class(seed: int) -> Program:
    calls: list[str] = []

    def effect(x: torch.Tensor) -> float:
        calls.append(type(model).__name__)
        model.__class__ = _Right if type(model) is _Left else _Left
        return len(calls)

    model: Any = _Left(effect)
    return _sick(model, lambda: [calls, type(model).__name__])


@program("sixth_forward_registers_for_the_end", "sixth effects")
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

    return _sick(Effect(effect), seen)


@program("sixth_memory_bank_that_backward_needs", "sixth effects")
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
    return _sick(model, lambda: model.rows)


# ---- hooks where nobody looks for them ----


@program("sixth_hooks_on_accumulating_nodes", "sixth hooks")
def accumulating(seed: int) -> Program:
    """The way of old wrappers: hooks on the node that adds up the gradient of a parameter, and hooks over several of them."""
    model, calls = mlp(), []  # type: tuple[Any, list[Any]]
    parameters = list(model.parameters())
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in parameters]  # type: ignore[union-attr]
    for number, node in enumerate(nodes):
        node.register_hook(lambda *given, number=number: calls.append(number))
    register_multi_grad_hook(parameters, lambda gradients: calls.append(len(gradients)))
    return _sick(model, lambda: [calls, len(nodes)])


@program("sixth_hooks_of_all_modules", "sixth hooks")
def of_all_modules(seed: int) -> Program:
    model, calls = mlp(), []  # type: tuple[Any, list[Any]]
    made = _sick(model, lambda: calls)

    def loop(watch: Any) -> None:
        hooks = nn.modules.module
        handles = [
            hooks.register_module_forward_hook(lambda m, *rest: calls.append(type(m).__name__)),
            hooks.register_module_full_backward_hook(lambda m, *rest: calls.append("back " + type(m).__name__)),
        ]
        try:
            for i in range(8):
                with watch.step(i):
                    made.see(made.step(i))
        finally:
            for handle in handles:
                handle.remove()

    made.loop = loop
    return made


@program("sixth_saved_tensors_packed_and_counted", "sixth hooks")
def packed(seed: int) -> Program:
    """What is saved for backward goes through the program's hands, with a default around the whole step."""
    model, calls = mlp(), [0, 0]

    def pack(t: torch.Tensor) -> Any:
        calls[0] += 1
        return t.numpy(force=True).copy() if not isinstance(t, nn.Parameter) else t

    def unpack(packed: Any) -> torch.Tensor:
        calls[1] += 1
        return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed)

    made = _sick(model, lambda: calls)
    usual = made.step

    def step(i: int) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return usual(i)

    made.step = step
    return made


@program("sixth_checkpoint_with_draws_on_bad_steps", "sixth hooks")
def draws(seed: int) -> Program:
    drop, model = nn.Dropout(0.5), mlp()
    whole = nn.ModuleList([drop, model])

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = whole

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(lambda x: drop(torch.tanh(x)) + torch.rand_like(x), x, use_reentrant=False)
            return checkpoint(lambda x: model(drop(x)), x.requires_grad_(), use_reentrant=True)

    return _sick(Parts())


@program("sixth_optimizer_runs_in_hooks_of_accumulation", "sixth hooks")
def in_accumulation(seed: int) -> Program:
    """Each weight is updated as soon as its gradient is there, and the gradient let go."""
    model = mlp()
    optimizers = {id(p): torch.optim.Adam([p], 0.01) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        if p.grad is not None and bool(p.grad.isfinite().all()):
            optimizers[id(p)].step()
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]

    def step(i: int) -> Any:
        value = _loss_of(model(_given(i)), i)
        value.backward()
        return value

    return Program([model], list(optimizers.values()), step, steps=8, extra=lambda: len(handles))


@program("sixth_states_with_hooks_and_steps_taken_back", "sixth hooks")
def taken_back(seed: int) -> Program:
    """A step that went wrong is undone from the state of one before, whose loading and saving is heard by hooks."""
    model, calls = mlp(), []  # type: tuple[Any, list[Any]]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer.register_state_dict_post_hook(lambda o, state: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append("loaded"))
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("step"))
    kept: list[Any] = []

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = _loss_of(model(_given(i)), i)
        value.backward()
        optimizer.step()
        if i in (*BAD_LOSS, BAD_GRADIENT):
            weights, state = pickle.loads(kept[-1])
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        kept.append(pickle.dumps((model.state_dict(), optimizer.state_dict())))
        return value

    return Program([model], [optimizer], step, steps=8, extra=lambda: calls)


# ---- inputs, weights and what lies in memory ----


@program("sixth_batches_die_when_they_are_let_go", "sixth memory")
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


@program("sixth_static_buffers_are_filled_between_passes", "sixth memory")
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


@program("sixth_weights_given_from_outside", "sixth memory")
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


@program("sixth_weights_swapped_between_the_passes", "sixth memory")
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


@program("sixth_gradients_switched_on_and_off_in_forward", "sixth memory")
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

    return _sick(Turns())


@program("sixth_mapped_weights_and_foreign_inputs", "sixth memory")
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


# ---- Python around the step ----


@program("sixth_profilers_of_python_and_torch_around_a_step", "sixth python")
def profilers(seed: int) -> Program:
    """cProfile-like counting of the program's own functions, and torch's profiler with stacks, schedules and callbacks."""
    model, calls = mlp(), []  # type: tuple[Any, collections.Counter[str]]
    calls = collections.Counter()
    here = __file__

    def count(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename == here:
            calls[frame.f_code.co_name] += 1

    made = _sick(model, lambda: dict(calls))

    def loop(watch: Any) -> None:
        ready: list[int] = []
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
        with torch.profiler.profile(schedule=schedule, with_stack=True, on_trace_ready=lambda p: ready.append(p.step_num)) as one:
            for i in range(8):
                sys.setprofile(count)
                try:
                    with watch.step(i):
                        value = made.step(i)
                finally:
                    sys.setprofile(None)
                made.see(value)
                one.step()
        made.seen.append(ready)

    made.loop = loop
    return made


@program("sixth_functions_handled_by_a_mode_on_bad_steps", "sixth python")
def function_mode(seed: int) -> Program:
    """A mode of the program's own, on only inside forward, counts functions and replaces one of them."""
    calls: collections.Counter[str] = collections.Counter()

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[getattr(func, "__name__", "")] += 1
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is F.linear else out

    class Moded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with Mode():
                return self.inner(x)

    return _sick(Moded(), lambda: dict(calls))


class Tagged(nn.Parameter):
    """A parameter of a class of its own, with a memory of how often it was used."""

    used: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func is F.linear:
            for one in args:
                if isinstance(one, Tagged):
                    one.used = getattr(one, "used", 0) + 1
        return out


@program("sixth_parameters_remember_their_uses", "sixth python")
def tagged(seed: int) -> Program:
    model = mlp()
    for part in (model[0], model[2]):
        part.weight = Tagged(part.weight.detach())
    return _sick(model, lambda: [getattr(p, "used", 0) for p in model.parameters()])


@program("sixth_step_inside_an_executor_and_its_context", "sixth python")
def in_executor(seed: int) -> Program:
    """Forward runs in a pool's thread under a copied context, backward in the main one; futures carry the loss."""
    import concurrent.futures

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for i in range(8):
                with watch.step(i):
                    optimizer.zero_grad()
                    context = contextvars.copy_context()
                    value = pool.submit(context.run, lambda i=i: _loss_of(model(_given(i)), i)).result()
                    if i % 2:
                        value.backward()
                    else:
                        pool.submit(value.backward).result()
                    if i not in (*BAD_LOSS, BAD_GRADIENT):
                        optimizer.step()
                made.see(value)

    made.loop = loop
    return made


@program("sixth_named_and_lazy_parts_that_settle_on_a_bad_step", "sixth python")
def lazy(seed: int) -> Program:
    """A part is made when it is first called, at a step that goes wrong; hooks of lazy modules take themselves away."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 4))

    def loss(i: int) -> torch.Tensor:
        if i == BAD_LOSS[0]:
            torch.manual_seed(5)
            model[1] = nn.LazyLinear(8)
        value = _loss_of(model(_given(i)), i)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        return value

    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        if i not in (*BAD_LOSS, BAD_GRADIENT):
            optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=8)


@program("sixth_bad_steps_in_channels_last_and_autocast", "sixth python")
def channels_last(seed: int) -> Program:
    """Strides of weights, gradients and outputs are those of the program, on bad steps too."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.Conv2d(8, 4, 3, stride=2))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    strides: list[Any] = []

    def step(i: int) -> Any:
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x * (NAN if i in BAD_LOSS else 1))
        strides.append([out.stride()])
        value = _loss_of(out.float(), i)
        value.backward()
        strides[-1] += [p.grad.stride() for p in model.parameters()]
        if i not in (*BAD_LOSS, BAD_GRADIENT):
            optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=8, extra=lambda: strides)


@program("sixth_updates_in_place_that_overflow", "sixth memory")
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
