"""Five planted faults and their repaired twins: DistributedDataParallel, FSDP2, tensor parallel, a pipeline; watched and not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from nanny import MixedPrecisionNanny

from .sharded import digest

Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self, width: int, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x * self.gain))) / self.gain


class Net(nn.Module):
    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(16), Block(16), Block(16, gain))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


@dataclass
class Case:
    """One loop; `rank` draws its own batches, unless all ranks have parts of one model."""

    cause: str  # of the planted fault
    rank: int
    fixed: bool
    one_model: bool = False
    steps: int = 20

    def run(self, wrap: Wrap, output: Path | None, **options: Any) -> str:
        torch.manual_seed(0)
        fixed, planted = self.fixed, self.cause
        gain = 1e6 if planted == "activation_overflow_fp16" and not fixed else 1.0
        in_bf16 = planted == "update_lost"
        net = Net(gain).to(torch.bfloat16 if in_bf16 and not fixed else torch.float32)
        lr = {"lr_too_high": 0.05 if fixed else 3.0, "update_lost": 1e-5}.get(planted, 0.01)
        model = wrap(net)
        net = model if isinstance(model, Stage) else net
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=lr)
        has_scaler = planted in ("clip_before_unscale", "activation_overflow_fp16")
        scaler = GradScaler("cpu", enabled=has_scaler, init_scale=2.0**10)
        scaler.scale(torch.zeros(()))  # the first stage of a pipeline has no loss to begin it with
        watch = None
        if output is not None:
            watch = MixedPrecisionNanny(model, optimizer, scaler, trace_interval=10, output_dir=output, strict=True, **options)
        low = torch.float16 if has_scaler else torch.bfloat16
        for step in range(self.steps):
            if watch is not None:
                watch.begin_step(step)
            draw = torch.Generator().manual_seed((0 if self.one_model else 1000 * self.rank) + step)
            x = torch.randn(16, 16, generator=draw)
            y = x[:, :4] * 0.5
            if planted == "data_nan" and not fixed and step == 7 and (self.rank == 1 or self.one_model):
                x[3, 5] = float("nan")
            with torch.autocast("cpu", dtype=low):
                if isinstance(model, Stage):
                    model.run(x, y, lambda out, y: scaler.scale(F.mse_loss(out.float(), y)))
                else:
                    loss = F.mse_loss(model(x).float(), y)
            if not isinstance(model, Stage):
                scaler.scale(loss).backward()
            if planted == "clip_before_unscale":
                if fixed:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if watch is not None:
                watch.end_step()
        if watch is not None:
            watch.close()
        return digest(net)


class Stage(nn.Module):
    """Half of the net: this rank's."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.rank = dist.get_rank()
        self.part = nn.Sequential(*(net.blocks[:1] if self.rank == 0 else [*net.blocks[1:], net.head]))
        self.kept: Any = None

    def run(self, x: Tensor, y: Tensor, loss_of: Any) -> None:
        if self.kept is None:
            stage = PipelineStage(self.part, self.rank, dist.get_world_size(), torch.device("cpu"))
            self.kept = ScheduleGPipe(stage, 2, loss_fn=loss_of)
        self.kept.step(*((x,) if self.rank == 0 else ()), **({} if self.rank == 0 else {"target": y}))


CAUSES = ("activation_overflow_fp16", "clip_before_unscale", "update_lost", "lr_too_high", "data_nan")


def sharded(net: Any) -> nn.Module:
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def tensor_parallel(net: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(net, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})  # a GradScaler takes no mixture
    return net


WRAPS: dict[str, Wrap] = {"ddp": DistributedDataParallel, "fsdp": sharded, "tp": tensor_parallel, "pipeline": Stage}


def main(rank: int, world: int, folder: Path, how: str) -> dict[str, bool]:
    results = {}
    for cause in CAUSES:
        for fixed in (False, True):
            case = Case(cause, rank, fixed, one_model=how in ("tp", "pipeline"))
            name = f"{cause}_{'repaired' if fixed else 'planted'}"
            alone = case.run(WRAPS[how], None)
            dist.barrier()
            results[name] = alone == case.run(WRAPS[how], folder / name)
            dist.barrier()
    return results
