"""Steps that end in other ways than at their end: exceptions, breaks, threads, forks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..program import Program, mlp, program, training


def _usual(**more: Any) -> tuple[Program, nn.Module, torch.Tensor]:
    model = mlp()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), **more), model, x


class Unlucky(nn.Module):
    """Raises in its forward, its backward, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return y


def _raising(error: type[BaseException]) -> Program:
    unlucky = Unlucky()
    model = nn.Sequential(nn.Linear(8, 8), unlucky, nn.Linear(8, 4))
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())

    def loop(watch: Any) -> None:
        for i in range(4):
            unlucky.error = error(f"step {i}") if i in (0, 2) else None
            try:
                with watch.step(i):
                    made.see(made.step(i))
            except error as caught:
                made.see(caught)

    made.loop = loop
    return made


for _error in (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, MemoryError, torch.OutOfMemoryError):

    @program(f"forward_raises_{_error.__name__}", "exceptions")
    def forward_raises(seed: int, error: Any = _error) -> Program:
        return _raising(error)


@program("exception_caught_inside_step", "exceptions")
def caught_inside(seed: int) -> Program:
    unlucky = Unlucky()
    model = nn.Sequential(nn.Linear(8, 8), unlucky, nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        unlucky.error = RuntimeError("once")
        with contextlib.suppress(RuntimeError):
            model(x)
        return model(x).square().mean()

    return training(model, loss)


@program("backward_raises", "exceptions")
def backward_raises(seed: int) -> Program:
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("in backward")

    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        return (Boom.apply(y) if i == 1 else y).square().mean()

    made = training(model, loss)

    def loop(watch: Any) -> None:
        for i in range(3):
            try:
                with watch.step(i):
                    made.see(made.step(i))
            except ZeroDivisionError as error:
                made.see(error)

    made.loop = loop
    return made


@program("optimizer_step_raises", "exceptions")
def optimizer_raises(seed: int) -> Program:
    class Moody(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise LookupError("moody")

    model = mlp()
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean(), Moody(model.parameters(), 0.1))

    def loop(watch: Any) -> None:
        for i in range(3):
            with contextlib.suppress(LookupError), watch.step(i):
                made.step(i)

    made.loop = loop
    return made


@program("exception_ends_the_run", "exceptions")
def exception_escapes(seed: int) -> Program:
    made, model, x = _usual()
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        if i == 1:
            model(x[:, :3])
        return value

    made.step = step
    return made


@program("wrong_shape_and_dtype_errors", "exceptions")
def wrong_shape(seed: int) -> Program:
    made, model, x = _usual()
    inner = made.step
    texts: list[str] = []

    def step(i: int) -> Any:
        for bad in (x[:, :3], x.double(), x.long(), None, "text"):
            try:
                model(bad)
            except Exception as error:  # noqa: BLE001 - the text is what is compared
                texts.append(f"{type(error).__name__} {error}")
        return inner(i)

    made.step = step
    made.extra = lambda: texts
    return made


@program("step_left_by_break", "abandoned steps")
def left_by_break(seed: int) -> Program:
    made, *_ = _usual()

    def loop(watch: Any) -> None:
        for i in range(5):
            with watch.step(i):
                made.see(made.step(i))
                if i == 2:
                    break
        with watch.step(3):
            made.step(3)

    made.loop = loop
    return made


@program("step_left_by_return", "abandoned steps")
def left_by_return(seed: int) -> Program:
    made, *_ = _usual()

    def one(watch: Any, i: int) -> Any:
        with watch.step(i):
            return made.step(i)

    made.loop = lambda watch: [made.see(one(watch, i)) for i in range(3)] and None
    return made


@program("step_left_open_in_generator", "abandoned steps")
def left_in_generator(seed: int) -> Program:
    made, *_ = _usual()

    def steps(watch: Any) -> Iterator[Any]:
        for i in range(5):
            with watch.step(i):
                yield made.step(i)

    def loop(watch: Any) -> None:
        first, second = steps(watch), steps(watch)
        made.see(next(first))
        made.see(next(first))
        made.see(next(second))
        first.close()
        del second
        with watch.step(9):
            made.see(made.step(9))

    made.loop = loop
    return made


@program("step_never_ended", "abandoned steps")
def never_ended(seed: int) -> Program:
    made, *_ = _usual()

    def loop(watch: Any) -> None:
        for i in range(3):
            watch.begin(i)
            made.see(made.step(i))

    made.loop = loop
    return made


@program("steps_nested", "abandoned steps")
def nested_steps(seed: int) -> Program:
    made, *_ = _usual()

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                made.see(made.step(i))
                with watch.step(i + 10):
                    made.see(made.step(i))
                made.see(made.step(i))

    made.loop = loop
    return made


@program("steps_out_of_order_and_repeated", "abandoned steps")
def out_of_order(seed: int) -> Program:
    made, *_ = _usual()

    def loop(watch: Any) -> None:
        for i in (5, 5, 3, -1, 0, 2**40):
            with watch.step(i):
                made.see(made.step(0))

    made.loop = loop
    return made


@program("ends_without_begin_and_closes_twice", "abandoned steps")
def ends_without_begin(seed: int) -> Program:
    made, *_ = _usual()

    def loop(watch: Any) -> None:
        watch.end()
        with watch.step(0):
            made.see(made.step(0))
        watch.end()
        watch.close()
        made.see(made.step(1))
        watch.close()

    made.loop = loop
    return made


@program("closed_inside_step", "abandoned steps")
def closed_inside(seed: int) -> Program:
    made, model, x = _usual()

    def loop(watch: Any) -> None:
        with watch.step(0):
            y = model(x)
            watch.close()
            y.square().mean().backward()
            made.optimizers[0].step()
        made.see(made.step(1))

    made.loop = loop
    return made


@program("step_closed_in_another_thread", "threads")
def closed_elsewhere(seed: int) -> Program:
    made, *_ = _usual()

    def loop(watch: Any) -> None:
        for i in range(3):
            watch.begin(i)
            made.see(made.step(i))
            thread = threading.Thread(target=watch.end)
            thread.start()
            thread.join()

    made.loop = loop
    return made


@program("training_in_another_thread", "threads")
def other_thread(seed: int) -> Program:
    made, *_ = _usual()
    made.loop = lambda watch: _in_threads([lambda: _steps(made, watch)])
    return made


def _steps(made: Program, watch: Any) -> None:
    for i in range(4):
        with watch.step(i):
            value = made.step(i)
        made.see(value)


def _in_threads(jobs: list[Any]) -> None:
    errors: list[BaseException] = []

    def guard(job: Any) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@program("two_models_in_two_threads", "threads")
def two_threads(seed: int) -> Program:
    (one, *_), (two, *_) = _usual(), _usual()

    def loop(watch: Any) -> None:
        other = watch.another(two.models[0], two.optimizers[0])
        _in_threads([lambda: _steps(one, watch), lambda: _steps(two, other)])

    return Program(
        one.models + two.models, one.optimizers + two.optimizers, one.step, loop=loop, extra=lambda: [one.seen, two.seen]
    )


@program("two_watches_on_one_model", "threads")
def two_watches(seed: int) -> Program:
    made, *_ = _usual()

    def loop(watch: Any) -> None:
        other = watch.another(made.models[0], made.optimizers[0])
        for i in range(3):
            with watch.step(i), other.step(i):
                made.see(made.step(i))

    made.loop = loop
    return made


@program("backward_in_another_thread", "threads")
def backward_elsewhere(seed: int) -> Program:
    made, model, x = _usual()

    def step(i: int) -> Any:
        model.zero_grad()
        loss = model(x).square().mean()
        _in_threads([loss.backward])
        made.optimizers[0].step()
        return loss

    made.step = step
    return made


@program("forward_in_threads_at_once", "threads")
def forward_threads(seed: int) -> Program:
    made, model, x = _usual()

    def step(i: int) -> Any:
        model.zero_grad()
        out: dict[int, torch.Tensor] = {}
        _in_threads([lambda n=n: out.__setitem__(n, model(x * n)) for n in range(3)])
        loss = torch.stack([out[n] for n in range(3)]).square().mean()
        loss.backward()
        made.optimizers[0].step()
        return loss

    made.step = step
    return made


@program("os_fork_inside_step", "processes")
def forked(seed: int) -> Program:
    made, model, x = _usual()
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                inner(i)
                model(x).sum().item()
                code = 0
            finally:
                os._exit(code)
        return value, os.waitpid(pid, 0)[1]

    made.step = step
    return made


def _child(model: nn.Module, x: torch.Tensor, queue: Any) -> None:
    torch.set_num_threads(1)
    queue.put(model(x).detach().numpy())


@program("multiprocessing_fork_inside_step", "processes")
def multiprocessing_fork(seed: int) -> Program:
    made, model, x = _usual()
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=_child, args=(model, x, queue))
        process.start()
        out = queue.get()
        process.join()
        queue.close()
        return value, out, process.exitcode

    made.step = step
    return made


