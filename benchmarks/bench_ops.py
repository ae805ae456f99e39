"""What watching every operation costs: a step of the 7M GPT under each tool against the same step of a plain copy, interleaved.

Also what one small operation costs under each consumer of the op stream, that losses stay bit-identical, and that memory stays
flat over 500 steps of a small model.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn

from nanny import CompareWithCPU, NanInfTracker
from nanny.watch.op_stream import watching
from nanny.watch.snapshot import KeptState
from nanny.watch.twins import Twins

from .gpt import Training
from .timing import note, ratio

REPEATS = 11
BARS = {"NanInfTracker": 1.25, "CompareWithCPU": 3.0}
LIMITS = {"NanInfTracker": 1.10, "CompareWithCPU": 2.0}  # wanted; the bars above must hold
TOOLS: dict[str, Callable[[], Any]] = {
    "NanInfTracker": lambda: NanInfTracker(strict=True),
    "CompareWithCPU": lambda: CompareWithCPU(strict=True),
}
MOST_GROWTH = 20 << 20  # bytes over 400 steps


@contextmanager
def watched(name: str) -> Iterator[tuple[Any, Callable[[], None]]]:
    training = Training()
    with contextlib.redirect_stderr(io.StringIO()), TOOLS[name]() as tool:

        def step() -> None:
            training.step()
            tool.step()

        yield tool, step


def cost(name: str) -> bool:
    plain = Training()
    with watched(name) as (tool, step):
        result = ratio(step, plain.step, REPEATS)
    note(f"{name}, 7M GPT in FP32", result.median, bar=LIMITS[name], control=result.control)
    print(f"  {name:16} {result}  {result.verdict(BARS[name])}")
    if tool.faults:
        print(f"  {name}: unexpected faults: {sorted({f.op for f in tool.faults})}")
    return result.meets(BARS[name]) and not tool.faults


def small_operations() -> None:
    """10,000 operations that compute next to nothing; twins carry bf16, the others see fp32."""
    consumers: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
        "write guard": (lambda: watching(KeptState(nn.Linear(1, 1))), torch.float32),
        "NanInfTracker": (TOOLS["NanInfTracker"], torch.float32),
        "CompareWithCPU": (TOOLS["CompareWithCPU"], torch.float32),
        "twins, idle": (Twins, torch.float32),
        "twins": (Twins, torch.bfloat16),
    }

    def work(x: torch.Tensor) -> None:
        z = x
        for _ in range(2500):
            z = z + x
            z = z * 0.5
            z.view(64)
            z.add_(0.1)

    for name, (open_tool, dtype) in consumers.items():
        x = torch.randn(8, 8, dtype=dtype)

        def watch(open_tool: Callable[[], Any] = open_tool, x: torch.Tensor = x) -> None:
            with contextlib.redirect_stderr(io.StringIO()), open_tool():
                work(x)

        result = ratio(watch, lambda x=x: work(x), 5)
        print(f"  {name:16} {result.a_seconds * 100:.1f} us per small operation, plain {result.b_seconds * 100:.1f}")


def identical(name: str, steps: int = 2) -> bool:
    torch.manual_seed(1)
    plain = Training()
    expected = [plain.forward_backward().item() for _ in range(steps)]
    torch.manual_seed(1)
    training = Training()
    with contextlib.redirect_stderr(io.StringIO()), TOOLS[name]():
        losses = [training.forward_backward().item() for _ in range(steps)]
    same = losses == expected and all(
        torch.equal(a.grad, b.grad) for a, b in zip(plain.model.parameters(), training.model.parameters()) if a.grad is not None
    )
    print(f"  {name:16} losses and gradients of {steps} steps: {'bit-identical' if same else 'DIFFERENT'}")
    return same


def growth(name: str, steps: int = 500) -> bool:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    process, sizes = psutil.Process(), []
    with contextlib.redirect_stderr(io.StringIO()), TOOLS[name]() as tool:
        for i in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            tool.step()
            if i in (steps // 5, steps - 1):
                sizes.append(process.memory_info().rss)
    grown = sizes[1] - sizes[0]
    print(f"  {name:16} memory over the last {steps - steps // 5} of {steps} steps: {grown / 1e6:+.1f} MB")
    return grown <= MOST_GROWTH


def main() -> int:
    print(f"  GPT with 6.9M parameters, FP32, {torch.get_num_threads()} threads, {REPEATS} rounds")
    small_operations()
    good = [check(name) for name in TOOLS for check in (cost, identical, growth)]
    return 0 if all(good) else 1
