"""What training scripts do around the step: undo it, save in the background, watch themselves, start over where they stopped."""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import functools
import hashlib
import inspect
import io
import logging
import os
import random
import signal
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from ..program import Program, mlp, program
from .libraries import scaled, sick


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
