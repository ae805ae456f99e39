"""What training scripts do around the step: undo it, save in the background, watch themselves, start over where they stopped."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import functools
import gc
import hashlib
import inspect
import io
import logging
import os
import random
import re
import signal
import sys
import threading
import time
import warnings
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from ..program import Program, mlp, program, sick, training
from .libraries import scaled


@program("spikes_of_the_loss_are_undone_with_everything_that_moved", "habits")
def undone(seed: int) -> Program:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        ],
        [3],
    )
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    mean, undone = [None], [0]

    def everything() -> Any:
        parts = [copy.deepcopy(one.state_dict()) for one in (model, optimizer, schedule, plateau)]
        return parts, torch.get_rng_state(), random.getstate(), np.random.get_state()

    def step(i: int) -> Any:
        kept = everything()
        scale = float("nan") if i == 3 else 1e4 if i == 5 else random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5)
        value = model(sick(1, 9) * scale).square().mean()
        if torch.isfinite(value):
            plateau.step(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
        spike = mean[0] is not None and not value.item() < 3 * mean[0] + 1
        if spike:
            undone[0] += 1
            for one, state in zip((model, optimizer, schedule, plateau), kept[0]):
                one.load_state_dict(state)
            torch.set_rng_state(kept[1])
            random.setstate(kept[2])
            np.random.set_state(kept[3])
        else:
            mean[0] = value.item() if mean[0] is None else 0.9 * mean[0] + 0.1 * value.item()
        return value

    return Program([model], [optimizer], step, steps=8, extra=lambda: [mean, undone, schedule.state_dict(), plateau.state_dict()])


@program("checkpoints_are_written_by_a_thread_while_the_next_step_runs", "habits")
def background(seed: int) -> Program:
    model = mlp()
    sums: list[Any] = []
    made = scaled(model, lambda i: model(sick(i)).square().mean(), steps=6, extra=lambda: sums)
    one = made.step

    def write(state: Any) -> str:
        stream = io.BytesIO()
        torch.save(state, stream)
        return hashlib.sha1(repr(torch.load(io.BytesIO(stream.getvalue()), weights_only=True)).encode()).hexdigest()

    def loop(watch: Any) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for i in range(made.steps):
                state = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "step": i}
                with watch.step(i):
                    later = pool.submit(write, state)
                    made.see(one(i))
                    sums.append(later.result())

    made.loop = loop
    return made


@program("script_measures_its_own_speed_memory_and_garbage_each_step", "habits")
def measures_itself(seed: int) -> Program:
    model = mlp()
    growth: list[Any] = []
    logger = logging.getLogger("training")
    logger.propagate = False
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.filename} {record.funcName} {record.getMessage()}")  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    made = scaled(model, lambda i: model(sick(i)).square().mean(), steps=6, extra=lambda: [growth, lines])
    one = made.step

    def step(i: int) -> Any:
        began = time.perf_counter()
        value = one(i)
        logger.info("step %d took %s", i, time.perf_counter() >= began)
        hooks = sum(len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        growth.append([type(model).__name__, hooks, len(inspect.signature(model.forward).parameters), "forward" in vars(model)])
        return value

    made.step = step
    return made


@program("signal_asks_for_a_checkpoint_at_the_end_of_the_step_and_a_second_one_at_once", "habits")
def preempted(seed: int) -> Program:
    model = mlp()
    asked, kept = [0], []
    made = scaled(model, lambda i: model(sick(i)).square().mean(), extra=lambda: kept)
    one = made.step

    def handler(number: int, frame: Any) -> None:
        asked[0] += 1
        if asked[0] % 2 == 0:
            kept.append(copy.deepcopy([model.state_dict(), made.optimizers[0].state_dict()]))

    def step(i: int) -> Any:
        os.kill(os.getpid(), signal.SIGUSR2)
        value = one(i)
        os.kill(os.getpid(), signal.SIGUSR2)
        if asked[0]:
            kept.append([asked[0], copy.deepcopy(model.state_dict())])
        return value

    def loop(watch: Any) -> None:
        before = signal.signal(signal.SIGUSR2, handler)
        for i in range(5):
            with watch.step(i):
                made.see(step(i))
        signal.signal(signal.SIGUSR2, before)

    made.loop = loop
    return made


class Numbers(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.bad, self.read = {5, 9}, collections.Counter[int]()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Any:
        self.read[number] += 1
        return {"rows": np.full(8, np.nan if number in self.bad else number / 7, np.float32), "number": number}


@program("bad_rows_are_searched_in_the_batch_and_weighed_down_for_the_loader", "habits")
def searched(seed: int) -> Program:
    model, data = mlp(), Numbers()
    weights = torch.ones(16, dtype=torch.double)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    made = Program([model], [optimizer], lambda i: None, extra=lambda: [weights, sorted(data.read.items())])

    def loop(watch: Any) -> None:
        number = 0
        for epoch in range(2):
            sampler = WeightedRandomSampler(weights, 16, generator=torch.Generator().manual_seed(epoch))
            for batch in DataLoader(data, batch_size=4, sampler=sampler):
                with watch.step(number):
                    each = model(batch["rows"]).square().mean(-1)
                    if not torch.isfinite(each.mean()):
                        for at, row in enumerate(batch["rows"]):
                            if not torch.isfinite(model(row)).all():
                                weights[batch["number"][at]] = 0
                        each = each[torch.isfinite(each)]
                    if len(each):
                        optimizer.zero_grad()
                        each.mean().backward()
                        optimizer.step()
                    made.see(each)
                number += 1

    made.loop = loop
    return made


@program("warnings_of_the_script_decide_which_way_it_goes", "habits")
def decided(seed: int) -> Program:
    model = mlp()
    heard: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        out = model(sick(i))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = F.mse_loss(out, torch.ones(4, 1))  # torch warns of the shapes
            with np.errstate(invalid="warn"):
                np.sqrt(np.nan_to_num(out.detach().numpy(), nan=-1.0))
        heard.append([f"{w.category.__name__} {os.path.basename(w.filename)}" for w in caught])
        return value * len(caught) / (1 + len(caught))

    return scaled(model, loss, extra=lambda: heard)


@program("function_cached_by_the_version_of_its_weights", "habits")
def by_version(seed: int) -> Program:
    model = mlp()
    calls = [0, 0]

    @functools.lru_cache(maxsize=4)
    def folded(versions: tuple[int, ...]) -> torch.Tensor:
        calls[0] += 1
        with torch.no_grad():
            return model[2].weight @ model[0].weight

    def loss(i: int) -> torch.Tensor:
        versions = tuple(p._version for p in model.parameters())
        near = sick(1, 9) @ folded(versions).T
        calls[1] += sum(versions)
        folded(versions)
        return (model(sick(i)) - near).square().mean()

    return scaled(model, loss, extra=lambda: [calls, [p._version for p in model.parameters()]])


@program("messages_of_autograd_errors", "habits")
def messages(seed: int) -> Program:
    """Five classic errors of autograd are provoked and their messages, with versions and node names, are compared."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said: list[str] = []

    def expect(function: Any) -> None:
        try:
            function()
            said.append("nothing")
        except (RuntimeError, TypeError) as error:
            said.append(str(error))

    def step(i: int) -> Any:
        optimizer.zero_grad()
        h = model[1](model[0](x))
        y = model[2](h)
        with torch.no_grad():
            h.mul_(2)
        expect(lambda: y.sum().backward())
        loss = model(x).square().mean()
        loss.backward()
        expect(lambda: loss.backward())
        expect(lambda: loss.detach().backward())
        expect(lambda: model(x).backward())
        expect(lambda: model[0].weight.add_(1))
        z = model(x)
        with torch.no_grad():
            model[2].weight.mul_(1.0)
        expect(lambda: z.sum().backward())
        expect(lambda: model(torch.randn(3, 7)))
        expect(lambda: model(x, x))
        expect(lambda: model[0](wrong=x))
        optimizer.step()
        return loss

    return Program([model], [optimizer], step, extra=lambda: said)


