"""What watching costs: a step of the 7M GPT under the monitor against the same step of a plain copy, interleaved; and what it
costs where steps are short: a toy, and a model of 2,002 modules, by the time of the processor.

Peers (peers.py) run in the same rounds where they are installed (`pip install transformers wandb`).
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from nanny import MixedPrecisionNanny

from .gpt import Training, watched
from .peers import PEERS, installed, peer_step
from .timing import Ratio, note, ratio

REPEATS = 15


@contextmanager
def nanny_step(interval: int, examine: str = "off") -> Iterator[Callable[[], None]]:
    with tempfile.TemporaryDirectory() as folder, watched(Training(), folder, interval, examine) as step:
        yield step


def measured(name: str, make: Callable[[], object], bar: float | None = None, peer: bool = False) -> Ratio:
    plain = Training()
    with make() as step:  # type: ignore[attr-defined]
        result = ratio(step, plain.step, REPEATS)
    note(f"{name}, 7M GPT in FP32", result.median, bar=bar, control=result.control, peer=peer)
    print(f"  {name:42} {result}" + (f"  bar {bar}" if bar else ""))
    return result


@dataclass(frozen=True)
class Short:
    """A model whose steps are short, in three copies: watched, plain and plain."""

    layers: tuple[nn.Module, ...]
    x: torch.Tensor

    def training(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*copy.deepcopy(self.layers))
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(self.x).square().mean().backward()
        optimizer.step()


def cpu_seconds(work: Callable[[], None], times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) / times


def short_steps(
    name: str,
    short: Short,
    rounds: int,
    block: int,
    interval: int = 100,
    warm: int = 0,
    bar: Callable[[float], float] | None = None,
) -> None:
    """Blocks of watched and plain steps in turn, with the default settings; the writer's thread counts."""
    seen, first, second = short.training(), short.training(), short.training()
    with tempfile.TemporaryDirectory() as folder:
        nanny = MixedPrecisionNanny(*seen, output_dir=folder, live=False, strict=True, trace_interval=interval)
        count = itertools.count()

        def step() -> None:
            with nanny.step(next(count)):
                short.step(*seen)

        for _ in range(warm):
            step()
        spent = [
            [cpu_seconds(work, block) for work in (partial(short.step, *first), step, partial(short.step, *second))]
            for _ in range(rounds)
        ]
        nanny.close()
    a, ours, b = (sum(column) / rounds for column in zip(*spent))
    extra = sorted(w - (x + y) / 2 for x, w, y in spent)[rounds // 2]
    print(
        f"  {name:42} {ours * 1e3:.2f} ms against {(a + b) / 2 * 1e3:.2f} ms: {2 * ours / (a + b):.2f} times "
        f"(A/A control {a / b:.2f}), median {extra * 1e3:.2f} ms more"
    )
    plain = (a + b) / 2
    if bar is None:
        note(name, ours / plain, bar=1.3, control=a / b)
    else:
        note(f"{name}, more than a plain step of {plain * 1e3:.2f} ms", extra * 1e3, "ms", bar(plain) * 1e3, a / b)


def loop_rules(name: str, short: Short, steps: int) -> None:
    """What the looks behind the rules of a loop take of an untraced step, behind the first 64: their calls, timed one by one."""
    model, optimizer = short.training()
    nanny = MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True, trace_interval=10**9)
    looks, spent = nanny._recorder.invariants, 0

    def timed(work: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            nonlocal spent
            start = time.thread_time_ns()
            try:
                return work(*args)
            finally:
                spent += time.thread_time_ns() - start

        return call

    for call in ("begin", "before_backward", "before_step", "before_update", "after_step", "cleared", "finish"):
        setattr(looks, call, timed(getattr(looks, call)))
    for i in range(100 + steps):
        if i == 100:
            spent, start = 0, time.process_time_ns()
        with nanny.step(i):
            short.step(model, optimizer)
    whole = time.process_time_ns() - start
    nanny.close()
    print(f"  {name:42} {spent / steps / 1e3:.1f} us of {whole / steps / 1e3:.0f} us: {spent / whole:.1%}")
    note(name, spent / steps / 1e3, "us")


def short_models() -> None:
    toy = Short((nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(32, 32))
    deep = Short(tuple(part() for _ in range(1000) for part in (partial(nn.Linear, 8, 8), nn.ReLU)), torch.randn(4, 8))
    short_steps("toy, untraced (bar 0.3 ms + 1 %)", toy, 60, 20, interval=10**9, warm=200, bar=lambda plain: 3e-4 + plain / 100)
    loop_rules("rules of the loop, toy, untraced", toy, 400)
    loop_rules("rules of the loop, 2,002 modules, untraced", deep, 20)
    short_steps("2,002 modules, first 150 steps (bar 1.3)", deep, 150, 1)
    short_steps("2,002 modules, traced (bar 5 us a module)", deep, 10, 1, interval=1, warm=5, bar=lambda plain: 2002 * 5e-6)


def main() -> None:
    parameters = sum(p.numel() for p in Training().model.parameters())
    print(f"  GPT with {parameters / 1e6:.1f}M parameters, FP32, {torch.get_num_threads()} threads, {REPEATS} rounds")
    untraced = measured("nanny, untraced step", lambda: nanny_step(10**9), 1.01)
    traced = measured("nanny, traced step", lambda: nanny_step(1), 1.10)
    amortised = (99 * untraced.median + traced.median) / 100
    print(f"  {'nanny, amortised at interval 100':42} {amortised:.3f} times  bar 1.02")
    measured("nanny, examined step (1 % of the time)", lambda: nanny_step(10**9, "every"))
    short_models()
    for name, peer in PEERS.items():
        if installed(peer):
            measured(name, partial(peer_step, name), peer=True)
        else:
            print(f"  {name:42} not installed")
