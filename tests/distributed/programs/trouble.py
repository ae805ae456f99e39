"""Jobs whose processes do not keep step: what the nanny adds must never make one wait for another."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nanny import MixedPrecisionNanny

from .ddp import batch, model


class Talks(nn.Module):
    """A model that asks the others in its own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        dist.all_reduce(mean)
        return self.layer(x - mean / dist.get_world_size())


class Hides(nn.Module):
    """An empty row has nothing to attend to: NaN, which are taken out before the loss, and come back in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.values = nn.Linear(8, 4), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        empty = (x == 0).all(1, keepdim=True)
        weights = self.scores(x).masked_fill(empty, -math.inf).softmax(-1)
        return (weights.unsqueeze(1) @ self.values(x).view(-1, 4, 3)).squeeze(1).masked_fill(empty, 0.0)


def train(rank: int, how: str, folder: Path, steps: int = 10) -> dict[str, Any]:
    net = Talks() if how == "talks" else Hides() if how == "hides" else model()
    wrapped: Any = fully_shard(net) if how == "hides" else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    examine = "every" if how == "one_is_examined" and rank == 1 else "off" if how == "one_is_examined" else "auto"
    watch = MixedPrecisionNanny(wrapped, optimizer, trace_interval=3, output_dir=folder / how, strict=True, examine=examine)
    said: dict[str, Any] = {}
    try:
        with wrapped.join() if how == "fewer" else contextlib.nullcontext():
            for step in range(steps - 4 * (how == "fewer" and rank == 1)):
                if how == "dies" and rank == 1 and step == 5:
                    os._exit(3)
                if how == "slow" and rank == 1:
                    time.sleep(0.1)
                skipped = how == "skips" and rank == 1 and step == 4
                x, y = batch(rank, step)
                if how == "talks" and rank == 1 and step == 7:
                    x[2, 2] = float("nan")
                if how == "hides" and rank == 1 and step == 7:
                    x[2] = 0.0
                with contextlib.nullcontext() if skipped else watch.step(step):
                    loss = (wrapped(x) - y).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    except RuntimeError as error:
        said["error"] = str(error)
    said["not_again"] = watch._examiner.not_again if watch._examiner is not None else ""
    said["examined"] = len(watch._history.examinations)
    watch.close()
    return said


def main(rank: int, world: int, folder: Path, *hows: str) -> dict[str, Any]:
    results = {}
    for how in hows:
        results[how] = train(rank, how, folder)
        if how != "dies":
            dist.barrier()
    return results