class Noise(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return torch.randn(8) + float(np.random.rand()), torch.tensor(i % 4)


def _loaded(**options: Any) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        loader = DataLoader(Noise(), batch_size=4, shuffle=True, **options)
        for epoch in range(1 if options.get("multiprocessing_context") == "spawn" else 2):
            for i, (x, y) in enumerate(loader):
                with watch.step(epoch * 10 + i):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                made.see(loss)
        del loader

    made.loop = loop
    return made


@program("dataloader_no_workers", "processes")
def loader_plain(seed: int) -> Program:
    return _loaded()


@program("dataloader_fork_workers", "processes")
def loader_fork(seed: int) -> Program:
    return _loaded(num_workers=2, multiprocessing_context="fork")


@program("dataloader_spawn_workers", "processes")
def loader_spawn(seed: int) -> Program:
    return _loaded(num_workers=1, multiprocessing_context="spawn")


@program("dataloader_created_inside_step", "processes")
def loader_inside(seed: int) -> Program:
    made, model, _ = _usual()

    def step(i: int) -> Any:
        made.optimizers[0].zero_grad()
        losses = []
        for (x,) in DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4, num_workers=1, multiprocessing_context="fork"):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        made.optimizers[0].step()
        return losses

    made.step = step
    return made


@program("generator_based_training_loop", "abandoned steps")
def generator_loop(seed: int) -> Program:
    made, *_ = _usual()

    def coroutine() -> Any:
        value = None
        while True:
            i = yield value
            value = made.step(i)

    def loop(watch: Any) -> None:
        run = coroutine()
        next(run)
        for i in range(3):
            with watch.step(i):
                value = run.send(i)
            made.see(value)

    made.loop = loop
    return made


