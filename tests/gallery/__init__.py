"""Small real trainings: each with one planted cause and a repaired twin, and healthy ones that look suspicious.

A module of this folder has `CASES`. A case says what a fair judge would answer; `play` trains it without the nanny, so that
tests can check that the fault does what it claims; `diagnosed` trains it under the nanny's eyes and asks for the causes.

A builder is the program of a user: `build(fixed=False, dtype=torch.float16)`; with `dtype=torch.float32` it is the same program
without low precision (`low(dtype)` is its autocast), which tells whether precision is to blame.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

if TYPE_CHECKING:
    from nanny.diagnose.records import Diagnosis

torch.set_num_threads(1)  # tiny tensors; and some kernels' results depend on the number of threads


@dataclass
class Training:
    model: nn.Module
    optimizer: Any  # or a list of them
    step: Callable[[int], Any]  # one whole step: forward, backward, clipping, optimizer, scaler, averages; returns the loss
    scaler: GradScaler | None = None


@dataclass(frozen=True)
class Run:
    """What a training did, without the nanny."""

    training: Training
    losses: tuple[float, ...]
    skipped: tuple[bool, ...]  # the loss scale fell: the optimizer did not step
    still: frozenset[str]  # parameters that are bit-identical since the middle of the run

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.losses))

    @property
    def weights_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.training.model.parameters())

    @property
    def buffers_finite(self) -> bool:
        return all(bool(b.isfinite().all()) for b in self.training.model.buffers() if b.is_floating_point())

    @property
    def stuck(self) -> bool:
        """Nothing was learnt in the second half, in which every step was skipped."""
        return all(self.skipped[len(self.skipped) // 2 :])

    @property
    def all_still(self) -> bool:
        return self.still == {name for name, p in self.training.model.named_parameters() if p.requires_grad}

    @property
    def flat(self) -> bool:
        """The loss is finite and ends within 5 % of where it began, or above."""
        quarter = max(1, len(self.losses) // 4)
        return self.finite and sum(self.losses[-quarter:]) > 0.95 * sum(self.losses[:quarter])

    @property
    def learned(self) -> bool:
        """The loss is finite and ends below where it began (means of a quarter of the run)."""
        quarter = max(1, len(self.losses) // 4)
        return self.finite and sum(self.losses[-quarter:]) < sum(self.losses[:quarter])


@dataclass(frozen=True)
class Case:
    name: str
    cause: str  # "" is healthy
    culprits: tuple[str, ...]  # every name that a fair judge would accept
    precision_caused: bool | None
    build: Callable[[], Training]
    steps: int = 20
    shows: Callable[[Run], bool] | None = field(default=None, compare=False)  # the harm, seen without the nanny
    fp32: Callable[[], Training] | None = field(default=None, compare=False)  # the same program without low precision

    def __str__(self) -> str:
        return self.name


def planted(
    build: Callable[..., Training],
    cause: str,
    *culprits: str,
    shows: Callable[[Run], bool],
    steps: int = 20,
    precision_caused: bool | None = True,
) -> list[Case]:
    """A case and its repaired twin; they are named after the builder."""
    name = build.__name__
    fp32 = partial(build, dtype=torch.float32)
    return [
        Case(name, cause, culprits, precision_caused, build, steps, shows, fp32),
        Case(f"{name}_fixed", "", (), None, partial(build, fixed=True), steps, lambda run: run.learned),
    ]


def healthy(
    build: Callable[..., Training], steps: int = 20, shows: Callable[[Run], bool] = lambda run: run.learned
) -> list[Case]:
    return [Case(build.__name__, "", (), None, build, steps, shows)]


def low(dtype: torch.dtype) -> torch.autocast:
    """Autocast to `dtype`; none for float32."""
    return torch.autocast("cpu", dtype=torch.bfloat16 if dtype == torch.float32 else dtype, enabled=dtype != torch.float32)


def generator(*key: int) -> torch.Generator:
    """Data of its own, apart from torch's global generator."""
    return torch.Generator().manual_seed(hash(key) % 2**31)


def noise(*shape: int, key: tuple[int, ...]) -> Tensor:
    return torch.randn(*shape, generator=generator(*key))


def all_cases() -> list[Case]:
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return [case for module in modules for case in getattr(module, "CASES", ())]


def play(build: Callable[[], Training], steps: int) -> Run:
    """Trains without the nanny."""
    torch.manual_seed(0)
    training = build()
    losses, skipped, middle = [], [], {}
    for i in range(steps):
        if i == steps // 2:
            middle = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        scale = training.scaler.get_scale() if training.scaler is not None else 1.0
        losses.append(_number(training.step(i)))
        skipped.append(training.scaler is not None and training.scaler.get_scale() < scale)
    trained = {name: p for name, p in training.model.named_parameters() if p.requires_grad}
    still = {name for name, p in trained.items() if torch.equal(p.nan_to_num(), middle[name].nan_to_num())}
    return Run(training, tuple(losses), tuple(skipped), frozenset(still))


def _number(loss: Any) -> float:
    return float(loss.detach()) if isinstance(loss, Tensor) else float(loss)


def diagnosed(case: Case) -> list[Diagnosis]:
    """Trains under the nanny's eyes, as a user would, and asks what is wrong."""
    from nanny.diagnose.run import diagnose
    from nanny.monitor.watch import MixedPrecisionNanny

    torch.manual_seed(0)
    training = case.build()
    with MixedPrecisionNanny(training.model, training.optimizer, training.scaler, output_dir=None, live=False) as nanny:
        for i in range(case.steps):
            with nanny.step(i):
                training.step(i)
    return diagnose(nanny)
