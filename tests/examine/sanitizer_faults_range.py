"""Numbers beyond the range of the format: too large, too small, masked, singular or given so."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examine.sanitizer_programs import BF16, FP16, Between, Program, between, fault, noise, training


@fault("overflow", "product_overflow_fp16", "fault")
def gated_product(fixed: bool) -> Program:
    return between(lambda x: ((x.float() if fixed else x) * 400) * (x * 400) / 160000, FP16)


@fault("overflow", "activation_overflow_fp16", "fault")
def loud_layer(fixed: bool) -> Program:
    torch.manual_seed(1)
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.mul_(1 if fixed else 3e5)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(16, 16))
    model.add_module("fault", layer)
    model.add_module("norm", nn.LayerNorm(16))
    model.add_module("last", nn.Linear(16, 4))
    x, y = noise(8, 16), noise(8, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), FP16)


class Attention(nn.Module):
    def __init__(self, gain: float, mask: Tensor | None = None, mask_value: float = -math.inf) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.gain, self.mask, self.mask_value = gain, mask, mask_value

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q(x) * self.gain) @ (self.k(x) * self.gain).transpose(-2, -1)
        if self.mask is not None:
            scores = (
                scores.masked_fill(self.mask, self.mask_value)
                if math.isinf(self.mask_value)
                else scores + self.mask.to(scores.dtype) * self.mask_value
            )
        return scores.softmax(-1) @ self.v(x)


def attending(attention: Attention, dtype: torch.dtype) -> Program:
    model = Between(attention)
    x, y = noise(2, 6, 16), noise(2, 6, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), dtype)


@fault("overflow", "attention_logit_overflow_fp16", "fault")
def attention_scores(fixed: bool) -> Program:
    return attending(Attention(0.5 if fixed else 300.0), FP16)


@fault("overflow", "loss_computed_in_fp16", "op:pow op:mul op:sum op:mean op:mse_loss")
def loss_in_half(fixed: bool) -> Program:
    model = Between(nn.Identity())
    x, y = noise(8, 16), 500 * noise(8, 4, seed=2)

    def step_loss() -> Tensor:
        out = model(x)
        with torch.autocast("cpu", enabled=False):
            out = out.float() if fixed else out
            return ((out - y.to(out.dtype)) ** 2).mean()

    return training(model, step_loss, FP16)


@fault("overflow", "reduction_overflow_fp16", "fault")
def sum_of_many(fixed: bool) -> Program:
    def dice(x: Tensor) -> Tensor:
        p = torch.sigmoid(x).repeat(1, 1024)
        total = p.float().sum() if fixed else p.sum()
        return x * (1 + 100 * p.mean() / total * p.numel() / 100)

    return between(dice, FP16, rows=16)


@fault("exp_range", "exp_overflow_fp16", "fault")
def exponential(fixed: bool) -> Program:
    return between(lambda x: torch.exp(x - x.amax() if fixed else x.clamp(-1, 1) * 0 + 12 + x * 0.01) * 1e-5, FP16)


@fault("overflow", "norm_square_overflow_fp16", "fault")
def hand_written_norm(fixed: bool) -> Program:
    def norm(x: Tensor) -> Tensor:
        x = x * 1000
        wide = x.float() if fixed else x
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    return between(norm, FP16)


@fault("overflow", "input_out_of_range_fp16", "data:input")
def raw_feature(fixed: bool) -> Program:
    model = Between(nn.LayerNorm(16))
    x, y = noise(8, 16), noise(8, 4, seed=2)
    x[:, 3] = x[:, 3] if fixed else 1.6e9 + 1e3 * x[:, 3]
    return training(model, lambda: F.mse_loss(model(x).float(), y), FP16)


@fault("constant_lost", "eps_underflow_fp16", "fault")
def tiny_eps(fixed: bool) -> Program:
    def normalise(x: Tensor) -> Tensor:
        x = torch.where(torch.arange(x.shape[0])[:, None] == 1, torch.zeros_like(x), x)
        wide = x.float() if fixed else x
        return wide / (wide.abs().sum(-1, keepdim=True) + 1e-8)

    return between(normalise, FP16)


@fault("constant_lost", "eps_underflow_fp16", "fault")
def functional_normalize(fixed: bool) -> Program:
    def normalise(x: Tensor) -> Tensor:
        x = F.relu(x) * (torch.arange(x.shape[0])[:, None] != 2)
        return F.normalize(x, dim=-1, eps=1e-4 if fixed else 1e-12)

    return between(normalise, FP16)


@fault("zero_divisor", "product_underflow_fp16", "fault")
def product_of_probabilities(fixed: bool) -> Program:
    def likelihood(x: Tensor) -> Tensor:
        p = torch.sigmoid(x) * 0.2 + 0.05
        together = p[:, :1]
        for i in range(1, p.shape[1]):
            together = together * p[:, i : i + 1]
        logs = p.log().sum(-1, keepdim=True) if fixed else together.log()
        return x * logs / 10

    return between(likelihood, FP16)


@fault(
    "saturated_probability",
    "saturated_probability_loss",
    "op:binary_cross_entropy op:binary_cross_entropy_backward op:rsub op:log",
)
def saturated_bce(fixed: bool) -> Program:
    model = Between(nn.Identity(), outputs=1)
    x, y = noise(32, 16), (noise(32, 1, seed=2) > 0).float()

    def step_loss() -> Tensor:
        logits = model(x) * 40
        if fixed:
            return F.binary_cross_entropy_with_logits(logits, y)
        return F.binary_cross_entropy(torch.sigmoid(logits), y)

    return training(model, step_loss, BF16)


@fault("saturated_probability", "saturated_probability_loss", "op:log op:rsub op:sigmoid op:softmax")
def log_of_rounded_probability(fixed: bool) -> Program:
    model = Between(nn.Identity(), outputs=5)
    x, y = noise(32, 16), torch.randint(0, 5, (32,), generator=torch.Generator().manual_seed(3))

    def step_loss() -> Tensor:
        logits = model(x) * 40
        logs = logits.float().log_softmax(-1) if fixed else logits.softmax(-1).log()
        return -logs.gather(1, y[:, None]).mean()

    return training(model, step_loss, FP16)


@fault("constant_lost zero_divisor", "adam_eps_underflow_fp16", "optimizer optimizer.eps")
def adam_in_half(fixed: bool) -> Program:
    model = Between(nn.ReLU())
    model = model if fixed else model.half()
    x, y = noise(8, 16), noise(8, 4, seed=2)
    dtype = torch.float32 if fixed else FP16
    return training(
        model, lambda: F.mse_loss(model(x.to(dtype)).float(), y) * 1e-3, FP16 if fixed else None,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-3, foreach=False),
    )  # fmt: skip


@fault("masked_rows", "mask_inf_full_row", "fault")
def fully_masked_row(fixed: bool) -> Program:
    mask = torch.zeros(2, 6, 6)
    mask[1, :, 3:] = 1
    mask[1, 4:, :] = 0 if fixed else 1
    return attending(Attention(0.5, mask, -1e9), FP16)


@fault("singular_backward", "singular_gradient", "fault op:div op:norm", in_reference=True)
def root_of_zero(fixed: bool) -> Program:
    def distance(x: Tensor) -> Tensor:
        d = x - x.roll(1, 0) * torch.tensor([[1.0]] + [[0.5]] * (x.shape[0] - 1)).to(x.dtype)
        squares = (d * 0).pow(2).sum(-1, keepdim=True)
        return x + (squares + (1e-3 if fixed else 0)).sqrt()

    return between(distance, BF16)


@fault("given_nonfinite", "data_nan", "data:input", in_reference=True)
def nan_in_the_batch(fixed: bool) -> Program:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, seed=2)
    x[2, 3] = 0.0 if fixed else math.nan
    return training(model, lambda: F.mse_loss(model(x).float(), y), BF16)


@fault("flush", "grad_underflow_no_scaling", "scaler")
def gradients_without_scaler(fixed: bool) -> Program:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y) * 1e-6, FP16, scaled=fixed and None)
