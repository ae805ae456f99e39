"""What watching costs where people train: a step of the 7M GPT with DDP in two processes, and compiled, against the same plain.

Compiled is each block, all eight by one graph, as large models are; and the whole of a model of two blocks. Eight blocks in one
graph give the C++ compiler more to do, and were not seen to end on two busy cores.

By the clock, interleaved, with an A/A control; and by the time of the processor (the least of many), for machines that are not
quiet.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .gpt import LAYERS, Training, watched
from .timing import ratio

REPEATS = 15
BAR = 1.02
WORLD = 2


def least_cpu_seconds(works: list[Callable[[], None]], rounds: int) -> list[float]:
    least = [float("inf")] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            start = time.process_time()
            work()
            least[i] = min(least[i], time.process_time() - start)
    return least


def compare(name: str, make: Callable[[nn.Module], nn.Module], says: bool = True, blocks: int = LAYERS) -> None:
    plain, again, seen = (Training(blocks) for _ in range(3))
    for training in (plain, again, seen):
        training.model = make(training.model)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder, watched(seen, folder) as step:
        by_clock = ratio(step, plain.step, REPEATS)
        ours, first, second = least_cpu_seconds([step, plain.step, again.step], REPEATS)
    if says:
        print(f"  {name:42} {by_clock}  {by_clock.verdict(BAR)}")
        cpu = f"{ours / min(first, second):.3f} times, A/A control {first / second:.3f}"
        print(f"  {'':42} processor: {cpu} ({ours * 1e3:.1f} ms)", flush=True)


def compile_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile()
    return model


def _rank(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    compare("DDP, 2 processes, untraced step", DistributedDataParallel, says=rank == 0)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (str(Path(folder) / "meeting"),), nprocs=WORLD)
    torch.set_num_threads(1)
    compare("torch.compile of each block, untraced step", compile_blocks)
    compare("torch.compile of two blocks, untraced step", torch.compile, blocks=2)
