"""Steps that end in other ways than at their end: exceptions, breaks, threads, forks."""

from __future__ import annotations

import builtins
import contextlib
import copy
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..program import NAN, TESTS, Program, batch, mlp, program, training


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


def _is_foreign(filename: str) -> bool:
    """Neither torch, nor Python, nor these programs: a tool."""
    library = (os.path.dirname(torch.__file__), os.path.dirname(os.__file__), TESTS)
    return not filename.startswith((*library, "<"))


def _ctrl_c(number: int, sick: bool) -> None:
    @program(f"ctrl_c_at_foreign_call_{number}{'_of_a_bad_step' if sick else ''}", "interrupts")
    def ctrl_c(seed: int) -> Program:
        """Ctrl-C arrives while a tool works, or else at the end of the step: it reaches the user, who goes back and on."""
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        notes: list[Any] = []

        def step(i: int) -> Any:
            value = model(batch(i) * (NAN if sick and i == 2 else 1)).square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        made = Program([model], [optimizer], step, extra=lambda: notes)

        def loop(watch: Any) -> None:
            for i in range(5):
                kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                randoms = torch.get_rng_state()
                left = [number]

                def profile(frame: Any, event: str, arg: Any, left: list[int] = left) -> None:
                    if event == "call" and _is_foreign(frame.f_code.co_filename):
                        left[0] -= 1
                        if left[0] == 0:
                            sys.setprofile(None)
                            raise KeyboardInterrupt("from the keyboard")

                try:
                    with watch.step(i):
                        if i == 2:
                            sys.setprofile(profile)
                        value = step(i)
                        if i == 2:
                            sys.setprofile(None)
                            notes.append("swallowed" if left[0] <= 0 else "it comes now")
                            raise KeyboardInterrupt("from the keyboard")
                    made.see(value)
                except KeyboardInterrupt as error:
                    notes[:] = [str(error)] if "swallowed" not in notes else notes
                    model.load_state_dict(kept[0])
                    optimizer.load_state_dict(kept[1])
                    optimizer.zero_grad()
                    torch.set_rng_state(randoms)
                finally:
                    sys.setprofile(None)

        made.loop = loop
        return made


for _number in (1, 4, 15, 60, 200, 800):
    _ctrl_c(_number, False)


for _number in (30, 300, 3000):
    _ctrl_c(_number, True)


_PRELUDE = """
import sys, os
setting, tests = sys.argv[1:3]
sys.path.insert(0, tests)
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
from harmless.program import Unwatched, bits
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
if setting == "plain":
    watch = Unwatched()
else:
    from harmless.harness import Watched
    watch = Watched(setting, [model], [optimizer], None, "logs")
def step(i):
    optimizer.zero_grad()
    x = torch.linspace(-1, 1, 32).reshape(4, 8) * (i + 1)
    value = model(x * (float("nan") if i == 3 else 1)).square().mean()
    value.backward()
    if i != 3:
        optimizer.step()
    return value
def told():
    return str([bits(p) for p in model.parameters()])
"""


_ENDS = {
    "without_close": "for i in range(6):\n with watch.step(i): step(i)\nprint(told())",
    "inside_a_step": "for i in range(6):\n with watch.step(i):\n  step(i)\n  if i == 4: print(told()); sys.exit(5)",
    "by_an_error": "for i in range(6):\n with watch.step(i):\n  step(i)\n  if i == 4: print(told()); raise ValueError('the end')",
    "by_sigterm": "import signal\nfor i in range(6):\n with watch.step(i):\n  step(i)\n  if i == 4: print(told(), flush=True); "
    "os.kill(os.getpid(), signal.SIGTERM)",
    "with_handlers_in_order": "import atexit\natexit.register(lambda: print('first', told()))\nfor i in range(6):\n"
    " with watch.step(i): step(i)\natexit.register(lambda: (step(9), print('second', told())))",
    "with_a_daemon": "import threading, time\ndef run():\n while True: time.sleep(0.001)\n"
    "threading.Thread(target=run, daemon=True).start()\nfor i in range(6):\n with watch.step(i): step(i)\n"
    "print(told(), flush=True)",
    "without_standard_streams": "out = open('out.txt', 'w')\nsys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None\n"
    "for n in (0, 1, 2): os.close(n)\nfor i in range(6):\n with watch.step(i): step(i)\nwatch.close()\n"
    "out.write(told())\nout.close()",
    "into_a_broken_pipe": "r, w = os.pipe()\nos.close(r)\nos.dup2(w, 1)\nos.dup2(w, 2)\nout = open('out.txt', 'w')\n"
    "for i in range(6):\n with watch.step(i): step(i)\nwatch.close()\nout.write(told())\nout.close()\nos._exit(0)",
    "with_logs_a_file": "watch.close()\nimport shutil\nshutil.rmtree('logs', ignore_errors=True)\nopen('logs', 'w').close()\n"
    "if setting != 'plain': watch = Watched(setting, [model], [optimizer], None, 'logs/deeper')\n"
    "for i in range(6):\n with watch.step(i): step(i)\nprint(told())",
}


_FLAGS = {"with_a_daemon": ["-X", "dev"], "without_close": ["-OO", "-W", "error"], "by_an_error": ["-b", "-u"]}


