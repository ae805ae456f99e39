"""How steps are driven: coroutines, tasks, workers, text that is run, switches in the middle, and optimizers in odd ways."""

from __future__ import annotations

import asyncio
import builtins
import collections
import contextlib
import copy
import marshal
import random
import string
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..program import Program, mlp, program, training
from .fourth_process import batch

NAN = float("nan")


def _sick(i: int, at: int = 2) -> torch.Tensor:
    return batch(i) * (NAN if i == at else 1)


@program("optimizer_states_loaded_from_another_precision_in_the_middle", "optimizers")
def load_states(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(_sick(i)).square().mean()
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
        value = model(_sick(i)).square().mean()
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
        value = model(_sick(i, 9)).square().mean()
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
            out.append(running.send(_sick(i, 4)))
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
                value = model(_sick(i, 5)).square().mean()
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
                value = model(_sick(i)).float().square().mean()
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
    run = types.FunctionType(inner, {"__builtins__": builtins, "optimizer": optimizer, "model": model, "sick": _sick})
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
                    value = (model(_sick(i)) - frozen - scored.clone()).square().mean()
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
            value = model(_sick(i).half()).square().mean()
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
            value = (fast if i % 2 == 0 else model)(_sick(i, 4)).square().mean()
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
        one = model(_sick(i))
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
