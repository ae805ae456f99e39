"""What Python and the process are used for besides training: awaited signals, greenlets, names, audits, forks of threads."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from typing import Any

import torch
import torch.nn.utils.clip_grad
from torch import nn

from ..program import Program, batch, bits, mlp, program, sick, training


@program("blocked_signals_are_waited_for", "signals")
def waited_for(seed: int) -> Program:
    """Blocked in the only thread there is, and fetched by it: in a process with another thread they would end it."""
    model, came = mlp(), []  # type: tuple[Any, list[int]]

    def loss(i: int) -> torch.Tensor:
        awaited = {signal.SIGUSR1, signal.SIGRTMIN + 3, signal.SIGUSR2}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        try:
            for number in sorted(awaited):
                os.kill(os.getpid(), number)
                came.append(int(signal.sigwait({number})))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return model(sick(i, 3)).square().mean() * (1 + len(came) / 100)  # type: ignore[no-any-return]

    return training(model, loss, steps=5, extra=lambda: came)


@program("ended_children_are_counted_by_a_handler", "signals")
def reaped(seed: int) -> Program:
    """A handler of SIGCHLD takes whatever child has ended, whose ever it was."""
    model, ended = mlp(), []  # type: tuple[Any, list[int]]

    def reap(number: int, frame: Any) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append(os.waitstatus_to_exitcode(found[1]))

    made = training(model, lambda i: model(sick(i, 3)).square().mean(), steps=5, extra=lambda: ended)

    def loop(watch: Any) -> None:
        before = signal.signal(signal.SIGCHLD, reap)
        try:
            for i in range(5):
                with watch.step(i):
                    value = made.step(i)
                    if not (child := os.fork()):
                        os._exit(i)
                    while len(ended) <= i:
                        time.sleep(0.002)
                made.see([value, bool(child)])
        finally:
            signal.signal(signal.SIGCHLD, before)

    made.loop = loop
    return made


if importlib.util.find_spec("greenlet"):

    @program("greenlets_change_places_in_forward_and_update", "greenlets")
    def greenlets(seed: int) -> Program:
        """Two trainings in one thread, each left in the middle of its forward and before its update for the other."""
        import greenlet

        models = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in models]
        made = Program([models[0]], [optimizers[0]], lambda i: None, extra=lambda: [list(m.parameters()) for m in models])

        def loop(watch: Any) -> None:
            watches = [watch, watch.another(models[1], optimizers[1])]
            seen: list[list[Any]] = [[], []]

            def change(number: int) -> None:
                other = workers[1 - number]
                if not other.dead:
                    other.switch()

            def work(number: int) -> None:
                model, optimizer = models[number], optimizers[number]
                handles = [model[1].register_forward_hook(lambda *_: change(number))]
                handles.append(optimizer.register_step_pre_hook(lambda *_: change(number)))
                for i in range(4):
                    with watches[number].step(i):
                        optimizer.zero_grad()
                        value = model(sick(i, 3 - number)).square().mean()
                        value.backward()
                        if value.isfinite():
                            optimizer.step()
                    seen[number].append(bits(value.detach()))
                    change(number)
                for handle in handles:
                    handle.remove()

            workers = [greenlet.greenlet(lambda number=number: work(number)) for number in range(2)]
            for worker in workers:
                while not worker.dead:
                    worker.switch()
            made.see(seen)

        made.loop = loop
        return made


@program("functions_of_torch_are_pickled_and_looked_up", "names")
def looked_up(seed: int) -> Program:
    """By reference, by identity and in the tables of torch.overrides, which are made once and kept."""
    model, told = mlp(), []  # type: tuple[Any, list[Any]]
    own = {torch.Tensor.backward: "backward", torch.nn.utils.clip_grad_norm_: "clip", torch.optim.SGD.zero_grad: "zero"}
    asked = [
        *own,
        torch.autograd.backward,
        torch.nn.utils.clip_grad_value_,
        torch.amp.GradScaler.step,
        torch.optim.SGD.step,
        torch.nn.Module.__call__,
        torch.utils.checkpoint.checkpoint,
        torch.amp.autocast.__enter__,
    ]
    places = [
        (torch.Tensor, "backward"),
        (torch.autograd, "backward"),
        (torch.nn.utils, "clip_grad_norm_"),
        (torch.nn.utils.clip_grad, "clip_grad_norm_"),
        (torch.nn.utils, "clip_grad_value_"),
        (torch.optim.SGD, "step"),
        (torch.amp.GradScaler, "scale"),
    ]

    def ask(owner: Any, name: str) -> Any:
        function = getattr(owner, name)
        again = pickle.loads(pickle.dumps(function))
        about = [function.__name__, function.__qualname__, function.__module__, str(inspect.signature(function))]
        return [again is function, *about, inspect.unwrap(function).__code__.co_name]

    def loss(i: int) -> torch.Tensor:
        told.append([ask(*place) for place in places])
        told.append(torch.nn.utils.clip_grad_norm_ is torch.nn.utils.clip_grad.clip_grad_norm_)
        told.append(torch.overrides.is_tensor_method_or_property(torch.Tensor.backward))
        told.append([torch.overrides.resolve_name(torch.Tensor.backward), len(torch.overrides.get_overridable_functions())])
        value: torch.Tensor = model(sick(i, 3)).square().mean()
        return value

    def left() -> Any:
        tables = torch.overrides.get_testing_overrides()
        known = [function in tables for function in asked]
        return [told, known, torch.overrides.is_tensor_method_or_property(torch.Tensor.backward)]

    torch.overrides._get_overridable_functions.cache_clear()
    return training(model, loss, steps=5, extra=left)


@program("loss_handled_by_a_table_of_functions", "names")
def handled(seed: int) -> Program:
    """A tensor of its own class knows functions by identity, from a table made before anybody watched."""
    told: list[str] = []
    table = {torch.Tensor.backward: "backward", torch.autograd.backward: "backward of all", torch.Tensor.register_hook: "hook"}

    class Known(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in table:
                told.append(table[func])
                plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, Known) else arg for arg in args]
                return func(*plain, **(kwargs or {}))
            if getattr(func, "__name__", "") == "backward":
                return NotImplemented
            return super().__torch_function__(func, types, args, kwargs or {})

    model = mlp()

    def loss(i: int) -> torch.Tensor:
        return model(sick(i, 3)).square().mean().as_subclass(Known)  # type: ignore[no-any-return]

    return training(model, loss, steps=5, extra=lambda: told)


@program("modules_of_torch_are_loaded_anew", "names")
def loaded_anew(seed: int) -> Program:
    """`importlib.reload` inside a step, of files whose functions others may hold."""
    model = mlp()
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), 0.05)]
    told: list[Any] = []

    def step(i: int) -> Any:
        if i == 1:
            clip = importlib.reload(torch.nn.utils.clip_grad)
            torch.nn.utils.clip_grad_norm_ = clip.clip_grad_norm_
            torch.optim.SGD = importlib.reload(sys.modules["torch.optim.sgd"]).SGD  # type: ignore[misc]
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        told.append([isinstance(optimizers[0], torch.optim.SGD), torch.optim.SGD.step.__qualname__])
        optimizers[:] = [optimizer]
        value = model(sick(i, 3)).square().mean()
        value.backward()
        told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False))
        if value.isfinite():
            optimizer.step()
        optimizer.zero_grad()
        return value

    def left() -> Any:
        functions = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_, torch.optim.SGD.step)
        return [told, [inspect.unwrap(function).__module__ for function in functions]]

    return Program([model], optimizers[:1], step, steps=5, extra=left)


@program("exceptions_under_way_are_asked_for_everywhere", "names")
def under_way(seed: int) -> Program:
    """`sys.exc_info()` in forward, hooks, functions and updates, and what an error of theirs has behind it."""
    model, told = mlp(), []  # type: tuple[Any, list[Any]]

    def note(place: str) -> None:
        told.append([place, repr(sys.exc_info()[0])])
        try:
            raise LookupError(place)
        except LookupError as error:
            told.append([repr(error.__context__), repr(error.__cause__), getattr(error, "__notes__", None)])

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            note("function")
            return x * 1.5

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            note("backward of the function")
            return grad * 1.5

    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model[1].register_forward_hook(lambda *_: note("hook"))
    model[0].register_full_backward_hook(lambda *_: note("backward hook"))
    model[2].weight.register_post_accumulate_grad_hook(lambda _: note("accumulated"))
    optimizer.register_step_post_hook(lambda *_: note("update"))

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = Noted.apply(model(sick(i, 3))).square().mean()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (note("pack"), t)[1], lambda t: (note("unpack"), t)[1]):
            (value * value).backward()
        if value.isfinite():
            optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=5, extra=lambda: told)


@program("forward_looks_for_the_loop_that_called_it", "names")
def caller(seed: int) -> Program:
    """As logging and absl do: the first frame that is not of torch, and the names that it has."""
    told: list[Any] = []

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame = sys._getframe(1)
            while os.sep + "torch" + os.sep in frame.f_code.co_filename:
                frame = frame.f_back  # type: ignore[assignment]
            told.append([frame.f_code.co_name, os.path.basename(frame.f_code.co_filename), sorted(frame.f_locals)])
            with warnings.catch_warnings(record=True) as caught:
                warnings.warn("looked for", stacklevel=1)
            told.append(len(caught))
            return self.inner(x) * frame.f_locals["factor"]  # type: ignore[no-any-return]

    model = Asking()

    def loss(i: int) -> torch.Tensor:
        factor = 1.5 + i
        return model(sick(i, 3)).square().mean() * factor  # type: ignore[no-any-return]

    return training(model, loss, steps=5, extra=lambda: told)


class _Name(str):
    """A name that minds being printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise TypeError("not for print")