def _ending(name: str, body: str) -> None:
    @program(f"ends_{name}", "endings")
    def ending(seed: int) -> Program:
        model = nn.Linear(2, 2)
        notes: list[Any] = []
        made = Program([model], [], lambda i: None, extra=lambda: notes)

        def loop(watch: Any) -> None:
            home = pathlib.Path("alone").resolve()
            home.mkdir()
            (home / "train.py").write_text(_PRELUDE + body)
            ended = subprocess.run(
                [sys.executable, *_FLAGS.get(name, []), "train.py", getattr(watch, "setting", "plain"), TESTS],
                cwd=home, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            out = home / "out.txt"
            told = "ValueError: the end" in ended.stderr.splitlines()  # a tool may add lines of its own
            notes.extend([ended.returncode, ended.stdout, out.read_text() if out.exists() else None, told])
            import shutil

            shutil.rmtree(home, ignore_errors=True)

        made.loop = loop
        return made


for _name, _body in _ENDS.items():
    _ending(_name, _body)


class _Unspeakable(Exception):
    def __init__(self, must: Any, have: Any) -> None:
        self.must = must

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__

    def with_traceback(self, tb: Any) -> Any:
        raise RuntimeError("no traceback")


@program("errors_without_words", "errors")
def wordless(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]

    def hook(m: Any, a: Any, out: Any) -> None:
        if len(notes) < 3:
            raise _Unspeakable(1, 2)

    model[1].register_forward_hook(hook)
    made = training(model, lambda i: model(batch(i)).square().mean(), steps=5)

    def loop(watch: Any) -> None:
        for i in range(6):
            try:
                with watch.step(i):
                    made.see(made.step(i))
            except _Unspeakable as error:
                here, depth = error.__traceback__, 0
                while here is not None:
                    depth += here.tb_frame.f_code.co_filename == __file__
                    here = here.tb_next
                notes.append([depth, error.__cause__ is None, error.__context__ is None, getattr(error, "__notes__", None)])

    made.loop, made.extra = loop, lambda: notes
    return made


@program("groups_of_errors_and_a_lone_stop_iteration", "errors")
def groups_of_errors(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]
    group = getattr(builtins, "BaseExceptionGroup", lambda words, errors: errors[0])  # Python 3.10 has none
    errors: list[BaseException] = [
        group("several", [KeyboardInterrupt("a"), ValueError("b")]),
        StopIteration(7),
        StopAsyncIteration(8),
        MemoryError("no more"),
        RecursionError("too deep"),
        SystemExit(None),
    ]

    def loss(i: int) -> torch.Tensor:
        out = model(batch(i))
        if i < len(errors):
            raise errors[i]
        return out.square().mean()

    made = training(model, loss)

    def loop(watch: Any) -> None:
        for i in range(8):
            try:
                with watch.step(i):
                    made.see(made.step(i))
            except BaseException as error:  # noqa: BLE001
                notes.append([type(error).__name__, error is errors[i], error.__context__ is None])

    made.loop, made.extra = loop, lambda: notes
    return made


@program("memory_error_in_every_place_once", "errors")
def memory_errors(seed: int) -> Program:
    """An allocation that cannot be: the user catches it, halves the batch and goes on."""
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]

    def loss(i: int) -> torch.Tensor:
        try:
            model[0](torch.empty(1 << 46, 8, device="cpu") if i == 1 else batch(i).expand(1 << 44, 4, 8))
        except RuntimeError as error:
            notes.append(str(error)[:60])
        return model(batch(i)).square().mean()

    return training(model, loss, extra=lambda: notes)


def _interrupt(place: str) -> None:
    @program(f"interrupted_in_{place}", "interrupts")
    def interrupted(seed: int) -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        now = [-1]

        def strike(here: str) -> None:
            if here == place and now[0] in (1, 2):
                raise KeyboardInterrupt(f"{here} {now[0]}")

        model[1].register_forward_pre_hook(lambda *a: strike("forward_pre_hook"))
        model[1].register_forward_hook(lambda *a: strike("forward_hook"))
        model[1].register_full_backward_hook(lambda *a: strike("backward_hook"))
        model[0].weight.register_hook(lambda g: strike("tensor_hook"))
        model[0].weight.register_post_accumulate_grad_hook(lambda p: strike("accumulate_hook"))
        optimizer.register_step_pre_hook(lambda *a: strike("step_pre_hook"))
        optimizer.register_step_post_hook(lambda *a: strike("step_post_hook"))

        def pack(t: torch.Tensor) -> torch.Tensor:
            strike("pack")
            return t

        def unpack(t: torch.Tensor) -> torch.Tensor:
            strike("unpack")
            return t

        def step(i: int) -> Any:
            now[0] = i
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                value = model(batch(i)).square().mean()
            value.backward()
            strike("between")
            optimizer.step()
            strike("before_zero")
            optimizer.zero_grad()
            return value

        notes: list[Any] = []
        made = Program([model], [optimizer], step, extra=lambda: notes)

        def loop(watch: Any) -> None:
            for i in range(5):
                try:
                    with watch.step(i):
                        made.see(step(i))
                except KeyboardInterrupt as error:
                    notes.append([str(error), error.__context__ is None, torch.is_grad_enabled()])
                    optimizer.zero_grad()

        made.loop = loop
        return made


for _place in (
    *("forward_pre_hook", "forward_hook", "backward_hook", "tensor_hook", "accumulate_hook"),
    *("step_pre_hook", "step_post_hook", "pack", "unpack", "between"),
):
    _interrupt(_place)
