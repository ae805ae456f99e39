"""Trainings with DistributedDataParallel: healthy ones, and ones of which one rank goes wrong; each watched and not."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanny import MixedPrecisionNanny

from ..job import collectives_of

STEPS = 12
BAD = 7  # not traced
FIRST, SECOND = 0, 1


def model(between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), between(), nn.Linear(16, 16), between(), nn.Linear(16, 3))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 8, generator=draw)
    return x, torch.tanh(x[:, :3])


def norm_of(net: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters() if p.grad is not None))


def in_one_process(world: int, accumulate: int = 1) -> list[float]:
    """The norm of the gradient at the first steps of the same training, without a wrapper, on the batches of all ranks."""
    net, norms = model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=Loop.lr)
    for step in range(STEPS):
        for part in range(accumulate):
            for rank in range(world):
                x, y = batch(rank, step * accumulate + part)
                ((net(x) - y).square().mean() / world).backward()
        norms.append(norm_of(net))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@dataclass
class Loop:
    """What a scenario changes."""

    rank: int
    amp: torch.dtype | None = None
    lr: float = 0.05
    wrap: dict[str, Any] | None = None
    steps: int = STEPS
    spoil: Callable[[int, Tensor], Tensor] = lambda step, x: x
    loss: Callable[[int, Tensor, Tensor], Tensor] = lambda step, out, y: (out - y).square().mean()
    forward: Callable[[nn.Module, Tensor], Tensor] = lambda wrapped, x: wrapped(x)
    before_update: Callable[[int, nn.Module], None] = lambda step, net: None
    after_update: Callable[[int, nn.Module], None] = lambda step, net: None
    updates: bool = True
    accumulate: int = 1
    local_steps: bool = False  # no_sync around every backward
    interval: int = 4
    first_is_synced: bool = False  # of several passes the first, not the last
    between: type[nn.Module] = nn.ReLU
    outside: bool = False  # the criterion has weights, and no wrapper
    norms: list[float] = field(default_factory=list)  # of the gradients that the optimizer gets, by float64

    def run(self, output: Path | None) -> str:
        net = model(self.between)
        wrapped = DistributedDataParallel(net, **(self.wrap or {}))
        head = nn.Linear(3, 3) if self.outside else nn.Identity()
        optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=self.lr)
        watch = None if output is None else MixedPrecisionNanny(
            wrapped, optimizer, trace_interval=self.interval, output_dir=output, strict=True
        )  # fmt: skip
        if watch is not None and self.outside:
            watch.add_model(head, "criterion.")
        for step in range(self.steps):
            with contextlib.nullcontext() if watch is None else watch.step(step):
                for part in range(self.accumulate):
                    synced = 0 if self.first_is_synced else self.accumulate - 1
                    is_local = self.local_steps or part != synced
                    with wrapped.no_sync() if is_local else contextlib.nullcontext():
                        x, y = batch(self.rank, step * self.accumulate + part)
                        with torch.autocast("cpu", dtype=self.amp, enabled=self.amp is not None):
                            out = self.forward(wrapped, self.spoil(step, x))
                            loss = self.loss(step, head(out.float()), y)
                        loss.backward()
                self.norms.append(norm_of(net))
                self.before_update(step, net)
                if self.updates:
                    optimizer.step()
                optimizer.zero_grad()
                self.after_update(step, net)
        if watch is not None:
            watch.close()
        bits = b"".join(p.detach().numpy().tobytes() for p in (*net.parameters(), *head.parameters()))
        return hashlib.sha256(bits).hexdigest()


def scenarios(rank: int) -> Iterator[tuple[str, Loop]]:
    def nan_here(step: int, x: Tensor) -> Tensor:
        return x.masked_fill(torch.arange(8) == 3, float("nan")) if step == BAD and rank == SECOND else x

    def infinite_here(step: int, x: Tensor) -> Tensor:
        return x.masked_fill(torch.arange(8) == 3, math.inf) if step == BAD and rank == SECOND else x

    def root_of_zero(step: int, out: Tensor, y: Tensor) -> Tensor:
        keep = 0.0 if step == BAD and rank == SECOND else 1.0
        return (keep * (out - y)).square().sum(-1).sqrt().mean()  # finite, and its derivative at 0 is not

    def clip_here(step: int, net: nn.Module) -> None:
        if step >= 5 and rank == SECOND:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)

    def load_here(step: int, net: Any) -> None:
        if step == 4 and rank == SECOND:
            with torch.no_grad():
                net[2].bias.view(-1)[0] += 1e-6

    def send(step: int, net: nn.Module) -> None:
        for p in net.parameters():
            dist.broadcast(p.data, FIRST)

    yield "healthy", Loop(rank)
    yield "healthy_bf16", Loop(rank, amp=torch.bfloat16)
    yield "bucket_views", Loop(rank, wrap={"gradient_as_bucket_view": True, "static_graph": True})
    yield "unused", Loop(rank, wrap={"find_unused_parameters": True}, steps=200)
    yield "accumulated", Loop(rank, accumulate=3, steps=200)
    yield "local_steps", Loop(rank, local_steps=True, steps=200)
    yield "stepped_on_one_and_sent", Loop(rank, updates=rank == FIRST, after_update=send)
    yield "same_batches", Loop(FIRST)  # a sampler that is not split
    yield "bad_batch", Loop(rank, spoil=nan_here)
    yield "hidden_batch", Loop(rank, spoil=infinite_here, between=nn.Tanh)
    yield "bad_backward", Loop(rank, loss=root_of_zero)
    yield "bypassed", Loop(rank, forward=lambda wrapped, x: wrapped.module(x))
    yield "clipped_on_one", Loop(rank, before_update=clip_here)
    yield "changed_on_one", Loop(rank, after_update=load_here)
    yield "stepped_on_one", Loop(rank, updates=rank == FIRST)
    yield "first_is_synced", Loop(rank, accumulate=3, first_is_synced=True)
    yield "criterion_outside", Loop(rank, outside=True)


def main(rank: int, world: int, folder: Path) -> dict[str, Any]:
    results = {}
    for name, loop in scenarios(rank):
        alone, asked = collectives_of(lambda loop=loop: loop.run(None))
        loop.norms.clear()
        dist.barrier()
        seen, asked_seen = collectives_of(lambda loop=loop, name=name: loop.run(folder / name))
        results[name] = {"same": alone == seen, "asked": [asked, asked_seen], "norms": loop.norms}
        dist.barrier()
    for name, accumulate in (("healthy", 1), ("accumulated", 3)):
        results[name]["in_one_process"] = in_one_process(world, accumulate)
    return results
