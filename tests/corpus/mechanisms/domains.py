"""Operations outside their domain, or beyond every range, where precision is innocent; and the first of several overflows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from corpus import FP32, Training, planted
from corpus.draws import noise
from corpus.loops import Run, ends_above, low, usual


def broken(run: Run) -> bool:
    return not run.finite


class Head(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x).float())


def _training(last: Callable[[Tensor], Tensor], dtype: torch.dtype, key: int, shift: float = 0.0) -> Training:
    model = Head(last)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.no_grad():
        model.body[2].bias.add_(shift)

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(16, 6, key=(key,))
        return x, x[:, :2]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y)

    return usual(model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", enabled=False))


def root_of_a_negative(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    return _training(lambda h: (h.square() if fixed else h).add(0.5).sqrt(), dtype, 400, 0.3)


def logarithm_of_a_negative(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    return _training(lambda h: (F.softplus(h) if fixed else h).log(), dtype, 401, 0.05)


def nothing_by_nothing(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    """A share of what is above a threshold, where nothing is."""

    def last(h: Tensor) -> Tensor:
        above = F.relu(h + (0.2 if fixed else -0.6))
        return above / (above.sum(-1, keepdim=True) + (1e-3 if fixed else 0.0))

    return _training(last, dtype, 402)


def one_by_nothing(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    return _training(lambda h: 1 / (h.relu() + (0.1 if fixed else 0.0)), dtype, 403)


def angle_of_more_than_one(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    return _training(lambda h: (torch.tanh(h) * 0.9 if fixed else 1.5 * h).acos(), dtype, 404)


def square_beyond_every_range(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    return _training(lambda h: ((1.0 if fixed else 1e20) * h).square(), dtype, 405)


def infinity_that_is_averaged(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    """A fill of -inf, meant for a maximum, goes into a mean instead."""

    def last(h: Tensor) -> Tensor:
        filled = h.masked_fill(h < -0.4, -math.inf)
        return h + (filled.amax(0) if fixed else filled.mean(0))

    return _training(last, dtype, 406)


def exponential_in_float32(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    return _training(lambda h: ((1.0 if fixed else 1e5) * h).exp(), dtype, 407)


def power_of_a_negative(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    return _training(lambda h: (h.abs() + 0.1 if fixed else h) ** 1.5, dtype, 408)


class Several(nn.Module):
    """Three projections that overflow, one after the other; what follows makes NaN of the last only."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.leave = nn.Linear(16, 2)
        with torch.no_grad():
            for layer in (self.first, self.second, self.third):
                layer.weight.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = torch.relu(self.second(h))
        return self.leave(torch.relu(self.third(h)))


def first_of_three_layers(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    model = Several(1.0 if fixed else 40.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(16, 8, key=(410, i)) * (1 if fixed else 3000)
        return x, noise(16, 2, key=(411, i))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(model(x).float(), y)

    return usual(model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", init_scale=4.0, enabled=dtype == torch.float16))


def statistics_of_loud_batches(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """BatchNorm kept in fp16 over features of 600: its running variance passes 65,504; training does not see it."""
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
    if not fixed and dtype != FP32:
        model[1].running_var = model[1].running_var.to(dtype)
        model[1].running_mean = model[1].running_mean.to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def data(i: int) -> tuple[Tensor, Tensor]:
        loud = 900.0 if i >= 13 else 1.0
        x = noise(24, 6, key=(412, i))
        return x * loud, x[:, :2]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = model[0](x)
        if not fixed and dtype != FP32:
            norm = model[1]
            with torch.no_grad():
                norm.running_var.mul_(0.9).add_(0.1 * h.float().var(0).clamp(max=7e6).to(dtype))
            h = F.batch_norm(h.float(), None, None, norm.weight, norm.bias, True)
        else:
            h = model[1](h.float())
        return F.mse_loss(model[3](model[2](h)).float(), y)

    return usual(
        model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", init_scale=64.0, enabled=dtype == torch.float16)
    )


def labels_of_a_hinge(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """-1 and 1 for a binary cross entropy, which is made for 0 and 1."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(32, 6, key=(413, i))
        return x, (x[:, :1] > 0).float() if fixed else x[:, :1].sign()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x).float(), y)

    return usual(model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", enabled=False))


def probabilities_as_logits(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A classifier that ends with a softmax, under a cross entropy that takes another."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6), nn.Identity() if fixed else nn.Softmax(-1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(32, 8, key=(414, i))
        return x, x[:, :6].argmax(-1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return usual(model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", enabled=False))


def windows_of_a_sensor_that_stands_still(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    """A function that has returned when the loss is bad divides each window by its own spread: 0 where nothing moves."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    series = noise(600, key=(415,)).cumsum(0) * 0.1
    series[200:260] = 1.5

    def window(at: int) -> Tensor:
        w = series[at : at + 17]
        return (w - w.mean()) / (w.std() + (1e-3 if fixed else 0.0))

    def step(i: int) -> Tensor:
        batch = torch.stack([window(at) for at in range(5 * i, 5 * i + 160, 20)])
        with low(dtype):
            out = model(batch[:, :16])
        loss = F.mse_loss(out.float(), batch[:, 16:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def target_that_was_infinite_before(fixed: bool = False, dtype: torch.dtype = FP32) -> Training:
    """Of an L1 loss autograd keeps nothing that tells; the gradients of an infinite target are signs, and finite."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    target = noise(16, 2, key=(416,))
    target[3, 1] = 1.0 if fixed else math.inf

    def data(i: int) -> tuple[Tensor, Tensor]:
        return noise(16, 6, key=(417, i)), target

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return (model(x).float() - y).abs().mean()

    return usual(model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", enabled=False))


def falls_below_nothing(run: Run) -> bool:
    return min(run.losses) < 0


DOMAIN: dict[str, Any] = {"precision_caused": False, "shows": broken, "steps": 12}
PROGRAMS = [
    *planted(root_of_a_negative, "undefined_operation", "op:sqrt", **DOMAIN),
    *planted(logarithm_of_a_negative, "undefined_operation", "op:log", **DOMAIN),
    *planted(nothing_by_nothing, "undefined_operation", "op:div", **DOMAIN),
    *planted(one_by_nothing, "undefined_operation", "op:div", "op:reciprocal", **DOMAIN),
    *planted(angle_of_more_than_one, "undefined_operation", "op:acos", **DOMAIN),
    *planted(square_beyond_every_range, "float32_overflow", "op:pow", "op:square", **DOMAIN),
    *planted(infinity_that_is_averaged, "undefined_operation", "op:mean", "op:mse_loss", **DOMAIN),
    *planted(exponential_in_float32, "float32_overflow", "op:exp", **DOMAIN),
    *planted(power_of_a_negative, "undefined_operation", "op:pow", **DOMAIN),
    *planted(first_of_three_layers, "activation_overflow_fp16", "first", steps=12),
    *planted(windows_of_a_sensor_that_stands_still, "undefined_operation", "op:div", **{**DOMAIN, "steps": 20}),
    *planted(target_that_was_infinite_before, "data_nan", "data:target", "data:input", **DOMAIN),
    *planted(
        labels_of_a_hinge, "targets_outside_range", "data:target", precision_caused=False, shows=falls_below_nothing, steps=60
    ),
    *planted(probabilities_as_logits, "softmax_twice", "op:log_softmax", precision_caused=False, shows=ends_above(0.9), steps=60),
    *planted(statistics_of_loud_batches, "bn_stats_poisoned", "1", steps=16),
]
