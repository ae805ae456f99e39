"""Constants that were -inf, inf or 0 in the low format before the step began, and infinities, NaN and zeros that are wanted."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from corpus import BF16, FP32, Training, healthy, planted
from corpus.draws import noise
from corpus.loops import low, usual


class Chooser(nn.Module):
    """Weights of candidates times their penalties."""

    def __init__(self, far: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.key = nn.Linear(6, 6)
        self.rate = nn.Linear(6, 1)
        self.far = torch.tensor(far, dtype=dtype)  # no buffer: kept as it was made

    def forward(self, x: Tensor, open_: Tensor) -> Tensor:
        score = self.rate(torch.tanh(self.key(x))).squeeze(-1)
        weight = score.float().softmax(-1).to(score.dtype)
        cost = torch.where(open_, score.abs(), self.far.to(score.dtype))
        return (weight * open_ * cost).sum(-1)


def penalty_beyond_the_range(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """A penalty of 1e6 was stored in fp16 when the model was made: it is inf, and a weight of 0 makes NaN of it."""
    model = Chooser(1e4 if fixed else 1e6, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(12, 5, 6, key=(360, i))
        return x, x[..., 0] > (-0.8 if i >= 6 else -9)

    def loss_of(x: Tensor, open_: Tensor) -> Tensor:
        return model(x, open_).float().square().mean()

    return usual(
        model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", init_scale=64.0, enabled=dtype == torch.float16)
    )


class Shares(nn.Module):
    def __init__(self, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
        self.eps = torch.tensor(eps, dtype=dtype)  # made once

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.eps.dtype)
        return self.body(x / (x.abs().sum(-1, keepdim=True) + self.eps))


def eps_kept_in_half(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """eps = torch.tensor(1e-8).half() outside the loop is 0: rows of zeros are divided by it."""
    model = Shares(1e-4 if fixed else 1e-8, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(16, 8, key=(361, i))
        if i >= 5:
            x[3] = 0
        return x, noise(16, 4, key=(362, i)) / 4

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x).float(), y)

    return usual(
        model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", init_scale=64.0, enabled=dtype == torch.float16)
    )


class Attends(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.qk, self.v, self.out = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 3)
        self.mask = mask  # added to the scores

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        scores = q @ k.transpose(-2, -1) / 8**0.5 + self.mask
        return self.out(scores.float().softmax(-1).to(x.dtype) @ self.v(x))


def mask_constant_stored_in_half(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """A mask of -1e9, made before the loop and kept in fp16, is -inf: its last row, all masked, is NaN."""
    mask = torch.triu(torch.full((6, 6), -1e9), 1)
    mask[5] = -1e9 if not fixed else 0
    model = Attends(mask.to(dtype) if dtype != torch.float32 else mask)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(8, 6, 8, key=(363, i))
        return x, x[..., :3]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x).float(), y)

    return usual(
        model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", init_scale=64.0, enabled=dtype == torch.float16)
    )


def mask_of_minus_infinity(dtype: torch.dtype = torch.float16) -> Training:
    """The same attention with a causal mask of -inf, no row of which is masked throughout."""
    model = Attends(torch.triu(torch.full((6, 6), -math.inf), 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(8, 6, 8, key=(364, i))
        return x, x[..., :3].cumsum(1) / 2

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x).float(), y)

    return usual(
        model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", init_scale=64.0, enabled=dtype == torch.float16)
    )


def nan_where_nothing_was_measured(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Missing targets are NaN; the loss takes the rest by a mask, or nanmean: NaN is how this data says `none`."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    want = noise(8, 4, key=(365,)) / 2

    def step(i: int) -> Tensor:
        x = noise(24, 8, key=(366, i))
        y = (x @ want).masked_fill(noise(24, 4, key=(367, i)) > 0.7, math.nan)
        there = ~y.isnan()
        optimizer.zero_grad()
        with low(dtype):
            out = model(x).float()
        loss = F.mse_loss(out[there], y[there]) + 0.1 * (out - y).abs().detach().nanmean() * out.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


class Scores(nn.Module):
    """Marks what it does not know with NaN, for whoever reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)

    def forward(self, x: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        out = self.body(x)
        return out, out.detach().masked_fill(~known, math.nan)


def nan_that_a_module_puts_out(dtype: torch.dtype = torch.bfloat16) -> Training:
    model = Scores()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    want = noise(8, 4, key=(368,)) / 2

    def step(i: int) -> Tensor:
        x = noise(24, 8, key=(369, i))
        known = noise(24, 4, key=(370, i)) < 0.7
        optimizer.zero_grad()
        with low(dtype):
            out, shown = model(x, known)
        level = float(shown.nanmean())
        loss = F.mse_loss(out.float(), x @ want) + 0 * level
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


class Biased(nn.Module):
    """Attention with a bias by position that begins at zero, as relative positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.out = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 3)
        self.position = nn.Parameter(torch.zeros(6, 6))
        self.register_buffer("shift", torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        scores = q @ k.transpose(-2, -1) / 8**0.5 + (self.position + self.shift).to(q.dtype)
        return self.out(scores.softmax(-1) @ self.v(x))


def zeros_that_a_bias_begins_with(dtype: torch.dtype = torch.float16) -> Training:
    model = Biased()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(8, 6, 8, key=(371, i))
        return x, x[..., :3] + x[:, :1, :3]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x).float(), y)

    return usual(
        model, optimizer, data, loss_of, dtype, scaler=GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
    )


class ZeroOut(nn.Module):
    """A net whose last layer begins at zero, and adapters whose second half does: a module that puts out zeros is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU())
        self.last = nn.Linear(16, 4)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.table = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x)) + self.table.to(x.dtype)