@program("names_that_no_encoding_knows", "names")
def unwritable(seed: int) -> Program:
    """Lone surrogates, zeros, right-to-left marks and thirty thousand letters, in modules, parameters, groups and messages."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("w\ud800\0\u202e", nn.Parameter(torch.randn(8, 8) * 0.1))
            self.register_buffer(_Name("b\udfff"), torch.zeros(8))
            self.add_module("m\udc80" + "x" * 30_000, nn.Linear(8, 8))
            self.add_module(_Name("\x1b]0;title\x07\r\n"), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for parameter in self._parameters.values():
                x = x @ parameter
            for module in self._modules.values():
                x = module(x)  # type: ignore[misc]
            return x

    model = Odd()
    groups = [{"params": [parameter], "name": f"g\ud912{i}"} for i, parameter in enumerate(model.parameters())]
    optimizer = torch.optim.SGD(groups, 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i, 3)).square().mean()
        value.backward()
        if value.isfinite():
            optimizer.step()
        return value

    made = Program([model], [optimizer], step, steps=5)

    def loop(watch: Any) -> None:
        for i in range(5):
            with watch.step(i):
                value = step(i)
            made.see(value)
        with watch.step(5):
            raise ValueError("\udcff\0\u202e" * 5)

    made.loop = loop
    return made


@program("pickles_name_nobody_else", "names")
def pickled(seed: int) -> Program:
    """Model, optimizer and scaler inside a step: not one byte more, and no name that another process would not know."""
    model = mlp()
    optimizer, scaler = torch.optim.Adam(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
    told: list[Any] = []

    def note() -> None:
        for thing in (model, optimizer, model.state_dict(), optimizer.state_dict()):
            data = pickle.dumps(thing, protocol=4)
            told.append([len(data), b"nanny" in data])

    def step(i: int) -> Any:
        optimizer.zero_grad()
        note()
        value = model(sick(i, 3)).square().mean()
        scaler.scale(value).backward()
        note()
        try:
            pickle.dumps(scaler)
        except AssertionError as error:
            told.append(str(error))
        scaler.step(optimizer)
        scaler.update()
        note()
        return value

    return Program([model], [optimizer], step, steps=5, scaler=scaler, extra=lambda: told)


@program("a_sandbox_that_refuses_to_be_looked_into", "audits")
def sandbox(seed: int) -> Program:
    """Frames, the collector, threads, databases, processes and code from text are forbidden from the first step on."""
    model, forbids = mlp(), [True]
    refused = (
        "sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers", "gc.get_referents", "compile", "exec",
        "_thread.start_new_thread", "sqlite3.connect", "subprocess.Popen", "os.fork", "mmap.__new__", "object.__setattr__",
        "sys.settrace", "sys.setprofile", "code.__new__", "function.__new__", "shutil.rmtree", "tempfile.mkstemp", "os.mkdir",
    )  # fmt: skip

    def audit(event: str, args: Any) -> None:
        if forbids[0] and event in refused:
            raise PermissionError(event)

    made = training(model, lambda i: model(sick(i, 3)).square().mean(), steps=5)

    def loop(watch: Any) -> None:
        for i in range(2):
            with watch.step(i):
                made.step(i)
        sys.addaudithook(audit)
        try:
            for i in range(2, 6):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            forbids[0] = False

    made.loop = loop
    return made


@program("forks_by_another_thread_in_the_middle_of_a_step", "forks")
def forked(seed: int) -> Program:
    """The child has no thread but the one that forked; it trains a step of its own and says what came of it."""
    model, told, home = mlp(), [], os.getpid()  # type: tuple[Any, list[bytes], int]

    def child_says(write: int) -> None:
        loss = model(batch(9)).square().mean()
        loss.backward()
        norm = float(sum(p.grad.norm() for p in model.parameters()))
        os.write(write, f"{float(loss):.9g} {norm:.9g} {threading.active_count()}".encode())
        os._exit(0)

    def fork() -> None:
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            try:
                child_says(write)
            finally:
                os._exit(1)
        os.close(write)
        os.waitpid(child, 0)
        told.append(os.read(read, 100))
        os.close(read)

    def stop_here(*_: Any) -> None:
        if os.getpid() != home:
            return
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    model[1].register_forward_hook(stop_here)
    model[2].weight.register_post_accumulate_grad_hook(stop_here)
    return training(model, lambda i: model(sick(i, 3)).square().mean(), steps=5, extra=lambda: told)


@program("a_tracer_stops_the_forward_at_a_line", "audits")
def stopped(seed: int) -> Program:
    """`sys.settrace` of the program's own raises at a line of its forward, and again while the step is left."""
    model, told = mlp(), []  # type: tuple[Any, list[Any]]

    class Stopped(Exception):
        pass

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_name != "inner_part" or frame.f_code.co_filename != __file__:
            return trace if frame.f_code.co_filename == __file__ else None
        told.append(event)
        if event == "line" and len(told) % 5 == 4:
            raise Stopped(len(told))
        return trace

    def inner_part(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        y = y * 2
        return y.square()

    def loss(i: int) -> torch.Tensor:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return inner_part(sick(i, 3)).mean()
        except Stopped:
            return model(sick(i, 3)).mean()  # type: ignore[no-any-return]
        finally:
            told.append(sys.gettrace() is trace)
            sys.settrace(before)

    return training(model, loss, steps=6, extra=lambda: told)
