"""Scaled losses that are divided or added up before backward, gradients unscaled twice, gradients that no scale can hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from corpus import Training, healthy, planted
from corpus.draws import noise
from corpus.loops import Run, ends_above, low


def slow(run: Run) -> bool:
    return run.flat


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 3))


def _batch(i: int, key: int = 320) -> tuple[Tensor, Tensor]:
    x = noise(24, 10, key=(key, i))
    return x, torch.tanh(x[:, :3] * 2 + x[:, 3:6])


def scaled_loss_divided_for_accumulation(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """(scaler.scale(loss) / 4).backward(), and clipping before unscale_: the clipped norm is 1/8192 of what was meant."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = GradScaler("cpu", init_scale=8192.0, enabled=dtype == torch.float16)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in range(4):
            x, y = _batch(4 * i + part)
            with low(dtype):
                loss = F.mse_loss(model(x), y)
            (scaler.scale(loss) / 4).backward()
            total += loss.detach() / 4
        if fixed:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return total

    return Training(model, optimizer, step, scaler)


def clipped_before_the_division_by_hand(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The loss times 1,024, gradients clipped to 1 and then divided by 1,024; the twin divides first."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def divide() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(1024.0)

    def step(i: int) -> Tensor:
        x, y = _batch(i)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.mse_loss(model(x), y)
        (1024.0 * loss).backward()
        if fixed:
            divide()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not fixed:
            divide()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def two_scaled_losses_added(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """(scale(a) + scale(b)).backward(), and the optimizer steps by itself on gradients times 2048."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2048.0, enabled=dtype == torch.float16)

    def step(i: int) -> Tensor:
        x, y = _batch(i)
        optimizer.zero_grad()
        with low(dtype):
            out = model(x)
            fit, size = F.mse_loss(out, y), 0.01 * out.float().square().mean()
        (scaler.scale(fit) + scaler.scale(size)).backward()
        if fixed:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        return (fit + size).detach()

    return Training(model, optimizer, step, scaler)


def divided_by_hand_and_by_the_scaler(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The gradients are divided by get_scale() before clipping, and scaler.step() divides them once more."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)

    def step(i: int) -> Tensor:
        x, y = _batch(i)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if fixed:
            scaler.unscale_(optimizer)
        else:
            for p in model.parameters():
                p.grad.div_(scaler.get_scale())
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


def unscaled_by_both(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """unscale_() for the log, and a foreach division by the scale behind it, left from an older loop."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = GradScaler("cpu", init_scale=4096.0, enabled=dtype == torch.float16)

    def step(i: int) -> Tensor:
        x, y = _batch(i)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if not fixed:
            torch._foreach_mul_([p.grad for p in model.parameters()], 1.0 / scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


def averaged_over_parts_by_hand(dtype: torch.dtype = torch.float16) -> Training:
    """Gradients of four parts are divided by 4 after they were added up, before the scaler: nothing is divided twice."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10**6, enabled=dtype == torch.float16)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in range(4):
            x, y = _batch(4 * i + part)
            with low(dtype):
                loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            total += loss.detach() / 4
        for p in model.parameters():
            p.grad.div_(4)
        scaler.step(optimizer)
        scaler.update()
        return total

    return Training(model, optimizer, step, scaler)


def loss_summed_over_all_pixels(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """A squared error summed over 4096 pixels of a value range of 200: its gradient is beyond 65,504 at every scale."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = GradScaler("cpu", init_scale=64.0, enabled=dtype == torch.float16)

    def step(i: int) -> Tensor:
        x = noise(4, 1, 16, 16, key=(330, i))
        y = 400 * F.avg_pool2d(x, 3, 1, 1)
        optimizer.zero_grad()
        with low(dtype):
            out = model(x)
            loss = F.mse_loss(out.float(), y, reduction="mean" if fixed else "sum") * (1 if fixed else 900)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


PROGRAMS = [
    *planted(scaled_loss_divided_for_accumulation, "clip_before_unscale", "loop:clip", shows=ends_above(0.5), steps=30),
    *planted(clipped_before_the_division_by_hand, "clip_before_unscale", "loop:clip", shows=ends_above(0.5), steps=30),
    *planted(two_scaled_losses_added, "step_on_scaled_gradients", "loop:step", steps=20),
    *planted(divided_by_hand_and_by_the_scaler, "unscaled_twice", "loop:unscale", shows=slow, steps=30),
    *planted(unscaled_by_both, "unscaled_twice", "loop:unscale", shows=slow, steps=30),
    *healthy(averaged_over_parts_by_hand, tools="diagnose monitor", survives=None, steps=30),
    *planted(loss_summed_over_all_pixels, "activation_overflow_fp16", "op:to", "op:mul", "2", "0", steps=20),
]