@program("activations_saved_to_disk", "habits")
def saved_activations(seed: int) -> Program:
    """Activations and gradients that require grad are pickled inside steps; torch warns if a tensor carries hooks."""
    model, x = mlp(), torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        h = model[0](x)
        y = model[2](model[1](h))
        file = io.BytesIO()
        torch.save([h, y, x, list(model.parameters())], file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        value = y.square().mean()
        copies = copy.deepcopy([p for p in model.parameters()])  # noqa: C416
        return value + 0 * sum(a.detach().sum() for a in again[:3]) + 0 * sum(c.detach().sum() for c in copies)

    return training(model, loss)


@program("repr_of_activations_noted", "habits")
def reprs(seed: int) -> Program:
    """The printed form of every activation, with its grad_fn, is noted; user metadata rides on nodes."""
    model, x = mlp(), torch.randn(2, 8)
    notes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        h: Any = x
        for m in model:
            h = m(h)
            notes.append([repr(h), sorted(map(str, h.grad_fn.metadata)), h.requires_grad, h.retains_grad])
            h.grad_fn.metadata["mine"] = i
        return h.square().mean()

    return training(model, loss, extra=lambda: notes)


@program("forward_cached_by_lru", "habits")
def cached_forward(seed: int) -> Program:
    """forward is memoised: the very same output object comes out of a module many times, in a step and over steps."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.compute = functools.lru_cache(maxsize=None)(self._compute)

        def _compute(self, key: int) -> torch.Tensor:
            torch_gen = torch.Generator().manual_seed(key)
            return self.inner(torch.randn(4, 8, generator=torch_gen)).detach()

        def forward(self, key: int) -> torch.Tensor:
            return self.compute(key)

    model = nn.ModuleList([Cached(), nn.Linear(8, 4)])

    def loss(i: int) -> torch.Tensor:
        total = sum(model[1](model[0](key % 2)) for key in range(10))
        assert model[0](0) is model[0](0)
        return total.square().mean()  # type: ignore[union-attr]

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                value = made.step(i)
            made.see(value)
        model[0].compute.cache_clear()

    made = training(model, loss)
    made.loop = loop
    return made


@program("output_reused_within_graph_many_times", "habits")
def reused_output(seed: int) -> Program:
    """A module hands out the same tensor with a graph a thousand times within a step, then a fresh one."""

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.held = nn.Linear(8, 8), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.held is None:
                self.held = self.inner(x)
            return self.held

    model = nn.ModuleList([Once(), nn.Linear(8, 4)])
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        model[0].held = None
        for _ in range(1000):
            y = model[0](x)
        value = model[1](y).square().mean()
        model[0].held = None
        return value

    return training(model, loss)


@program("thousands_of_calls_in_one_step", "habits")
def many_calls(seed: int) -> Program:
    """A recurrent cell is called 300 times in one step, with a backward each 50 calls."""
    model = nn.GRUCell(4, 4)
    x = torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        h = torch.zeros(2, 4)
        for number in range(300):
            h = model(x, h)
            if number % 50 == 49:
                h.square().mean().backward()
                h = h.detach()
        optimizer.step()
        return h

    return Program([model], [optimizer], step, steps=2)


@program("names_that_cannot_be_written", "habits")
def names(seed: int) -> Program:
    """Submodules named by lone surrogates, NUL, newlines, 5000 letters, path traversals and format strings; so are classes."""
    odd = ["\ud800", "\x00", "a\nb", "n" * 5000, "../../x", "{0}%s", "\u202e", '"', "\x1b[31m", "=cmd()", "", " "]
    model = nn.Module()
    for name in odd:
        model._modules[name] = type(name.replace("\x00", "0").replace("\ud800", "s") or "E", (nn.Linear,), {"__module__": None})(
            8, 8
        )
    x = torch.randn(2, 8)

    def forward(y: torch.Tensor) -> torch.Tensor:
        for m in model._modules.values():
            y = m(y).tanh()
        return y * float("nan")

    model.forward = forward
    made = training(
        model,
        lambda i: model(x).square().mean(),
        torch.optim.SGD([p for m in model._modules.values() for p in m.parameters()], 0.1),
    )

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                value = made.step(i)
            made.see(value)
        watch.close()
        parts = list(model._modules.values())
        model._modules.clear()
        model._modules.update({f"part{number}": part for number, part in enumerate(parts)})

    made.loop = loop
    return made


@program("groups_with_odd_values", "habits")
def odd_groups(seed: int) -> Program:
    """Parameter groups without lr, with lr a Fraction, a numpy number or None, with functions, NaN and modules beside."""

    class Plain(torch.optim.Optimizer):
        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=float(group.get("lr") or 0.01))

    model, x = mlp(), torch.randn(4, 8)
    a, b, c, d = model.parameters()
    optimizer = Plain([
        {"params": a, "lr": Fraction(1, 7), "hook": lambda: 1}, {"params": b, "lr": np.float32(0.1), 3: "three"},
        {"params": c, "lr": None, "decay": float("nan")}, {"params": d, "owner": {"m": nn.ReLU}},
    ])  # fmt: skip
    return training(model, lambda i: model(x).square().mean(), optimizer)


@program("own_names_like_those_of_tools", "habits")
def own_names(seed: int) -> Program:
    """The model has attributes that a tool might use: _nanny, name, hooks, step, _handles, and a property that raises."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._nanny, self.nanny, self.name, self.hooks, self._handles = "mine", 1, None, [], {}
            self._name, self.__nanny__, self.path, self.handles, self._hooks = 2, 3, 4, 5, 6
            self.inner = mlp()

        @property
        def step(self) -> Any:
            raise RuntimeError("not yet")

        @property
        def device(self) -> Any:
            raise RuntimeError("no device")

        @property
        def dtype(self) -> Any:
            raise RuntimeError("no dtype")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model, x = Named(), torch.randn(4, 8)
    for p in model.parameters():
        p._nanny = p.name_ = "mine"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer._nanny = "mine"
    extra = lambda: [{k: v for k, v in vars(model).items() if isinstance(v, (str, int))}, [vars(p) for p in model.parameters()]]  # noqa: E731
    return training(model, lambda i: model(x).square().mean(), optimizer, extra=extra)


@program("vocabulary_grows", "habits")
def vocabulary(seed: int) -> Program:
    """An embedding grows in place (.data of another shape), its sparse flag flips, a bias goes and comes."""
    model = nn.ModuleList([nn.Embedding(6, 8), nn.Linear(8, 4)])
    ids = torch.tensor([1, 2, 5])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        if i == 1:
            table = model[0].weight
            table.data = torch.cat([table.data, torch.zeros(2, 8)])
            model[0].num_embeddings = 8
        if i == 2:
            model[0].sparse = True
            model[1].bias = None
        if i == 3:
            model[0].sparse = False
            model[1].register_parameter("bias", nn.Parameter(torch.ones(4)))
        h = model[0](ids)
        loss = model[1](h).square().mean()
        model[1].weight.requires_grad_(False)
        loss.backward()
        model[1].weight.requires_grad_(True)
        optimizer.step()
        return loss.detach()

    return Program([model], [optimizer], step, steps=4)


@program("parameter_counts_reads_of_its_gradient", "habits")
def counted_grad(seed: int) -> Program:
    """A parameter class whose .grad property gives a noisy copy and draws random numbers each time it is read."""

    class Noisy(nn.Parameter):
        @property
        def grad(self) -> Any:
            g = torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]
            return None if g is None else g + 1e-3 * torch.rand(())

        @grad.setter
        def grad(self, value: Any) -> None:
            torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]

    model, x = mlp(), torch.randn(4, 8)
    for m in (model[0], model[2]):
        m.weight = Noisy(m.weight.detach())
    return training(model, lambda i: model(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1, foreach=False))


