"""Fifth round: what event loops, processes, numpy, the float unit and wrappers of large trainings do around and in steps."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import ctypes.util
import importlib
import multiprocessing
import pathlib
import queue
import shutil
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_map

from ..program import Program, bits, mlp, program, training
from .fourth_process import _PRELUDE, TESTS, batch
from .second_distributed import _distributed

NAN = float("nan")


def _usual(steps: int = 5) -> Program:
    """The fourth step is a bad one."""
    model = mlp()
    return training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=steps)


def _loop(made: Program, loop: Callable[[Any], None]) -> Program:
    made.loop = loop
    return made


# ---- event loops and processes ----


@program("fifth_task_cancelled_inside_a_step", "fifth loops")
def cancelled(seed: int) -> Program:
    """A task of asyncio waits inside a step and is cancelled there; the next task trains on."""
    made = _usual()

    async def train(watch: Any, numbers: range, wait_at: int) -> None:
        for i in numbers:
            with watch.step(i):
                value = made.step(i)
                if i == wait_at:
                    await asyncio.sleep(3600)
            made.see(value)
            await asyncio.sleep(0)

    async def main(watch: Any) -> None:
        first = asyncio.create_task(train(watch, range(3), 1))
        for _ in range(6):
            await asyncio.sleep(0)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        await asyncio.wait_for(asyncio.create_task(train(watch, range(2, 6), -1)), 60)

    return _loop(made, lambda watch: asyncio.run(main(watch)))


@program("fifth_async_generator_of_steps_is_never_finished", "fifth loops")
def async_generator(seed: int) -> Program:
    """An asynchronous generator is left inside a step; the event loop closes it when it ends."""
    made = _usual()

    async def steps(watch: Any) -> AsyncIterator[Any]:
        for i in range(5):
            with watch.step(i):
                value = made.step(i)
                await asyncio.sleep(0)
                yield value

    async def main(watch: Any) -> None:
        async for value in steps(watch):
            made.see(value)
            if len(made.seen) == 3:
                break
        other = steps(watch)
        made.see(await other.__anext__())

    return _loop(made, lambda watch: asyncio.run(main(watch)))


def _child_trains(weights: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    model = mlp()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    model(batch(1)).square().mean().backward()
    answers.put([p.grad.numpy().tobytes().hex()[:64] for p in model.parameters()])


@program("fifth_spawned_process_inside_a_step", "fifth loops")
def spawned(seed: int) -> Program:
    """A process is spawned in the middle of a step, between forward and backward, with the weights of the model."""
    model, answers = mlp(), []  # type: tuple[Any, list[Any]]

    def loss(i: int) -> torch.Tensor:
        out = model(batch(i))
        if i == 0:
            context = multiprocessing.get_context("spawn")
            results = context.SimpleQueue()
            weights = {name: value.numpy().copy() for name, value in model.state_dict().items()}
            child = context.Process(target=_child_trains, args=(weights, results))
            child.start()
            answers.append(results.get())
            child.join()
            answers.append(child.exitcode)
            child.close()
            results.close()
        return out.square().mean()

    return training(model, loss, steps=2, extra=lambda: answers)


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
    @program(f"fifth_{name}", "fifth processes")
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


# ---- functions of Python and torch that others replace ----


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("not in this house")


def _refused(name: str, *places: tuple[Any, str]) -> None:
    @program(f"fifth_{name}_refused", "fifth patches")
    def refused(seed: int) -> Program:
        made = _usual(6)

        def loop(watch: Any) -> None:
            with contextlib.ExitStack() as patches:
                for i in range(6):
                    if i == 1:
                        for owner, attribute in places:
                            patches.enter_context(mock.patch.object(owner, attribute, _refuse))
                    with watch.step(i):
                        value = made.step(i)
                    made.seen.append(i)
                    del value
                    if i == 4:
                        watch.close()

        return _loop(made, loop)


_refused("databases_are", (sqlite3, "connect"))
_refused("queues_and_copies_are", (queue, "Queue"), (queue, "SimpleQueue"), (copy, "copy"), (copy, "deepcopy"))
_refused("printing_is", (sys.modules["builtins"], "print"), (sys.modules["builtins"], "sorted"))
_refused(
    "reads_by_the_host_are",
    *((torch.Tensor, name) for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")),
)
_refused(
    "sums_and_norms_are",
    *((torch, name) for name in ("stack", "cat", "isfinite", "aminmax", "zeros", "empty", "tensor", "_foreach_norm")),
    (torch.linalg, "vector_norm"),
)


@program("fifth_functions_of_torch_counted", "fifth patches")
def counted(seed: int) -> Program:
    """The program counts its calls of functions of torch, as test doubles do; calls of others are not its own."""
    model, calls = mlp(), {}  # type: tuple[Any, dict[str, int]]

    def counting(name: str, original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__") == __name__:
                calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        return wrapper

    def loss(i: int) -> torch.Tensor:
        return torch.cat([model(batch(i)), torch.zeros(1, 4)]).square().mean()

    made = training(model, loss, extra=lambda: calls)

    def loop(watch: Any) -> None:
        with contextlib.ExitStack() as patches:
            for name in ("cat", "zeros", "stack", "isfinite"):
                patches.enter_context(mock.patch.object(torch, name, counting(name, getattr(torch, name))))
            for i in range(3):
                with watch.step(i):
                    made.see(made.step(i))

    return _loop(made, loop)


@program("fifth_operations_that_warn_each_time", "fifth patches")
def warns_each_time(seed: int) -> Program:
    """Warnings of torch's own kernels are counted by a `showwarning` of the user: a second run of them would warn again."""
    model, shown = mlp(), []  # type: tuple[Any, list[str]]

    def loss(i: int) -> torch.Tensor:
        out = model(batch(i))
        target = torch.zeros(4, 4) if i else torch.zeros(1, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, category, *rest, **named: shown.append(category.__name__)
            long = torch.searchsorted(torch.arange(8.0)[::2].expand(4, 4).t(), torch.ones(4, 4).t())
            return F.mse_loss(out, target) + torch.range(0, 3).mean() + long.sum() + torch.std(out[:1, :1]) * 0

    return training(model, loss, extra=lambda: shown)


@program("fifth_warning_with_a_stack_level_is_told_once", "fifth patches")
def stack_level(seed: int) -> Program:
    """A forward warns in the name of its caller; Python tells it once for each line, so the line must stay the same one."""
    shown: list[Any] = []

    class Old(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            warnings.warn("use New", DeprecationWarning, stacklevel=2)
            return super().forward(x)

    model = nn.Sequential(Old(8, 8), nn.ReLU(), Old(8, 4))
    made = training(model, lambda i: model(batch(i)).square().mean(), steps=4, extra=lambda: shown)

    def loop(watch: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, category, file, *rest, **named: shown.append(pathlib.Path(file).name)
            for i in range(4):
                with watch.step(i):
                    made.see(made.step(i))

    return _loop(made, loop)


@program("fifth_parameters_registered_by_a_patched_method", "fifth patches")
def patched_registration(seed: int) -> Program:
    """`nn.Module.register_parameter` is replaced while a child is made inside a step, on the meta device, and filled later."""
    model = mlp()
    made = training(model, lambda i: model(batch(i)).square().mean(), steps=4)
    usual = made.step

    def step(i: int) -> Any:
        if i == 1:
            original = nn.Module.register_parameter

            def empty(self: Any, name: str, param: Any) -> None:
                original(self, name, param)
                if param is not None:
                    self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

            nn.Module.register_parameter = empty
            try:
                model[0] = nn.Linear(8, 8)
            finally:
                nn.Module.register_parameter = original
            model[0].to_empty(device="cpu")
            nn.init.constant_(model[0].weight, 0.1)
            nn.init.zeros_(model[0].bias)
            made.optimizers[0].state.clear()
            made.optimizers[0].param_groups[0]["params"] = list(model.parameters())
        return usual(i)

    made.step = step
    return made


# ---- where a training runs ----


@program("fifth_training_runs_while_it_is_imported", "fifth places")
def imported(seed: int) -> Program:
    made = _usual()

    def loop(watch: Any) -> None:
        text = "import sys\nmade, watch = sys.fifth_handed_over\nfor i in range(5):\n    with watch.step(i):\n"
        pathlib.Path("fifth_module_that_trains.py").write_text(text + "        made.see(made.step(i))\n")
        sys.fifth_handed_over = (made, watch)  # type: ignore[attr-defined]
        sys.path.insert(0, "")
        try:
            importlib.import_module("fifth_module_that_trains")
        finally:
            sys.path.remove("")
            del sys.fifth_handed_over  # type: ignore[attr-defined]
            sys.modules.pop("fifth_module_that_trains", None)
            shutil.rmtree("__pycache__", ignore_errors=True)
            pathlib.Path("fifth_module_that_trains.py").unlink()

    return _loop(made, loop)


@program("fifth_training_by_exec_without_builtins", "fifth places")
def without_builtins(seed: int) -> Program:
    made = _usual()
    text = "for i in numbers:\n    with watch.step(i):\n        value = made.step(i)\n    made.see(value)"
    return _loop(made, lambda watch: exec(text, {"__builtins__": {}, "made": made, "watch": watch, "numbers": range(5)}))


@program("fifth_training_in_a_finalizer_and_in_a_class_body", "fifth places")
def finalizer(seed: int) -> Program:
    made = _usual()

    def loop(watch: Any) -> None:
        class Dies:
            def __del__(self) -> None:
                with watch.step(0):
                    made.see(made.step(0))

        Dies()
        for i in (1, 2):

            class Body:
                with watch.step(i):
                    value = made.step(i)

            made.see(Body.value)
        made.see(max(range(3, 5), key=lambda i: _one(made, watch, i)))

    return _loop(made, loop)


def _one(made: Program, watch: Any, i: int) -> float:
    with watch.step(i):
        return float(torch.nan_to_num(made.step(i).detach()))


# ---- tensors ----


class Knows(torch.Tensor):
    """Runs what is on its list, and nothing else: neither a copy nor a look."""

    inner: torch.Tensor
    known = ("mm", "addmm", "t", "relu", "threshold_backward", "sum", "detach", "add", "mul", "expand", "view", "_unsafe_view")

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def plain_tensors(self) -> list[torch.Tensor]:
        return [self.inner]

    def __repr__(self) -> str:  # type: ignore[override]
        raise RuntimeError("not to be shown")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in cls.known:
            raise RuntimeError(f"{func} is not known here")
        plain = tree_map(lambda t: t.inner if isinstance(t, Knows) else t, (args, kwargs or {}))
        return tree_map(lambda t: Knows(t) if isinstance(t, torch.Tensor) else t, func(*plain[0], **plain[1]))


@program("fifth_dispatch_subclass_knows_few_operations", "fifth tensors")
def knows_few(seed: int) -> Program:
    """Activations refuse what the program itself does not do with them: looking, copying, comparing, measuring."""

    class Wraps(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return Knows(x)

    class Unwraps(nn.Module):
        def forward(self, x: Any) -> torch.Tensor:
            return x.inner

    first = nn.Linear(8, 4)
    model = nn.Sequential(Wraps(), nn.Identity(), Unwraps(), first)
    return training(model, lambda i: model(batch(i)).square().mean(), steps=4)


@program("fifth_modes_put_aside_by_the_program", "fifth tensors")
def modes_aside(seed: int) -> Program:
    """Code of the program that switches every dispatch mode off for itself, as torch's own does, in forward and backward."""

    class Aside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            with _python_dispatch._disable_current_modes():
                ctx.save_for_backward(x.exp())
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            with torch._C._DisableTorchDispatch():
                return grad * ctx.saved_tensors[0].log().cos()

    model = mlp()

    def loss(i: int) -> torch.Tensor:
        with _python_dispatch._disable_current_modes():
            out = model(batch(i))
        return Aside.apply(out).square().mean()

    return training(model, loss, steps=4)


@program("fifth_functionalized_forward_writes_in_place", "fifth tensors")
def functionalized(seed: int) -> Program:
    model = mlp()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, :2].add_(1.0)
        y.view(-1)[::3].mul_(0.5)
        return y.relu_()

    run = torch.func.functionalize(forward, remove="mutations_and_views")
    return training(model, lambda i: model(run(batch(i))).square().mean(), steps=4)


@program("fifth_children_deleted_between_the_passes", "fifth tensors")
def deleted_children(seed: int) -> Program:
    """Modules leave the model after forward, with their gradients still to come, and others take their names."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    removed: list[nn.Module] = []

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(batch(i) * (NAN if i == 3 else 1)).square().mean()
        if i == 1:
            removed.append(model[2])
            model[2] = nn.Identity()
        if i == 2:
            del model[0]
        value.backward()
        optimizer.step()
        return value.detach()

    return Program([model], [optimizer], step, steps=5)


@program("fifth_numpy_writes_behind_the_back", "fifth tensors")
def behind_the_back(seed: int) -> Program:
    """Weights, buffers and inputs change through numpy, which no dispatcher sees, inside forward and between the passes."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    rows = np.zeros((4, 8), np.float32)
    views = [model[0].weight.detach().numpy(), model[1].running_mean.numpy()]

    def loss(i: int) -> torch.Tensor:
        rows[:] = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8) * (i + 1)
        out = model(torch.from_numpy(rows))
        views[1] += 0.125
        np.clip(views[0], -0.3, 0.3, out=views[0])
        return out.square().mean()

    return training(model, loss, steps=5)


@program("fifth_bytes_resized_after_their_batch", "fifth tensors")
def resized_bytes(seed: int) -> Program:
    """A batch lies in a bytearray that grows as soon as nobody looks into it: one that is still held makes that an error."""
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]
    store = bytearray(np.linspace(-1, 1, 32, dtype=np.float32).tobytes())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        rows = torch.from_numpy(np.frombuffer(store, np.float32, 32).reshape(4, 8))
        value = model(rows).square().mean()
        del rows
        value.backward()
        value = value.detach()
        try:
            store.extend(b"more")
            notes.append(len(store))
        except BufferError as error:
            notes.append(str(error))
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=5, extra=lambda: notes)


