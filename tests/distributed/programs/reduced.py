"""Ranks whose gradients nearly cancel, each with data of its own kind; added in 16 bits, or in FP32; and ranks that agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nanny import MixedPrecisionNanny

from .sharded import digest

STEPS = 9
APART = 3e4  # targets of the two kinds of data, beside inputs of size 1


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 3))


def bf16_hook(state, bucket):  # torch refuses annotations that are text
    """As torch's `bf16_compress_hook`, which refuses to run on a CPU."""
    low = bucket.buffer().bfloat16().div_(dist.get_world_size())
    sent = dist.all_reduce(low, async_op=True).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def ddp(hook: Any = None) -> Callable[[nn.Module], nn.Module]:
    def wrap(net: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(net)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        return wrapped

    return wrap


def fsdp(**policy: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(net: Any) -> nn.Module:
        for layer in (net[0], net[2]):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(**policy))
        return fully_shard(net, mp_policy=MixedPrecisionPolicy(**policy))

    return wrap


def batch(rank: int, step: int, apart: float) -> tuple[Tensor, Tensor]:
    """With `apart` the same inputs on both ranks, and targets on both sides of what is to be learned: gradients nearly cancel."""
    draw = torch.Generator().manual_seed(step if apart else 1000 * rank + step)
    x = torch.randn(16, 8, generator=draw)
    x = x.roll(1, 0) if apart and rank else x  # in another order: not the same batch
    return x, torch.tanh(x[:, :3]) + apart * (1 if rank else -1)


def train(rank: int, wrap: Callable[[nn.Module], nn.Module], apart: float, output: Path | None, accumulate: int = 1) -> str:
    net = model()
    wrapped = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    watch = None
    if output is not None:
        watch = MixedPrecisionNanny(wrapped, optimizer, trace_interval=2, output_dir=output, strict=True)
    for step in range(STEPS):
        with contextlib.nullcontext() if watch is None else watch.step(step):
            for part in range(accumulate):
                last = part + 1 == accumulate
                if hasattr(wrapped, "set_requires_gradient_sync"):
                    wrapped.set_requires_gradient_sync(last)
                apply = contextlib.nullcontext() if last or not hasattr(wrapped, "no_sync") else wrapped.no_sync()
                with apply:
                    x, y = batch(rank, accumulate * step + part, apart)
                    (wrapped(x).float() - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return digest(net)


BF16 = torch.bfloat16
CASES: dict[str, tuple[Callable[[nn.Module], nn.Module], float, int, bool]] = {  # wrapper, apart, micro-batches, is it bad
    "ddp_bf16_hook": (ddp(bf16_hook), APART, 1, True),
    "ddp_bf16_hook_accumulated": (ddp(bf16_hook), APART, 3, True),
    "ddp_fp16_hook": (ddp(fp16_compress_hook), APART / 30, 1, True),
    "ddp_fp32": (ddp(), APART, 1, False),
    "ddp_fp32_accumulated": (ddp(), APART, 3, False),
    "ddp_bf16_hook_alike": (ddp(bf16_hook), 0.0, 1, False),
    "fsdp_bf16": (fsdp(reduce_dtype=BF16), APART, 1, True),
    "fsdp_fp32": (fsdp(reduce_dtype=torch.float32), APART, 1, False),
    "fsdp_bf16_alike": (fsdp(reduce_dtype=BF16), 0.0, 1, False),
    "fsdp_all_bf16_alike": (fsdp(param_dtype=BF16), 0.0, 1, False),
    "fsdp_bf16_accumulated": (fsdp(reduce_dtype=BF16), 0.0, 3, False),
}


def main(rank: int, world: int, folder: Path) -> dict[str, Any]:
    results = {}
    for name, (wrap, apart, accumulate, _) in CASES.items():
        alone = train(rank, wrap, apart, None, accumulate)
        dist.barrier()
        results[name] = alone == train(rank, wrap, apart, folder / name, accumulate)
        dist.barrier()
    return results