@program("model_runs_inside_forked_loader_workers", "habits")
def model_in_workers(seed: int) -> Program:
    """The dataset runs the watched model in forked loader workers while a step is open, and workers outlive the step."""
    model = mlp(8, 8)

    class Features(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> torch.Tensor:
            with torch.no_grad():
                return model(torch.full((8,), float(i)))

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        loader = DataLoader(Features(), batch_size=3, num_workers=1, multiprocessing_context="fork", timeout=60)
        for epoch in range(2):
            iterator = None
            for i in range(2):
                with watch.step(2 * epoch + i):
                    iterator = iterator or iter(loader)
                    batch = next(iterator)
                    optimizer.zero_grad()
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                made.see(loss)
            del iterator

    made.loop = loop
    return made


@program("forked_child_trains_and_closes", "habits")
def child_closes(seed: int) -> Program:
    """A forked child ends the open step, trains two more, closes the tool and exits; the parent goes on with the same tool."""
    model, x = mlp(), torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())

    def loop(watch: Any) -> None:
        for i in range(3):
            watch.begin(i)
            value = made.step(i)
            if i == 1:
                pid = os.fork()
                if pid == 0:
                    code = 9
                    try:
                        watch.end()
                        for k in range(10, 12):
                            with watch.step(k):
                                made.step(k)
                        watch.close()
                        gc.collect()
                        code = 0
                    finally:
                        os._exit(code)
                made.see(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            watch.end()
            made.see(value)

    made.loop = loop
    return made


@program("thread_hammers_the_model", "habits")
def hammered(seed: int) -> Program:
    """Another thread calls the watched model and collects garbage all the time, with a tiny switch interval."""
    model, x = mlp(), torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())
    errors: list[str] = []

    def loop(watch: Any) -> None:
        stop = threading.Event()

        def hammer() -> None:
            with torch.no_grad():
                while not stop.is_set():
                    try:
                        model(x)
                        gc.collect(0)
                    except Exception as error:  # noqa: BLE001
                        errors.append(repr(error))
                        return

        old = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        thread = threading.Thread(target=hammer)
        thread.start()
        try:
            for i in range(8):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
            watch.close()
        finally:
            stop.set()
            thread.join()
            sys.setswitchinterval(old)

    made.loop = loop
    made.extra = lambda: errors
    return made