@program("fifth_parameter_of_overlapping_memory", "fifth tensors")
def overlapping(seed: int) -> Program:
    """A parameter whose rows lie over each other, updated by hand through its memory."""
    memory = torch.linspace(-1, 1, 11)

    class Overlaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(memory.as_strided((4, 8), (1, 1)))
            self.scale = nn.Parameter(torch.ones(()).expand(4))
            self.alias = nn.Buffer(memory[2:6])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight) * self.scale + self.alias.mean()

    model = Overlaps()

    def step(i: int) -> Any:
        value = model(batch(i)).square().mean()
        value.backward()
        with torch.no_grad():
            memory[:8] -= 0.01 * model.weight.grad.sum(0)
        for p in model.parameters():
            p.grad = None
        return value

    return Program([model], [], step, steps=4, extra=lambda: memory)


@program("fifth_payloads_of_nan_and_signed_zeros", "fifth tensors")
def payloads(seed: int) -> Program:
    """What is hidden in the bits of NaN, of minus zero and of subnormal numbers arrives as it was sent."""
    hidden = torch.tensor([0x7FC12345, -0x003EDCBB, -0x80000000, 1, 0x007FFFFF], dtype=torch.int32)
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]
    model.register_buffer("hidden", hidden.view(torch.float32).clone())

    class Passes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    passes = Passes()
    model.add_module("passes", passes)
    model.forward = lambda x: model[2](model[1](model[0](x)))

    def loss(i: int) -> torch.Tensor:
        out = passes(model.hidden)
        notes.append(bits(torch.cat([out, out.clone()])[::2].contiguous().view(torch.int32)))
        return model(batch(i)).square().mean()

    return training(model, loss, steps=4, extra=lambda: notes)


