"""What watching costs: a step of the 7M GPT under the monitor against the same step of a plain copy, interleaved.

Peers run in the same rounds where they are installed (`pip install transformers wandb`).
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nanny import MixedPrecisionNanny

from .gpt import Training
from .timing import Ratio, ratio

REPEATS = 15


@contextmanager
def nanny_step(interval: int, examine: str = "off") -> Iterator[Callable[[], None]]:
    """A training step under the monitor that traces every `interval` steps, records on disk, and judges."""
    training, count = Training(), 0
    with tempfile.TemporaryDirectory() as folder:
        nanny = MixedPrecisionNanny(
            training.model,
            training.optimizer,
            trace_interval=interval,
            output_dir=folder,
            examine=examine,
            live=False,
            strict=True,
        )

        def step() -> None:
            nonlocal count
            with nanny.step(count):
                training.forward_backward()
            training.optimizer.step()
            count += 1

        step()  # the first step is always traced
        yield step
        nanny.close()
        if nanny.findings:
            print(f"  unexpected findings: {[f.code for f in nanny.findings]}")


@contextmanager
def naive_step() -> Iterator[Callable[[], None]]:
    """What people write by hand: the norm of every gradient, one `.item()` each."""
    training = Training()

    def step() -> None:
        training.forward_backward()
        _ = sum(p.grad.norm().item() ** 2 for p in training.model.parameters() if p.grad is not None) ** 0.5
        training.optimizer.step()

    yield step


@contextmanager
def anomaly_step() -> Iterator[Callable[[], None]]:
    training = Training()

    def step() -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            training.step()

    yield step


@contextmanager
def transformers_step() -> Iterator[Callable[[], None]]:
    from transformers.debug_utils import DebugUnderflowOverflow

    training = Training()
    DebugUnderflowOverflow(training.model)
    yield training.step


@contextmanager
def wandb_step() -> Iterator[Callable[[], None]]:
    import wandb

    training = Training()
    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
        run.watch(training.model, log="all", log_freq=1)

        def step() -> None:
            training.step()
            run.log({"step": 1})

        yield step
        run.finish()


PEERS = {
    "naive loop, norm().item() per parameter": (naive_step, None),
    "torch.autograd.detect_anomaly": (anomaly_step, None),
    "transformers DebugUnderflowOverflow": (transformers_step, "transformers"),
    "wandb.watch, every step": (wandb_step, "wandb"),
}


def measured(name: str, make: Callable[[], object], bar: float | None = None) -> Ratio:
    plain = Training()
    with make() as step:  # type: ignore[attr-defined]
        result = ratio(step, plain.step, REPEATS)
    print(f"  {name:42} {result}" + (f"  bar {bar}" if bar else ""))
    return result


def main() -> None:
    parameters = sum(p.numel() for p in Training().model.parameters())
    print(f"  GPT with {parameters / 1e6:.1f}M parameters, FP32, {torch.get_num_threads()} threads, {REPEATS} rounds")
    untraced = measured("nanny, untraced step", lambda: nanny_step(10**9), 1.02)
    traced = measured("nanny, traced step", lambda: nanny_step(1), 1.20)
    amortised = (99 * untraced.median + traced.median) / 100
    print(f"  {'nanny, amortised at interval 100':42} {amortised:.3f} times  bar 1.02")
    measured("nanny, examined step (1 % of the time)", lambda: nanny_step(10**9, "every"))
    for name, (make, needs) in PEERS.items():
        if needs is None or importlib.util.find_spec(needs) is not None:
            measured(name, make)
        else:
            print(f"  {name:42} not installed (pip install transformers wandb)")
