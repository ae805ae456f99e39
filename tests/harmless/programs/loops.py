"""How steps are driven: coroutines, tasks, workers, text that is run, switches in the middle, and optimizers in odd ways."""

from __future__ import annotations

import asyncio
import builtins
import collections
import contextlib
import copy
import gc
import importlib
import io
import marshal
import math
import multiprocessing
import pathlib
import pickle
import random
import shutil
import string
import sys
import threading
import types
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
import torch.utils.benchmark
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..program import NAN, Program, batch, mlp, program, sick, training


@program("optimizer_states_loaded_from_another_precision_in_the_middle", "optimizers")
def load_states(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i)).square().mean()
        value.backward()
        if i in (1, 3):
            kept = copy.deepcopy(optimizer.state_dict())
            for state in kept["state"].values():
                state["exp_avg"] = state["exp_avg"].bfloat16()
                state["exp_avg_sq"] = torch.nan_to_num(state["exp_avg_sq"])
            kept["param_groups"][0].update(lr=0.003, fused=i == 3, foreach=i != 3)
            optimizer.load_state_dict(kept)
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=6)


@program("every_way_of_torch_to_run_one_optimizer_in_turns", "optimizers")
def ways_in_turns(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(i: int) -> Any:
        group = optimizer.param_groups[0]
        group["fused"], group["foreach"], group["maximize"] = i % 3 == 0, i % 3 == 1, i == 4
        optimizer.zero_grad(set_to_none=bool(i % 2))
        value = model(sick(i)).square().mean()
        value.backward()
        for p in model.parameters():
            p.grad = p.grad.to_sparse().to_dense() if i % 2 else p.grad.clone(memory_format=torch.contiguous_format)
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=6)


@program("a_network_learns_to_be_the_optimizer", "optimizers")
def learned_optimizer(seed: int) -> Program:
    model = mlp()

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rule = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
            self.param_groups = [{"params": list(model.parameters()), "lr": 0.01}]
            self.state: dict[Any, Any] = collections.defaultdict(dict)

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in model.parameters():
                memory = self.state[p].setdefault("m", torch.zeros_like(p))
                memory.lerp_(p.grad, 0.1)
                p -= 0.01 * self.rule(torch.stack([p.grad, memory], -1)).squeeze(-1)

        def zero_grad(self, set_to_none: bool = True) -> None:
            model.zero_grad(set_to_none)

    learned = Learned()

    def step(i: int) -> Any:
        learned.zero_grad()
        value = model(sick(i, 9)).square().mean()
        value.backward()
        learned.step()
        return value

    return Program([model], [learned], step, steps=5)


@program("line_search_moves_all_weights_as_one_vector", "optimizers")
def line_search(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates: list[float] = []

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(batch(i)).square().mean()
        value.backward()
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        slope = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        rate = 1e4
        while True:
            nn.utils.vector_to_parameters(start - rate * slope, model.parameters())
            with torch.no_grad():
                there = model(batch(i)).square().mean()
            if (torch.isfinite(there) and there < value) or rate < 1e-4:
                break
            rate /= 8
        rates.append(rate)
        return value

    return Program([model], [optimizer], step, steps=4, extra=lambda: rates)


@program("scaler_and_clip_over_a_generator_of_chained_groups", "optimizers")
def chained(seed: int) -> Program:
    model, head = mlp(), nn.Linear(4, 2)
    both = nn.ModuleList([model, head])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05), torch.optim.Adam(head.parameters())]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)

    def step(i: int) -> Any:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            value = head(model(batch(i) * (1e5 if i == 2 else 1))).float().square().mean()
        scaler.scale(value).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_((p for g in optimizers for q in g.param_groups for p in q["params"]), 1.0, foreach=False)
        for optimizer in reversed(optimizers):
            scaler.step(optimizer)
        scaler.update()
        return value, norm

    return Program([both], optimizers, step, steps=6, scaler=scaler)


