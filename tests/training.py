"""Small real trainings under the nanny's eyes, and what they left in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from nanny import Finding, MixedPrecisionNanny, Severity
from nanny.store import reader

Batch = tuple[Tensor, Tensor]

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other, and tests run side by side


class Apply(nn.Module):
    """A function as a module with a name of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class HandedOn(torch.autograd.Function):
    """As DistributedDataParallel hands on what its model returns: what the loss has no part of gets no gradient, not a zero."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def mlp(inputs: int = 8, width: int = 16, outputs: int = 1, *, depth: int = 1, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def regression(inputs: int = 8, outputs: int = 1, *, rows: int = 16, seed: int = 1) -> Callable[[int], Batch]:
    """Batches of a fixed, learnable relation; the global generator is not used."""
    generator = torch.Generator().manual_seed(seed)
    relation = torch.randn(inputs, outputs, generator=generator) / inputs**0.5

    def batch(step: int) -> Batch:
        draw = torch.Generator().manual_seed(seed * 100_003 + step)
        x = torch.randn(rows, inputs, generator=draw)
        return x, torch.tanh(x @ relation)

    return batch


def watch(model: nn.Module, *args: Any, interval: int = 1, output_dir: Path | None = None, **options: Any) -> MixedPrecisionNanny:
    """A nanny that writes nothing unless told where to, stays quiet on stderr, and raises its own mistakes."""
    return MixedPrecisionNanny(
        model, *args, trace_interval=interval, output_dir=output_dir, **{"live": False, "strict": True, **options}
    )


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def train(
    model: nn.Module,
    *,
    batches: Callable[[int], Batch] | None = None,
    criterion: Callable[[Any, Tensor], Tensor] = nn.functional.mse_loss,
    optimizer: Optimizer | None = None,
    lr: float = 0.01,
    amp: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    clip: float | None = None,
    steps: int = 3,
    interval: int = 1,
    output_dir: Path | None = None,
    before_step: Callable[[int], None] | None = None,
) -> list[Finding]:
    """The loop that everybody writes, the optimizer behind the block; returns what was found."""
    batches = batches or regression()
    optimizer = optimizer or SGD(model.parameters(), lr=lr)
    scaler = scaler or GradScaler("cpu", enabled=False)
    nanny = watch(model, optimizer, scaler, interval=interval, output_dir=output_dir)
    for step in range(steps):
        if before_step is not None:
            before_step(step)
        x, y = batches(step)
        optimizer.zero_grad()
        with nanny.step(step):
            with autocast(amp):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    nanny.close()
    return nanny.findings


def above_info(findings: Iterable[Finding]) -> list[str]:
    """Everything that would bother a user, in words, so that a failing test tells what was said."""
    return [
        f"{f.severity.name} {f.code} at {f.site} in step {f.step}: {f.message}" for f in findings if f.severity > Severity.INFO
    ]


def said(findings: Iterable[Finding], code: str) -> list[Finding]:
    return [f for f in findings if f.code == code]


def the(findings: Iterable[Finding], code: str) -> Finding:
    """The one finding of this code."""
    found = said(findings, code)
    assert len(found) == 1, f"{code}: {found or [f.code for f in findings]}"
    return found[0]


def store_of(folder: Path) -> Path:
    return folder / "metrics.db"


def scalar(folder: Path, name: str) -> dict[int, float]:
    """Recorded values of one scalar by step, of the newest run."""
    with reader.reading(store_of(folder)) as db:
        steps, values = reader.scalars(db, reader.pick_run(db, None).id, [name]).get(name, ((), ()))
        return {int(s): float(v) for s, v in zip(steps, values)}


def recorded(folder: Path, kind: str, step: int, statistic: str = "norm") -> dict[str, float]:
    """One statistic of every site of a kind that was measured at a step."""
    with reader.reading(store_of(folder)) as db:
        run = reader.pick_run(db, None).id
        sample = reader.sample_at(db, run, kind, step)
        if sample is None:
            return {}
        names = [site.name for site in reader.sites(db, run, kind)]
        return {n: float(v) for n, v, count in zip(names, sample[statistic], sample["count"]) if count > 0}


def recorded_dtypes(folder: Path, kind: str) -> dict[str, str]:
    with reader.reading(store_of(folder)) as db:
        return {site.name: site.dtype for site in reader.sites(db, reader.pick_run(db, None).id, kind)}


def overflowed(folder: Path, step: int) -> set[str]:
    """Parameters whose recorded gradient was not finite at a step."""
    low, high = recorded(folder, "grad", step, "min"), recorded(folder, "grad", step, "max")
    return {name for name in low if not (abs(low[name]) < float("inf") and abs(high[name]) < float("inf"))}