_PATCHED: dict[str, tuple[Any, str]] = {
    "tensor_backward": (torch.Tensor, "backward"),
    "autograd_backward": (torch.autograd, "backward"),
    "clip_grad_norm": (nn.utils, "clip_grad_norm_"),
    "scaler_step": (torch.amp.GradScaler, "step"),
    "scaler_unscale": (torch.amp.GradScaler, "unscale_"),
    "sgd_step": (torch.optim.SGD, "step"),
    "zero_grad": (torch.optim.Optimizer, "zero_grad"),
    "checkpoint": (torch.utils.checkpoint, "checkpoint"),
    "autocast_enter": (torch.autocast, "__enter__"),
}


for _name, _target in _PATCHED.items():

    @program(f"patch_of_{_name}_overlaps", "habits")
    def overlapping_patch(seed: int, target: Any = _target) -> Program:
        """The user wraps a function of torch inside a step and takes the wrapper away inside a later step; calls are counted."""
        thing, name = target
        model, x = mlp(), torch.randn(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        calls = [0]
        made = Program([model], [optimizer], lambda i: None, scaler=scaler, extra=lambda: calls)

        def train() -> Any:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            loss = y.float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss

        def loop(watch: Any) -> None:
            patch: Any = None
            for i in range(4):
                with watch.step(i):
                    if i == 1:
                        inner = getattr(thing, name)

                        def wrapper(*args: Any, **kwargs: Any) -> Any:
                            calls[0] += 1
                            return inner(*args, **kwargs)  # noqa: B023

                        patch = mock.patch.object(thing, name, wrapper)
                        patch.start()
                    value = train()
                    if i == 2:
                        patch.stop()
                made.see(value)
            watch.close()
            made.see(train())

        made.loop = loop
        return made


@program("global_module_hook_counts_everything", "habits")
def counts_everything(seed: int) -> Program:
    """Global module hooks of the user count every call of any module in the process, so that a shadow run is seen."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    counts: dict[str, int] = {}

    def note(m: nn.Module, *rest: Any) -> None:
        counts[type(m).__name__] = counts.get(type(m).__name__, 0) + 1

    made = training(model, lambda i: model(x).square().mean(), extra=lambda: counts)

    def loop(watch: Any) -> None:
        handles = [
            nn.modules.module.register_module_forward_pre_hook(note),
            nn.modules.module.register_module_forward_hook(note),
            nn.modules.module.register_module_full_backward_hook(note),
            nn.modules.module.register_module_module_registration_hook(lambda parent, name, child: note(parent)),
            nn.modules.module.register_module_buffer_registration_hook(lambda m, name, b: note(m)),
        ]
        try:
            for i in range(3):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
            watch.close()
        finally:
            for handle in handles:
                handle.remove()

    made.loop = loop
    return made


@program("warnings_of_the_user_come_once_per_place", "habits")
def once_per_place(seed: int) -> Program:
    """Python's rule of one warning per place is relied upon; the count of shown warnings per step is noted."""
    model, x = mlp(), torch.randn(4, 8)
    shown: list[int] = []
    made = training(model, lambda i: model(x).square().mean())

    def loop(watch: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for i in range(3):
                with watch.step(i):
                    warnings.warn("the same each time", UserWarning, stacklevel=1)
                    value = made.step(i)
                shown.append(len([w for w in caught if "the same" in str(w.message)]))
                made.see(value)

    made.loop = loop
    made.extra = lambda: shown
    return made


@program("bn_fused_and_split_while_training", "habits")
def fused(seed: int) -> Program:
    """Convolution and norm are fused for evaluation inside a step and the model is put together again afterwards."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4))
    x = torch.randn(3, 1, 4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        model.eval()
        conv, norm = model[0], model[1]
        model[0], model[1] = nn.utils.fuse_conv_bn_eval(conv, norm), nn.Identity()
        with torch.no_grad():
            out = model(x)
        model[0], model[1] = conv, norm
        model.train()
        return loss, out

    return Program([model], [optimizer], step)


@program("modules_moved_between_two_watched_models", "habits")
def moved(seed: int) -> Program:
    """A layer wanders from one watched model to another and back inside steps; both share it for one step."""
    one, two = mlp(), mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.05)

    def step(i: int) -> Any:
        if i == 1:
            one[0] = two[0]
        if i == 2:
            two[0] = nn.Linear(8, 8)
        if i == 3:
            one[0], two[0] = two[0], one[0]
        optimizer.zero_grad()
        loss = one(x).square().mean() + two(x).abs().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program([one, two], [optimizer], step, steps=4)


@program("same_model_given_twice", "habits")
def given_twice(seed: int) -> Program:
    """The same model and the same optimizer are in the lists twice, and one model is a part of the other."""
    model, x = mlp(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program([model, model, model[0]], [optimizer, optimizer], step)


@program("exception_inside_exception_inside_step", "habits")
def chained(seed: int) -> Program:
    """Steps run inside except and finally blocks; the context and cause of what is raised there are noted."""
    model, x = mlp(), torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())
    chains: list[Any] = []

    def chain(error: BaseException | None) -> list[str]:
        return [] if error is None else [f"{type(error).__name__} {error}", *chain(error.__context__)]

    def loop(watch: Any) -> None:
        for i in range(3):
            try:
                try:
                    raise KeyError("outer")
                except KeyError:
                    with watch.step(i):
                        value = made.step(i)
                        try:
                            model(torch.randn(2, 3))
                        except RuntimeError as error:
                            raise ValueError("inner") from error
                    raise
            except (ValueError, KeyError) as error:
                chains.append([re.sub(r"\s+", " ", text) for text in chain(error)])
                chains.append([type(error.__cause__).__name__, error.__suppress_context__, getattr(error, "__notes__", None)])
            made.see(value)
        chains.append(repr(sys.exc_info()))

    made.loop = loop
    made.extra = lambda: chains
    return made


@program("traceback_of_user_errors_holds_no_model", "habits")
def traceback_frames(seed: int) -> Program:
    """Errors from forward are kept after the step; the frames of their tracebacks that belong to this file are noted."""
    frames: list[Any] = []

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise OverflowError("again")

    model = nn.Sequential(nn.Linear(8, 8), Fails())
    x = torch.randn(2, 8)
    made = Program([model], [], lambda i: None, extra=lambda: frames)

    def loop(watch: Any) -> None:
        for i in range(3):
            try:
                with watch.step(i):
                    model(x)
            except OverflowError as error:
                trace, names_ = error.__traceback__, []
                while trace is not None:
                    if trace.tb_frame.f_code.co_filename == __file__:
                        names_.append(trace.tb_frame.f_code.co_name)
                    trace = trace.tb_next
                frames.append([names_, str(error), error.args, type(error.__context__).__name__])

    made.loop = loop
    return made


@program("gradients_exchanged_by_inplace_tricks", "habits")
def surgery(seed: int) -> Program:
    """Gradient surgery between two tasks: gradients are taken, projected, written back, set_ and swapped by storage."""
    model, x = mlp(), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(i: int) -> Any:
        found = []
        for sign in (1.0, -1.0):
            optimizer.zero_grad()
            (model(x * sign) * sign).mean().backward()
            found.append([p.grad for p in model.parameters()])
        for p, a, b in zip(model.parameters(), *found):
            dot = (a * b).sum()
            p.grad = None
            p.grad = torch.empty(0).set_((a - dot.clamp(max=0) * b).contiguous()).view_as(p)
            p.grad.data = p.grad.data.clone(memory_format=torch.preserve_format)
        optimizer.step()
        return found

    return Program([model], [optimizer], step)


@program("double_precision_check_inside_step", "habits")
def gradcheck(seed: int) -> Program:
    """gradcheck and gradgradcheck of a watched module run inside a step, with their many perturbed forwards."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    made = training(model, lambda i: model(x).square().mean())
    inner = made.step

    def step(i: int) -> Any:
        given = x.clone().requires_grad_()
        good = torch.autograd.gradcheck(model, (given,)), torch.autograd.gradgradcheck(model, (given,))
        return inner(i), good

    made.step = step
    return made


@program("training_nothing_but_a_tensor", "habits")
def only_tensor(seed: int) -> Program:
    """Adversarial examples: the model is frozen and never changes, an optimizer moves only the input."""
    model = mlp().requires_grad_(False)
    x = torch.randn(4, 8, requires_grad=True)
    optimizer = torch.optim.Adam([x], 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            x.clamp_(-1, 1)
        return loss, x

    return Program([model], [optimizer], step)


@program("suppressed_steps", "habits")
def suppressed(seed: int) -> Program:
    """Every step ends by an exception that the user suppresses around it, also with return and yield in between."""
    model, x = mlp(), torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())

    class Done(BaseException):
        pass

    def one(watch: Any, i: int) -> Any:
        with contextlib.suppress(Done), watch.step(i):
            try:
                return made.step(i)
            finally:
                raise Done

    def loop(watch: Any) -> None:
        for i in range(4):
            made.see(one(watch, i))

    made.loop = loop
    return made