@program("work_outside_steps", "abandoned steps")
def outside(seed: int) -> Program:
    made, model, x = _usual()

    def loop(watch: Any) -> None:
        made.see(made.step(0))
        for i in range(2):
            with watch.step(i):
                loss = model(x).square().mean()
            loss.backward()
            made.see(loss)
            made.optimizers[0].step()
            made.optimizers[0].zero_grad()
            model.eval()
            with torch.no_grad():
                made.see(model(x))
            model.train()

    made.loop = loop
    return made


@program("step_with_nothing_inside", "abandoned steps")
def nothing(seed: int) -> Program:
    made, *_ = _usual()
    made.step = lambda i: None
    return made


@program("many_short_steps", "memory")
def many_steps(seed: int) -> Program:
    import gc

    made, *_ = _usual(steps=60)
    inner = made.step
    sizes: list[int] = []

    def step(i: int) -> Any:
        if i in (25, 55):
            gc.collect()
            big = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.numel() >= 16]
            sizes.append(len(big))
        return inner(i)

    made.step = step
    made.extra = lambda: sizes[0] == sizes[1]
    return made


@program("activations_freed_when_step_ends", "memory")
def activations_freed(seed: int) -> Program:
    import weakref

    made, model, x = _usual()
    alive: list[bool] = []

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                y = model(x)
                storage = weakref.ref(y.untyped_storage())
                tensor = weakref.ref(y)
                y.square().mean().backward()
                made.optimizers[0].step()
                made.optimizers[0].zero_grad()
                del y
            alive.append(storage() is not None or tensor() is not None)

    made.loop = loop
    made.extra = lambda: alive
    return made