@program("coroutine_of_steps_is_sent_batches_and_thrown_errors", "loops")
def coroutine(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    out: list[Any] = []

    def loop(watch: Any) -> None:
        def steps() -> Any:
            i, value = 0, None
            while True:
                x = yield value
                try:
                    with watch.step(i):
                        optimizer.zero_grad()
                        loss = model(x).square().mean()
                        x = yield "half"
                        (loss + x).backward()
                        optimizer.step()
                        value = loss.detach()
                except ArithmeticError as error:
                    value = str(error)
                i += 1

        running = steps()
        next(running)
        for i in range(6):
            out.append(running.send(sick(i, 4)))
            if i == 2:
                out.append(running.throw(ArithmeticError("bad batch")))
            else:
                out.append(running.send(0.5))
        running.close()

    return Program([model], [optimizer], lambda i: None, loop=loop, extra=lambda: out)


@program("tasks_time_out_in_the_middle_of_their_steps", "loops")
def timeouts(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    out: list[Any] = []

    def loop(watch: Any) -> None:
        async def one(i: int) -> Any:
            with watch.step(i):
                optimizer.zero_grad()
                value = model(sick(i, 5)).square().mean()
                await asyncio.sleep(3600 if i == 2 else 0)
                value.backward()
                await asyncio.to_thread(optimizer.step)
                return value.detach()

        async def all_of_them() -> None:
            for i in range(5):
                try:
                    out.append(await asyncio.wait_for(one(i), 0.3 if i == 2 else 30))
                except asyncio.TimeoutError:
                    out.append("late")

        asyncio.run(all_of_them())

    return Program([model], [optimizer], lambda i: None, loop=loop, extra=lambda: out)


@program("steps_opened_by_an_exit_stack_and_closed_in_other_order", "loops")
def exit_stacks(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    out: list[Any] = []

    def loop(watch: Any) -> None:
        for i in range(4):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                stack.enter_context(watch.step(i))
                stack.callback(optimizer.zero_grad)
                kept = stack.pop_all()
                value = model(sick(i)).float().square().mean()
            value.backward()
            optimizer.step()
            out.append(value.detach())
            kept.close()

    return Program([model], [optimizer], lambda i: None, loop=loop, extra=lambda: out)


@program("loop_is_text_that_is_compiled_marshalled_and_run", "loops")
def marshalled(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    source = string.Template(
        "def $name(i):\n  optimizer.zero_grad(); value = model(sick(i)).square().mean(); value.backward()\n"
        "  optimizer.step(); return value\n"
    )
    code = compile(source.substitute(name="run"), "<a cell that is gone>", "exec")
    inner = next(c for c in marshal.loads(marshal.dumps(code)).co_consts if isinstance(c, types.CodeType))
    inner = inner.replace(co_filename="/does/not/exist.py", co_firstlineno=2**20)
    run = types.FunctionType(inner, {"__builtins__": builtins, "optimizer": optimizer, "model": model, "sick": sick})
    return Program([model], [optimizer], lambda i: eval("run(i)", {"run": run, "i": i}), steps=5)


class _Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        if i == 4:
            raise LookupError(f"row {i} is broken")
        return torch.full((8,), float(i)) + torch.rand(8)


@program("workers_that_stay_raise_and_are_asked_again", "loops")
def staying_workers(seed: int) -> Program:
    model = mlp()
    loader = DataLoader(_Rows(), 2, num_workers=1, persistent_workers=True, multiprocessing_context="fork", prefetch_factor=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    said: list[str] = []

    def loop(watch: Any) -> None:
        i = 0
        for _ in range(2):
            rows = iter(loader)
            while True:
                with watch.step(i):
                    i += 1
                    try:
                        x = next(rows)
                    except StopIteration:
                        break
                    except LookupError as error:
                        said.append(str(error).splitlines()[0])
                        continue
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()

    return Program([model], [optimizer], lambda i: None, loop=loop, extra=lambda: said)


@program("steps_for_which_everything_is_switched_a_little", "loops")
def switched(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(i: int) -> Any:
        torch.set_grad_enabled(i != 1)
        try:
            optimizer.zero_grad()
            with torch.set_grad_enabled(True), torch.autograd.set_multithreading_enabled(i % 2 == 0):
                previous = torch.is_grad_enabled()
                torch.set_grad_enabled(False)
                frozen = model(batch(i))
                torch.set_grad_enabled(previous)
                with torch.inference_mode():
                    scored = model(batch(i))
                with torch.inference_mode(False):
                    value = (model(sick(i)) - frozen - scored.clone()).square().mean()
                value.backward()
            if i == 3:
                torch.use_deterministic_algorithms(True)
                torch.set_default_dtype(torch.float64)
                with torch.autograd.detect_anomaly(check_nan=False):
                    (model(batch(i).float()) * torch.ones(4)).sum().backward()
            optimizer.step()
            return value, torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(True)
            torch.use_deterministic_algorithms(False)
            torch.set_default_dtype(torch.float32)

    return Program([model], [optimizer], step, steps=5)


@program("default_dtype_is_half_from_the_start_to_the_end", "loops")
def half_default(seed: int) -> Program:
    torch.set_default_dtype(torch.float16)
    model = mlp()
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(i: int) -> Any:
        torch.set_default_dtype(torch.float16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.zero_grad()
            value = model(sick(i).half()).square().mean()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        torch.set_default_dtype(torch.float32)
        return value, torch.tensor(1.0)

    return Program([model], [optimizer], step, steps=4)


@program("compile_is_switched_on_off_and_reset_between_steps", "loops")
def toggled(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    counts: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counts.append(len(graph.graph.nodes))
        return graph.forward

    fast = torch.compile(model, backend=backend)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        if i == 3:
            torch._dynamo.reset()
        with torch.compiler.set_stance("force_eager") if i == 2 else contextlib.nullcontext():
            value = (fast if i % 2 == 0 else model)(sick(i, 4)).square().mean()
        value.backward()
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=6, extra=lambda: counts)


@program("random_streams_forked_in_every_part_and_drawn_again", "loops")
def forks(seed: int) -> Program:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.own = torch.Generator().manual_seed(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(torch.randint(0, 100, (), generator=self.own)))
                x = F.dropout(x, 0.3)
            return self.inner(x) + torch.randn(8) * 0.1 + random.random() + float(np.random.rand())

    model = nn.Sequential(Noisy(), nn.ReLU(), Noisy())

    def loss(i: int) -> torch.Tensor:
        state = torch.get_rng_state()
        one = model(sick(i))
        torch.set_rng_state(state)
        two = checkpoint(model, batch(i), use_reentrant=False, preserve_rng_state=bool(i % 2), determinism_check="none")
        return (one - two).square().mean()

    return training(model, loss, steps=5, extra=lambda: [m.own.get_state() for m in model if isinstance(m, Noisy)])


@program("iterable_rows_come_while_the_model_is_asked_what_it_likes", "loops")
def curriculum(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    class Liked(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for i in range(6):
                rows = batch(i)
                model.eval()
                with torch.inference_mode():
                    order = model(rows).sum(1).argsort()
                model.train()
                yield rows[order.clone()]

    def loop(watch: Any) -> None:
        for i, rows in enumerate(DataLoader(Liked(), batch_size=None)):
            with watch.step(i):
                optimizer.zero_grad()
                model(rows * (NAN if i == 3 else 1)).square().mean().backward()
                optimizer.step()

    return Program([model], [optimizer], lambda i: None, loop=loop)


def _usual_but_one(steps: int = 5) -> Program:
    """The fourth step is a bad one."""
    model = mlp()
    return training(model, lambda i: model(batch(i) * (NAN if i == 3 else 1)).square().mean(), steps=steps)


def _loop(made: Program, loop: Callable[[Any], None]) -> Program:
    made.loop = loop
    return made


@program("task_cancelled_inside_a_step", "loops")
def cancelled(seed: int) -> Program:
    """A task of asyncio waits inside a step and is cancelled there; the next task trains on."""
    made = _usual_but_one()

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


@program("async_generator_of_steps_is_never_finished", "loops")
def async_generator(seed: int) -> Program:
    """An asynchronous generator is left inside a step; the event loop closes it when it ends."""
    made = _usual_but_one()

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


@program("spawned_process_inside_a_step", "loops")
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


@program("training_runs_while_it_is_imported", "places")
def imported(seed: int) -> Program:
    made = _usual_but_one()

    def loop(watch: Any) -> None:
        text = "import sys\nmade, watch = sys.handed_over\nfor i in range(5):\n    with watch.step(i):\n"
        pathlib.Path("module_that_trains.py").write_text(text + "        made.see(made.step(i))\n")
        sys.handed_over = (made, watch)  # type: ignore[attr-defined]
        sys.path.insert(0, "")
        try:
            importlib.import_module("module_that_trains")
        finally:
            sys.path.remove("")
            del sys.handed_over  # type: ignore[attr-defined]
            sys.modules.pop("module_that_trains", None)
            shutil.rmtree("__pycache__", ignore_errors=True)
            pathlib.Path("module_that_trains.py").unlink()

    return _loop(made, loop)


@program("training_by_exec_without_builtins", "places")
def without_builtins(seed: int) -> Program:
    made = _usual_but_one()
    text = "for i in numbers:\n    with watch.step(i):\n        value = made.step(i)\n    made.see(value)"
    return _loop(made, lambda watch: exec(text, {"__builtins__": {}, "made": made, "watch": watch, "numbers": range(5)}))


@program("training_in_a_finalizer_and_in_a_class_body", "places")
def finalizer(seed: int) -> Program:
    made = _usual_but_one()

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


def _usual(**more: Any) -> tuple[Program, nn.Module, torch.Tensor]:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4)), torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), **more), model, x


def _dispatch() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    return Dispatch()


def _function() -> Any:
    from torch.overrides import TorchFunctionMode

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    return Function()


_CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t),
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "dispatch_mode": _dispatch,
    "function_mode": _function,
    "device": lambda: torch.device("cpu"),
    "fork_rng": lambda: torch.random.fork_rng(),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "catch_warnings": lambda: warnings.catch_warnings(),
    "warnings_recorded": lambda: warnings.catch_warnings(record=True),
    "redirect_stderr": lambda: contextlib.redirect_stderr(io.StringIO()),
    "cached_parametrizations": lambda: nn.utils.parametrize.cached(),
    "enable_grad": lambda: torch.enable_grad(),
    "profile": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "deterministic_attention": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "bottleneck_no_mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
}


for _name, _context in _CONTEXTS.items():

    @program(f"overlaps_with_{_name}", "loops")
    def overlaps(seed: int, context: Any = _context) -> Program:
        """The context is entered before a step and left inside it, entered inside one and left after it, in turn."""
        made, _model, _x = _usual()

        def loop(watch: Any) -> None:
            for i in range(4):
                other = context()
                if i % 2:
                    other.__enter__()
                    watch.begin(i)
                    value = made.step(i)
                    other.__exit__(None, None, None)
                    made.step(i)
                    watch.end()
                else:
                    watch.begin(i)
                    other.__enter__()
                    value = made.step(i)
                    watch.end()
                    made.step(i)
                    other.__exit__(None, None, None)
                made.see(value)
            made.see([torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_anomaly_enabled()])

        made.loop = loop
        return made


@program("odd_step_numbers", "loops")
def odd_numbers(seed: int) -> Program:
    """Step numbers are numpy integers, booleans, 0-dimensional tensors, negative, huge, and go backwards."""
    made, _, _ = _usual()

    def loop(watch: Any) -> None:
        for i in (np.int64(3), np.uint8(255), True, -1, 2**40, 0, np.int32(-5), 2**70, torch.tensor(7).item()):
            with watch.step(i):
                value = made.step(0)
            made.see(value)

    made.loop = loop
    return made


@program("tools_close_in_the_wrong_order", "loops")
def wrong_order(seed: int) -> Program:
    """Three tools on one model and optimizer overlap like bricks: begin A, begin B, end A, begin C, close A, end B ..."""
    made, model, _x = _usual()
    optimizer = made.optimizers[0]

    def loop(watch: Any) -> None:
        a, b, c = watch.another(model, optimizer), watch.another(model, optimizer), watch.another(model[0])
        a.begin(0)
        made.see(made.step(0))
        b.begin(0)
        made.see(made.step(1))
        a.end()
        c.begin(0)
        made.see(made.step(2))
        a.close()
        made.see(made.step(3))
        with watch.step(0):
            b.end()
            c.end()
            made.see(made.step(4))
            c.close()
        b.close()
        made.see(made.step(5))
        watch.close()
        made.see(made.step(6))
        made.see([sorted(vars(optimizer)), [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]])

    made.loop = loop
    return made


@program("tool_on_parent_and_on_child", "loops")
def parent_and_child(seed: int) -> Program:
    """One tool watches the model, others its submodules; the child's steps are nested in the parent's and last longer."""
    made, model, _x = _usual()

    def loop(watch: Any) -> None:
        children = [watch.another(m) for m in model]
        for i in range(3):
            with contextlib.ExitStack() as stack:
                stack.enter_context(watch.step(i))
                for child in children:
                    stack.enter_context(child.step(i))
                value = made.step(i)
                rest = stack.pop_all()
            made.see(value)
            made.step(i)
            rest.close()
        for child in children[::-1]:
            child.close()

    made.loop = loop
    return made


@program("model_vanishes_before_close", "loops")
def vanishes(seed: int) -> Program:
    """The user drops model and optimizer while the tool is open, makes others, and closes much later."""
    made, _, _ = _usual()
    made.step = lambda i: None
    made.models.clear()
    made.optimizers.clear()
    model = mlp()
    made.models.append(model)
    x = torch.randn(4, 8)
    box = [model, torch.optim.SGD(model.parameters(), 0.1)]
    del model

    def train() -> Any:
        box[1].zero_grad()
        loss = box[0](x).square().mean()
        loss.backward()
        box[1].step()
        return loss

    def loop(watch: Any) -> None:
        with watch.step(0):
            made.see(train())
            made.models.clear()
            box.clear()
            gc.collect()
        with watch.step(1):
            fresh = mlp()
            box.extend([fresh, torch.optim.SGD(fresh.parameters(), 0.1)])
            made.see(train())
        watch.close()
        made.see(train())
        made.models.append(box[0])

    made.loop = loop
    return made


@program("begin_forward_and_end_in_three_threads", "loops")
def three_threads(seed: int) -> Program:
    """begin, forward, backward and end of each step happen in four different threads, one after another."""
    made, model, x = _usual()
    optimizer = made.optimizers[0]

    def run(function: Callable[[], Any]) -> Any:
        box: list[Any] = []
        thread = threading.Thread(target=lambda: box.append(function()))
        thread.start()
        thread.join()
        return box[0]

    def loop(watch: Any) -> None:
        for i in range(3):
            run(lambda: watch.begin(i))  # noqa: B023
            optimizer.zero_grad()
            loss = run(lambda: model(x).square().mean())
            run(lambda: loss.backward())  # noqa: B023
            run(lambda: optimizer.step())
            run(lambda: watch.end())
            made.see(loss)
        run(watch.close)

    made.loop = loop
    return made


@program("generator_with_open_step_collected_elsewhere", "loops")
def collected(seed: int) -> Program:
    """Generators hold steps open; one is closed by the collector in another thread, one is closed by hand out of order."""
    made, _, _ = _usual()

    def steps(watch: Any, first: int) -> Iterator[Any]:
        for i in range(first, first + 3):
            with watch.step(i):
                yield made.step(i)

    def loop(watch: Any) -> None:
        one, two = steps(watch, 0), steps(watch, 10)
        made.see(next(one))
        made.see(next(two))
        made.see(next(one))
        one.close()
        made.see(next(two))
        box = [two]
        del two

        def drop() -> None:
            box.clear()
            gc.collect()

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        made.see(made.step(20))
        for value in steps(watch, 30):
            made.see(value)

    made.loop = loop
    return made


@program("tool_objects_pickled_and_inspected", "loops")
def inspected(seed: int) -> Program:
    """Inside a step the user pickles model and optimizer, prints everything, and walks all objects of the collector."""
    made, model, x = _usual()
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        again_model, again_optimizer = pickle.loads(pickle.dumps((model, made.optimizers[0])))
        loss = again_model.eval()(x).mean()
        loss.backward()
        again_optimizer.step()
        alive = sum(isinstance(thing, nn.Linear) for thing in gc.get_objects())
        text = [repr(model), repr(made.optimizers[0])]
        return value, loss, alive > 0, text, list(again_model.parameters())

    made.step = step
    return made


@program("whole_model_saved_and_loaded_in_step", "loops")
def saved_whole(seed: int) -> Program:
    """torch.save of the whole model and optimizer inside a step; the bytes of the state_dict part are compared, the copy runs."""
    made, model, x = _usual()
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        file = io.BytesIO()
        torch.save({"model": model, "optimizer": made.optimizers[0]}, file)
        size = len(file.getvalue())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        hooks = sum(len(m._forward_hooks) for m in twin["model"].modules())
        state = io.BytesIO()
        torch.save(model.state_dict(), state)
        return value, twin["model"].eval()(x), len(state.getvalue()), size > 0, hooks >= 0, sorted(vars(twin["model"]))

    made.step = step
    return made


@program("evaluation_between_and_inside", "loops")
def evaluation(seed: int) -> Program:
    """Evaluation in eval mode, under inference_mode, with other batch sizes, between micro-steps of an open step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    x = torch.randn(6, 8)
    made = training(model, lambda i: model(x).square().mean())

    def evaluate() -> Any:
        model.eval()
        with torch.inference_mode():
            value = [model(torch.randn(n, 8)).sum() for n in (1, 9)]
        model.train()
        return value

    def loop(watch: Any) -> None:
        made.see(evaluate())
        for i in range(3):
            with watch.step(i):
                before = evaluate()
                value = made.step(i)
                after = evaluate()
            made.see([before, value, after, evaluate()])

    made.loop = loop
    return made


@program("step_reentered_from_a_hook", "loops")
def reentered(seed: int) -> Program:
    """A gradient hook begins and ends a step of the same tool and of another while a step is open and backward runs."""
    made, model, x = _usual()
    optimizer = made.optimizers[0]

    def loop(watch: Any) -> None:
        other = watch.another(model[0])

        def hook(grad: torch.Tensor) -> torch.Tensor:
            with other.step(100), torch.enable_grad():
                model[0](x).sum()
            return grad * 0.5

        for i in range(3):
            with watch.step(i):
                optimizer.zero_grad()
                h = model[0](x)
                h.register_hook(hook)
                loss = model[3](h).square().mean()
                loss.backward()
                optimizer.step()
            made.see(loss)

    made.loop = loop
    return made


@program("inference_mode_left_inside_step", "loops")
def inference_left(seed: int) -> Program:
    """A step begins under inference_mode or no_grad, which ends inside; another begins normally and ends under it."""
    made, model, x = _usual()

    def loop(watch: Any) -> None:
        for i, kind in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad)):
            context = kind()
            if i < 2:
                context.__enter__()
                watch.begin(i)
                made.see(model(x))
                context.__exit__(None, None, None)
                made.see(made.step(i))
                watch.end()
            else:
                watch.begin(i)
                made.see(made.step(i))
                context.__enter__()
                made.see(model(x))
                watch.end()
                context.__exit__(None, None, None)
            made.see([torch.is_grad_enabled(), torch.is_inference_mode_enabled()])

    made.loop = loop
    return made


@program("all_gradients_in_inference_mode_tensors", "loops")
def inference_tensors(seed: int) -> Program:
    """Inputs, buffers and a gradient are inference tensors, whose versions cannot be read and which refuse in-place."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with torch.inference_mode():
        scale = torch.full((8,), 0.5)
        x = torch.randn(4, 8)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", scale)

        def forward(self, x: torch.Tensor) -> Any:
            return {"scale": self.scale, "y": x.clone() * 1.0}

    model.append(Scaled())
    optimizer = torch.optim.SGD(list(model[:2].parameters()), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.inference_mode():
            out = model[2](x)
        h = model[0](out["y"].clone())
        loss = model[1](h).square().mean()
        loss.backward()
        with torch.inference_mode():
            frozen = model[0].weight.grad * 0.5
        model[0].weight.grad = frozen.clone()
        optimizer.step()
        return loss, out["scale"].is_inference()

    return Program([model], [optimizer], step)


@program("ppo_epochs_over_one_rollout", "loops")
def ppo(seed: int) -> Program:
    policy, value = mlp(8, 3), mlp(8, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], 1e-2)
    made = Program([policy, value], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        count = 0
        for rollout in range(2):
            with torch.no_grad():
                states = batch(rollout)
                known = torch.distributions.Categorical(logits=policy(states))
                actions = known.sample()
                before, rewards = known.log_prob(actions), torch.randn(len(states))
            advantage = rewards - value(states).squeeze(1).detach()
            for epoch in range(3):
                with watch.step(count):
                    now = torch.distributions.Categorical(logits=policy(states))
                    ratio = (now.log_prob(actions) - before).exp()
                    clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                    loss = -clipped.mean() - 0.01 * now.entropy().mean() + F.mse_loss(value(states).squeeze(1), rewards)
                    if rollout == epoch == 1:
                        loss = loss * NAN
                    optimizer.zero_grad(set_to_none=False)
                    loss.backward()
                    if loss.isfinite():
                        optimizer.step()
                made.see([loss, ratio])
                count += 1

    made.loop = loop
    return made


@program("diffusion_with_a_generator_of_its_own", "loops")
def diffusion(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    source = torch.Generator().manual_seed(5)
    stands: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        clean = torch.rand(4, 8, generator=source)
        time = torch.rand(4, 1, generator=source)
        noise = torch.empty(4, 8).normal_(generator=source)
        label = (torch.rand(4, 1, generator=source) > 0.1) * time
        with torch.autocast("cpu", torch.bfloat16):
            guess = model(torch.cat([clean * (1 - time) + noise * time, label], 1))
        stands.append(int(source.get_state().sum()))
        if i:
            average.update_parameters(model)
        return F.mse_loss(guess.float(), noise) / (0.0 if i == 3 else 1.0)

    return training(model, loss, steps=5, extra=lambda: [stands, average.state_dict()])


@program("gradients_cached_between_two_passes", "loops")
def gradient_cache(seed: int) -> Program:
    """A contrastive loss over more rows than fit: without gradients first, then again chunk by chunk from the cached gradient."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        chunks, stands = list(torch.randn(8, 8).chunk(4)), []
        with torch.no_grad():
            firsts = []
            for chunk in chunks:
                stands.append(torch.get_rng_state())
                firsts.append(model(chunk))
        found = torch.cat(firsts).requires_grad_()
        scores = found @ found.T / (0.0 if i == 2 else 0.1)
        loss = F.cross_entropy(scores, torch.arange(8).roll(1))
        loss.backward()
        assert found.grad is not None
        for chunk, stand, cached in zip(chunks, stands, found.grad.chunk(4)):
            with torch.random.fork_rng():
                torch.set_rng_state(stand)
                (model(chunk) * cached).sum().backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step, steps=4)


@program("state_of_an_lstm_lives_over_steps", "loops")
def truncated(seed: int) -> Program:
    model = nn.LSTM(8, 8, 2, batch_first=True)
    states: list[Any] = [None]

    def loss(i: int) -> torch.Tensor:
        rows = torch.sin(torch.arange(96.0) + i).reshape(3, 4, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1):
            out, state = model(rows, states[0])
        states[0] = tuple(part.detach().float() for part in state)
        return out.float().square().mean() * (math.inf if i == 3 else 1.0)

    return training(model, loss, steps=6, extra=lambda: states)


@program("forward_is_sent_its_parts", "loops")
def sent(seed: int) -> Program:
    """The model is a generator that asks for the next layer's input and is answered from outside; one is never finished."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Generator[torch.Tensor, torch.Tensor, torch.Tensor]:
            for layer in self.layers:
                x = yield torch.tanh(layer(x))
            return x

    model, left = Asking(), []

    def loss(i: int) -> torch.Tensor:
        running = model(sick(i, 3))
        left.append(model(batch(i)))
        next(left[-1])
        value = next(running)
        while True:
            try:
                value = running.send(value * 0.5 + 0.1)
            except StopIteration as end:
                return end.value.square().mean()

    return training(model, loss, steps=5, extra=lambda: [gen.gi_frame is None for gen in left])


@program("loader_asks_the_model_what_is_hard", "loops")
def active(seed: int) -> Program:
    model = mlp()
    rows = torch.linspace(-2, 2, 128).reshape(16, 8)

    class Hardest(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                model.eval()
                with torch.inference_mode():
                    scores = model(rows).square().sum(1) + torch.rand(16) * 1e-3
                model.train()
                yield from rows[scores.topk(2).indices]

    source = iter(torch.utils.data.DataLoader(Hardest(), batch_size=4))
    return training(model, lambda i: model(next(source)).square().mean() * (NAN if i == 4 else 1), steps=6)


class _Enough(Exception):
    pass


@program("stopped_from_a_hook_and_taken_up_again", "loops")
def taken_up(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    made = Program([model], [optimizer], lambda i: None)
    calls = [0]

    def watchdog(grad: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] in (3, 6):
            raise _Enough(f"at {calls[0]}")

    def loop(watch: Any) -> None:
        kept: Any = None
        i = 0
        while i < 8:
            try:
                with watch.step(i):
                    value = model(sick(i, 3)).square().mean()
                    value.register_hook(watchdog)
                    value.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                made.see(value)
                kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                i += 1
            except _Enough as stop:
                made.see(str(stop))
                if kept is not None:
                    model.load_state_dict(kept[0])
                    optimizer.load_state_dict(kept[1])
                optimizer.zero_grad()

    made.loop = loop
    return made


@program("samples_drawn_by_their_loss", "loops")
def prioritised(seed: int) -> Program:
    """The random numbers of numpy are drawn with weights from the loss of each sample."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    priorities, drawn = np.ones(16), []  # type: tuple[Any, list[Any]]
    rows = torch.linspace(-1, 1, 128).reshape(16, 8)

    def step(i: int) -> Any:
        chosen = np.random.choice(16, 4, replace=False, p=priorities / priorities.sum())
        drawn.append(chosen.tolist())
        each = model(rows[chosen]).square().mean(1)
        if i == 2:
            each = each * torch.tensor([1.0, NAN, 1.0, 1.0])
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step() if i != 2 else None
        priorities[chosen] = np.nan_to_num(each.detach().numpy(), nan=1.0) + 1e-3
        return each

    return Program([model], [optimizer], step, steps=6, extra=lambda: [drawn, priorities])


@program("generators_compute_when_they_are_closed", "loops")
def closing(seed: int) -> Program:
    """Left halfway in a forward; their `finally` runs operations of torch when the last name of them goes."""
    model, closed = mlp(), []  # type: tuple[Any, list[Any]]

    def stream(x: torch.Tensor) -> Iterator[torch.Tensor]:
        try:
            while True:
                x = torch.tanh(x) * 1.5
                yield x
        finally:
            closed.append(float(x.detach().nan_to_num(7).norm()))

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.open: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.open = stream(self.inner(x))
            next(self.open)
            return next(self.open)  # type: ignore[no-any-return]

    whole = Reading()
    return training(whole, lambda i: whole(sick(i, 3)).square().mean(), steps=5, extra=lambda: closed)
