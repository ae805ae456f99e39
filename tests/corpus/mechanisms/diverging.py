"""Losses that grow: by steps that are too long, by one reading, by purpose, by the data; and numbers that overflow meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from corpus import Training, healthy, planted
from corpus.draws import noise
from corpus.loops import Run, low, supervised

LR = ("optimizer.lr", "optimizer")


def grown(run: Run) -> bool:
    """A hundred times where it began, or not finite, at some step; and never back again."""
    return not max(run.losses) < 100 * run.losses[0] and not run.losses[-1] < run.losses[0]


def explodes_within_the_first_steps(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Rate 60 on a bottleneck of matrices: the loss is beyond every range at the fifth step, there is no calm before."""
    model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if fixed else 60.0)
    want = noise(10, 2, key=(301,))

    def batch(i: int) -> list[Tensor]:
        x = noise(24, 10, key=(302, i))
        return [x, x @ want]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


def rate_of_a_larger_batch(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """AdamW at 1.5, a rate taken from another optimizer's recipe: weights of 1 move by 1.5 in every step."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if fixed else 1.5)
    scaler = GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
    want = noise(16, 3, key=(303,)) / 4

    def batch(i: int) -> list[Tensor]:
        x = noise(32, 16, key=(304, i))
        return [x, x @ want]

    return supervised(model, optimizer, batch, F.mse_loss, dtype, scaler)


def rate_behind_a_scale_search(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The loss is a thousandfold, and so is the rate: the scale is searched for, then the first updates throw the weights."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4 if fixed else 0.1)
    scaler = GradScaler("cpu", enabled=dtype == torch.float16)

    def batch(i: int) -> list[Tensor]:
        x = noise(32, 8, key=(311, i))
        return [x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return 1000 * F.cross_entropy(out, y)

    return supervised(model, optimizer, batch, loss, dtype, scaler)


def one_wrong_reading(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """One target of 30 million, in thousandths instead of units, at step 25: that update alone ends the training."""
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    want = noise(8, 1, key=(305,)) / 2

    def batch(i: int) -> list[Tensor]:
        x = noise(32, 8, key=(306, i))
        y = x @ want
        if i == 25 and not fixed:
            y[4] = 3e7
        return [x, y]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


def one_wrong_feature(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """One feature is 5 million at step 18, a missing value written as a number; clipping is not used."""
    model = nn.Sequential(nn.Linear(8, 24), nn.LeakyReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)
    want = noise(8, 1, key=(307,)) / 2

    def batch(i: int) -> list[Tensor]:
        x = noise(32, 8, key=(308, i))
        y = x @ want
        if i == 18 and not fixed:
            x[11, 3] = 5e6
        return [x, y]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class Arms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, state: Tensor) -> Tensor:
        return self.value(state).softmax(-1)


def reward_that_is_maximised(dtype: torch.dtype = torch.bfloat16) -> Training:
    """SGD with maximize=True: what backward is given is a reward, from 0.3 to 60, and that is what it is for."""
    model = Arms()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, maximize=True)
    pays = torch.tensor([0.01, 0.02, 0.0, 90.0])

    def step(i: int) -> Tensor:
        state = noise(32, 6, key=(309, i)) + 1
        optimizer.zero_grad()
        with low(dtype):
            reward = (model(state).float() * pays).sum(-1).mean()
        reward.backward()
        optimizer.step()
        return reward.detach()

    with torch.no_grad():
        model.value[2].bias.copy_(torch.tensor([2.0, 2.0, 2.0, -4.0]))
    return Training(model, optimizer, step)


def a_penalty_that_is_turned_up(dtype: torch.dtype = torch.bfloat16) -> Training:
    """A weight of a penalty grows a thousandfold over the run: the loss grows with it, what it measures falls."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    want = noise(8, 2, key=(310,)) / 2

    def step(i: int) -> Tensor:
        x = noise(32, 8, key=(311, i))
        optimizer.zero_grad()
        with low(dtype):
            out = model(x)
            loss = 10.0 ** (i / 10) * F.mse_loss(out.float(), x @ want)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def rates_of_a_growing_count(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Poisson regression: the log-rate passes 11.1 as it learns; exp is infinite in fp16, 70,000 in FP32. The loss had grown."""
    model = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    scaler = GradScaler("cpu", init_scale=64.0, enabled=dtype == torch.float16)

    def step(i: int) -> Tensor:
        x = noise(24, 6, key=(312, i)) / 8 + 1
        count = torch.full((24, 1), 150000.0)
        optimizer.zero_grad()
        with low(dtype):
            rate = model(x)
            rate = rate.float() if fixed else rate
            loss = ((rate.exp() - count / 1.0 * rate.float()) / 1000).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


def agreement_with_its_sign_turned(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A distance between two views of a thing, subtracted: they are driven apart without end."""
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def batch(i: int) -> list[Tensor]:
        x = noise(32, 8, key=(310, i))
        return [torch.cat([x, x + noise(32, 8, key=(311, i)) / 4]), x]

    def criterion(out: Tensor, x: Tensor) -> Tensor:
        one, other = out.float().chunk(2)
        apart = (one - other).square().mean()
        return F.mse_loss(one, x) + (apart if fixed else -40 * apart)

    return supervised(model, optimizer, batch, criterion, dtype)


PROGRAMS = [
    *planted(
        agreement_with_its_sign_turned,
        "loss_without_floor",
        "loop:loss",
        precision_caused=False,
        shows=lambda run: min(run.losses) < -100,
        steps=120,
    ),
    *planted(explodes_within_the_first_steps, "lr_too_high", *LR, precision_caused=False, shows=grown),
    *planted(rate_of_a_larger_batch, "lr_too_high", *LR, precision_caused=False, shows=grown, steps=30),
    *planted(rate_behind_a_scale_search, "lr_too_high", *LR, precision_caused=False, shows=grown, steps=24),
    *planted(one_wrong_reading, "data_outlier", "data", "data:target", precision_caused=False, shows=grown, steps=40),
    *planted(one_wrong_feature, "data_outlier", "data", "data:input", precision_caused=False, shows=grown, steps=40),
    *healthy(reward_that_is_maximised, tools="diagnose monitor examine", survives=None, steps=60),
    *healthy(a_penalty_that_is_turned_up, tools="diagnose monitor examine", survives=None, steps=40),
    *planted(rates_of_a_growing_count, "exp_overflow_fp16", "op:exp", steps=60),
]