def last_layer_of_zeros(dtype: torch.dtype = torch.float16) -> Training:
    model = ZeroOut()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    want = noise(8, 4, key=(372,)) / 2

    def data(i: int) -> tuple[Tensor, Tensor]:
        x = noise(24, 8, key=(373, i))
        return x, x @ want

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x).float(), y)

    return usual(model, optimizer, data, loss_of, dtype)


def losses_of_a_table_in_half(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    """What is lost up to an age, 1 - S, where S was multiplied up in 16 bits: in the first years it is exactly 0."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rate = torch.linspace(4e-4, 0.03, 200, dtype=FP32 if fixed else dtype)
    lost = 1 - torch.cumprod(1 - rate, 0).float()

    def data(i: int) -> tuple[Tensor, Tensor]:
        return noise(32, 6, key=(77, i)), (noise(32, key=(78, i)).abs() * 80).long().clamp(max=199)

    def loss_of(x: Tensor, age: Tensor) -> Tensor:
        return F.mse_loss(model(x)[:, 0], lost[age].log())

    return usual(model, optimizer, data, loss_of, FP32, scaler=GradScaler("cpu", enabled=False))


PROGRAMS = [
    *planted(losses_of_a_table_in_half, "catastrophic_cancellation", "op:log", shows=lambda run: not run.finite),
    *planted(penalty_beyond_the_range, "constant_out_of_range", "op:mul", "op:where", "op:sum", "data", steps=16),
    *planted(eps_kept_in_half, "eps_underflow_fp16", "op:div", "op:add", steps=12),
    *planted(mask_constant_stored_in_half, "mask_inf_full_row", "op:softmax", precision_caused=None, steps=10),
    *healthy(mask_of_minus_infinity, tools="diagnose monitor examine", survives=None, steps=20),
    *healthy(nan_where_nothing_was_measured, tools="diagnose monitor examine", survives=None, steps=20),
    *healthy(nan_that_a_module_puts_out, tools="diagnose monitor examine", survives=None, steps=20),
    *healthy(zeros_that_a_bias_begins_with, tools="diagnose monitor examine", survives=None, steps=20),
    *healthy(last_layer_of_zeros, tools="diagnose monitor examine", survives=None, steps=20),
]