_LIBM = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
_UPWARD, _NEAREST = 0x800, 0


@program("fifth_rounding_goes_upward", "fifth tensors")
def upward(seed: int) -> Program:
    """Interval arithmetic: the float unit rounds up inside the steps, and is asked whether it still does."""
    made, notes = _usual(), []  # type: tuple[Program, list[int]]

    def loop(watch: Any) -> None:
        try:
            for i in range(5):
                _LIBM.fesetround(_UPWARD)
                with watch.step(i):
                    value = made.step(i)
                notes.append(_LIBM.fegetround())
                _LIBM.fesetround(_NEAREST)
                made.see(value)
        finally:
            _LIBM.fesetround(_NEAREST)

    made.extra = lambda: notes
    return _loop(made, loop)


@program("fifth_numbers_and_metadata_of_graph_nodes", "fifth tensors")
def node_numbers(seed: int) -> Program:
    """Nodes of the graph have numbers in the order of forward, and a dictionary of the user's: neither shows a second run."""
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]

    def loss(i: int) -> torch.Tensor:
        before = torch.zeros(1, requires_grad=True).exp().grad_fn._sequence_nr()
        out = model(batch(i))
        value = out.square().mean()
        node = value.grad_fn
        while node is not None:
            node.metadata["mine"] = len(notes)
            number = node._sequence_nr()
            notes.append([node.name(), number - before if number < 1 << 62 else -1, sorted(node.metadata)])
            node = next((one for one, _ in node.next_functions if one is not None), None)
        return value

    return training(model, loss, steps=3, extra=lambda: notes)


