"""Weights that no rank holds alone: FSDP2, tensor parallel, pipeline stages; each watched, examined and not watched at all."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from nanny import MixedPrecisionNanny

from ..job import collectives_of

STEPS = 6
LONG = 200


class Net(nn.Module):
    """5 rows for 2 ranks are shared unevenly, 1 row leaves a rank with none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.odd, self.down = nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.odd(F.gelu(self.up(x)))))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def digest(net: nn.Module) -> str:
    return hashlib.sha256(b"".join(local(p.detach()).float().numpy().tobytes() for p in net.parameters())).hexdigest()


def loop(
    net: nn.Module,
    rank: int,
    output: Path | None,
    accumulate: int = 1,
    same_data: bool = False,
    steps: int = STEPS,
    interval: int = 2,
    part_of: Callable[[Tensor], Tensor] = lambda x: x,
    clip: float | None = None,
    **options: Any,
) -> list[float]:
    """The norm of all gradients at each step, by torch's own collective."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    watch = None
    if output is not None:
        watch = MixedPrecisionNanny(net, optimizer, trace_interval=interval, output_dir=output, strict=True, **options)
    norms = []
    for step in range(steps):
        with contextlib.nullcontext() if watch is None else watch.step(step):
            for part in range(accumulate):
                if hasattr(net, "set_requires_gradient_sync"):
                    net.set_requires_gradient_sync(part + 1 == accumulate)
                x = batch(0 if same_data else rank, step * accumulate + part)
                (net(part_of(x)).float() - x[:, :1].tanh()).square().mean().backward()
            gradients = [p.grad for p in net.parameters()]
            norm = torch.nn.utils.get_total_norm(gradients) if clip is None else nn.utils.clip_grad_norm_(net.parameters(), clip)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return norms


def single(make: Callable[[], nn.Module], accumulate: int = 1, ranks: int = 2) -> list[float]:
    """The same training in one process, which has the batches of all ranks."""
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    norms = []
    for step in range(STEPS):
        for part in range(accumulate):
            for rank in range(ranks):
                x = batch(rank, step * accumulate + part)
                ((net(x) - x[:, :1].tanh()).square().mean() / ranks).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def fsdp(rank: int, output: Path | None, policy: Any = None, offload: bool = False, **how: Any) -> tuple[str, list[float]]:
    net = Net()
    with_it: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
    with_it |= {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    for layer in (net.up, net.odd):
        fully_shard(layer, **with_it)
    fully_shard(net, **with_it)
    return _result(net, loop(net, rank, output, **how))


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def tensor_parallel(rank: int, output: Path | None, **how: Any) -> tuple[str, list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = two_layers()
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _result(net, loop(net, rank, output, same_data=True, **how))


def with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def sequence_parallel(rank: int, output: Path | None, **how: Any) -> tuple[str, list[float]]:
    """Each rank has half of the rows in the norm, and half of the columns behind it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = with_norm()
    plan = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0)), "3": RowwiseParallel()}
    parallelize_module(net, mesh, plan)
    return _result(net, loop(net, rank, output, same_data=True, part_of=lambda x: x.chunk(2)[rank], **how))


def pipeline(rank: int, output: Path | None, steps: int = STEPS, interval: int = 2, **how: Any) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Sequential(nn.Linear(16, 1))]
    net = parts[rank]
    stage = PipelineStage(net, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, y: (out - y).square().mean())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    watch = (
        None
        if output is None
        else MixedPrecisionNanny(net, optimizer, trace_interval=interval, output_dir=output, strict=True, **how)
    )
    norms = []
    for step in range(steps):
        with contextlib.nullcontext() if watch is None else watch.step(step):
            x = batch(0, step)
            schedule.step(*((x,) if rank == 0 else ()), **({} if rank == 0 else {"target": x[:, :1].tanh()}))
            whole = torch.tensor([sum(float(p.grad.double().square().sum()) for p in net.parameters() if p.grad is not None)])
            dist.all_reduce(whole)
            norms.append(math.sqrt(float(whole)))
            optimizer.step()
            optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return _result(net, norms)


def pipeline_on_nan(rank: int, output: Path | None, **how: Any) -> tuple[str, list[float]]:
    """Memory that nobody has written holds NaN: a pipeline tries its shapes on such memory, and that is no batch."""
    torch.use_deterministic_algorithms(True)
    try:
        return pipeline(rank, output, **how)
    finally:
        torch.use_deterministic_algorithms(False)


def _result(net: nn.Module, norms: list[float]) -> tuple[str, list[float]]:
    return digest(net), norms


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, Callable[..., tuple[str, list[float]]]] = {
    "fsdp": fsdp,
    "fsdp_bf16": lambda rank, output, **how: fsdp(rank, output, policy=LOW, **how),
    "fsdp_accumulated": lambda rank, output, **how: fsdp(rank, output, accumulate=3, **how),
    "fsdp_offloaded": lambda rank, output, **how: fsdp(rank, output, offload=True, **how),
    "tensor_parallel": tensor_parallel,
    "sequence_parallel": sequence_parallel,
    "sequence_parallel_clipped": lambda rank, output, **how: sequence_parallel(rank, output, clip=0.05, **how),
    "pipeline": pipeline,
    "pipeline_on_nan": pipeline_on_nan,
}
ALONE: dict[str, Callable[[], list[float]]] = {  # in one process; bf16 rounds otherwise
    "fsdp": lambda: single(Net),
    "fsdp_accumulated": lambda: single(Net, accumulate=3),
    "fsdp_offloaded": lambda: single(Net),
    "tensor_parallel": lambda: single(two_layers, ranks=1),
    "sequence_parallel": lambda: single(with_norm, ranks=1),
    "pipeline": lambda: single(two_layers, ranks=1),
}


def main(rank: int, world: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        (alone, norms), asked = collectives_of(lambda case=case: case(rank, None))
        dist.barrier()
        (seen, _), asked_seen = collectives_of(lambda case=case, at=folder / name: case(rank, at))
        dist.barrier()
        where = folder / f"{name}_examined"
        (examined, _), asked_examined = collectives_of(lambda case=case, at=where: case(rank, at, examine="every"))
        dist.barrier()
        results[name] = {"same": alone == seen, "same_examined": alone == examined, "norms": norms}
        results[name]["asked"] = [asked, asked_seen, asked_examined]
        results[name]["in_one_process"] = ALONE[name]() if name in ALONE else None
        if name in ("fsdp_bf16", "fsdp_accumulated", "pipeline"):
            case(rank, folder / f"{name}_long", steps=LONG, interval=50)
            dist.barrier()
    return results
