"""The loops that most users write, what a training did, and the harm that a look at its loss curve shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from corpus import BF16, FP16, FP32, Example, Training
from corpus.draws import laid_out

Batch = Sequence[Tensor]


def low(dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to `dtype`; none for float32."""
    return torch.autocast("cpu", dtype=BF16 if dtype in (None, FP32) else dtype, enabled=dtype not in (None, FP32))


def usual(
    model: nn.Module,
    optimizer: Any,
    data: Callable[[int], Iterable[Tensor]],
    loss_of: Callable[..., Tensor],
    dtype: torch.dtype | None,
    *,
    scaler: GradScaler | None = None,
    clip: float | None = None,
    after: Callable[[], None] | None = None,
) -> Training:
    """The AMP loop of the PyTorch documentation: autocast around forward and loss, a scaler for fp16, clipping in its place."""
    scaler = scaler or GradScaler("cpu", enabled=dtype == FP16)

    def step(i: int) -> Tensor:
        batch = [laid_out(part) for part in data(i)]
        optimizer.zero_grad()
        with low(dtype):
            loss = loss_of(*batch)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        if after is not None:
            after()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


def supervised(
    model: nn.Module,
    optimizer: Any,
    batch: Callable[[int], Batch],
    criterion: Callable[..., Tensor],
    dtype: torch.dtype,
    scaler: GradScaler | None = None,
    clip: float | None = None,
) -> Training:
    """`criterion(model(*inputs), target)` under autocast, with a scaler only if there is one; a batch ends with its target."""

    def loss_of(*tensors: Tensor) -> Tensor:
        *inputs, target = tensors
        return criterion(model(*inputs), target)

    if scaler is not None:
        return usual(model, optimizer, batch, loss_of, dtype, scaler=scaler, clip=clip)

    def step(i: int) -> Tensor:
        tensors = [laid_out(part) for part in batch(i)]
        optimizer.zero_grad(set_to_none=True)
        with low(dtype):
            loss = loss_of(*tensors)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def repeated(
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    dtype: torch.dtype | None = BF16,
    optimizer: Callable[[Any], Any] | None = None,
    scaled: bool | None = None,
    after: Callable[[], None] | None = None,
) -> Training:
    """The same batch at every step; a GradScaler where the type is fp16."""
    chosen = (optimizer or (lambda p: torch.optim.SGD(p, lr=1e-3)))(model.parameters())
    scaled = dtype == FP16 if scaled is None else scaled
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    training = usual(model, chosen, lambda i: (), loss_of, dtype, scaler=scaler, after=after)
    return training if scaled else Training(model, chosen, training.step)


def network(model: nn.Module, inputs: Any, loss: Callable[..., Tensor] | None, target: Any, dtype: torch.dtype) -> Training:
    """A model with one batch and its loss, which can be trained as well as compared with FP32."""
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)

    def loss_of() -> Tensor:
        out = model(*inputs)
        if loss is None:
            return out.float().square().mean()
        return loss(out) if target is None else loss(out, target)

    training = repeated(model, loss_of, dtype, adamw)
    training.example = Example(inputs, loss, target)
    return training


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3)


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


def play(training: Training, steps: int) -> Run:
    """Trains without the nanny."""
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


def ends_above(limit: float) -> Callable[[Run], bool]:
    """The last quarter of the losses is, on average, above `limit` or not finite."""

    def shows(run: Run) -> bool:
        tail = run.losses[-max(1, len(run.losses) // 4) :]
        return not sum(tail) / len(tail) <= limit

    return shows


def named(model: nn.Module, *also: str) -> tuple[str, ...]:
    """All parameters: each is a fair name for what concerns all of them."""
    return (*(name for name, _ in model.named_parameters()), *also)