# ---- what modules give ----


@program("fifth_forward_is_a_coroutine", "fifth outputs")
def coroutine(seed: int) -> Program:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        async def forward(self, x: torch.Tensor) -> torch.Tensor:
            await asyncio.sleep(0)
            return self.inner(x)

    model = Later()

    async def both(i: int) -> torch.Tensor:
        first, second = await asyncio.gather(model(batch(i)), model(batch(i + 1)))
        return (first + second).square().mean()

    return training(model, lambda i: asyncio.run(both(i)), steps=4)


@program("fifth_outputs_are_futures", "fifth outputs")
def futures(seed: int) -> Program:
    """A module gives a future that is not done yet, whose callbacks count."""
    counts = [0]

    class Promises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            future: Any = torch.futures.Future()
            chained = future.then(lambda done: (counts.__setitem__(0, counts[0] + 1), done.value())[1])
            self.waiting = (future, x)
            return chained

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Promises(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chained = self.first(x)
            future, given = self.first.waiting
            del self.first.waiting
            future.set_result(self.first.inner(given))
            return self.last(chained.wait())

    model = Keeps()
    return training(model, lambda i: model(batch(i)).square().mean(), steps=4, extra=lambda: counts)


@program("fifth_views_of_bytes_and_arrays_flow", "fifth outputs")
def byte_views(seed: int) -> Program:
    """Between modules go memoryviews, arrays, ranges and decimals: nobody may exhaust, hash or compare them."""
    import array
    import decimal

    class Packs(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return memoryview(x.numpy()), array.array("f", x.flatten().tolist()), range(10**12), decimal.Decimal("sNaN")

    class Unpacks(nn.Module):
        def forward(self, given: Any) -> torch.Tensor:
            view, numbers, many, odd = given
            assert odd.is_snan()
            assert many[-1] == 10**12 - 1
            return torch.tensor(numbers).reshape(view.shape)

    model = nn.Sequential(Packs(), Unpacks(), nn.Linear(8, 4))
    return training(model, lambda i: model(batch(i)).square().mean(), steps=4)


# ---- optimizers and wrappers of large trainings ----


class Slotted:
    """No Optimizer of torch, no state, no dictionary."""

    __slots__ = ("_params", "lr")

    def __init__(self, params: Any, lr: float) -> None:
        self._params, self.lr = list(params), lr

    @property
    def param_groups(self) -> Any:
        return [{"params": self._params, "lr": self.lr}]

    def zero_grad(self) -> None:
        for p in self._params:
            p.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for p in self._params:
                p -= self.lr * p.grad

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr}


@program("fifth_optimizer_with_slots_and_no_state", "fifth optimizers")
def slotted(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(batch(i)).square().mean(), Slotted(model.parameters(), 0.05), steps=4)
    made.optimizers.clear()  # it has no __dict__ that could be compared
    return made


class EightBits(torch.optim.Optimizer):
    """Momentum in bytes, with a scale for each parameter, and rounding by chance."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"q": torch.zeros(p.shape, dtype=torch.int8), "scale": torch.ones(())}
                momentum = state["q"].float() * state["scale"] * 0.9 + p.grad
                state["scale"] = momentum.abs().amax().clamp_min(1e-12) / 127
                state["q"].copy_((momentum / state["scale"] + torch.rand_like(momentum) - 0.5).round().clamp(-127, 127))
                p.add_(state["q"].float() * state["scale"], alpha=-group["lr"])


@program("fifth_states_in_eight_bits", "fifth optimizers")
def eight_bits(seed: int) -> Program:
    model = mlp()
    return training(model, lambda i: model(batch(i)).square().mean(), EightBits(model.parameters()), steps=5)


@program("fifth_main_gradients_gathered_apart", "fifth optimizers")
def main_gradients(seed: int) -> Program:
    """bf16 weights whose gradients are taken away as they come and added up in FP32 beside them; the optimizer has copies."""
    model = mlp().bfloat16()
    masters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, 0.01)
    gathered = [torch.zeros_like(m) for m in masters]

    def take(number: int) -> Callable[[Any], None]:
        def hook(p: Any) -> None:
            gathered[number].add_(p.grad)
            p.grad = None

        return hook

    handles = [p.register_post_accumulate_grad_hook(take(n)) for n, p in enumerate(model.parameters())]

    def step(i: int) -> Any:
        for micro in range(3):
            value = model(batch(i + micro).bfloat16()).float().square().mean() / 3
            value.backward()
        for master, total in zip(masters, gathered):
            master.grad = total.clone()
            total.zero_()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters):
                p.copy_(master)
        return value

    return Program([model], [optimizer], step, steps=4, extra=lambda: [len(handles), masters])


@program("fifth_fsdp_of_the_first_kind", "fifth optimizers")
def first_fsdp(seed: int) -> Program:
    """Flat parameters with views into them that come and go, in mixed precision."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    model = mlp()
    notes: list[Any] = []

    def body(made: Program, watch: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            wrapped = FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device("cpu"), mixed_precision=half)
            optimizer = torch.optim.SGD(wrapped.parameters(), 0.05)
            other = watch.another(wrapped, optimizer)
            for i in range(3):
                with watch.step(i), other.step(i):
                    optimizer.zero_grad()
                    value = wrapped(batch(i)).float().square().mean()
                    value.backward()
                    optimizer.step()
                made.see(value)
            other.close()
            notes.append(bits([p.detach() for p in wrapped.parameters()]))

    return _distributed(model, body, extra=lambda: notes)


@program("fifth_communication_that_compresses", "fifth optimizers")
def compressed(seed: int) -> Program:
    """DistributedDataParallel whose hooks compress gradients, with a state and random numbers of their own."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = mlp()
    notes: list[Any] = []

    def body(made: Program, watch: Any) -> None:
        for number, kind in enumerate(("half", "power")):
            wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
            if kind == "half":
                wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
            else:
                state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
                wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            optimizer = torch.optim.SGD(wrapped.parameters(), 0.05)
            for i in range(4):
                with watch.step(4 * number + i):
                    optimizer.zero_grad()
                    value = wrapped(batch(i)).square().mean()
                    value.backward()
                    optimizer.step()
                made.see(value)
            notes.append(bits(wrapped.module.state_dict()))

    return _distributed(model, body, extra=lambda: notes)
