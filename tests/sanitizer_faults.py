"""Tiny training steps with one numerical fault each, and the same step repaired: what the sanitizer is tested with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

FP16, BF16 = torch.float16, torch.bfloat16


@dataclass
class Program:
    model: nn.Module
    step: Callable[[], Any]
    scaler: GradScaler | None = None


@dataclass(frozen=True)
class Fault:
    name: str
    kinds: tuple[str, ...]
    cause: str
    culprits: tuple[str, ...]
    build: Callable[[bool], Program]
    in_reference: bool = False


FAULTS: dict[str, Fault] = {}


def fault(kinds: str, cause: str, culprits: str, in_reference: bool = False) -> Callable[[Any], Any]:
    def register(build: Any) -> Any:
        FAULTS[build.__name__] = Fault(build.__name__, tuple(kinds.split()), cause, tuple(culprits.split()), build, in_reference)
        return build

    return register


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low(dtype: torch.dtype | None) -> Any:
    return torch.autocast("cpu", dtype=dtype) if dtype is not None else contextlib.nullcontext()


def training(
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    dtype: torch.dtype | None = BF16,
    optimizer: Callable[[Any], Any] | None = None,
    scaled: bool | None = None,
    after: Callable[[], None] | None = None,
) -> Program:
    """One ordinary step; a GradScaler where the type is fp16."""
    chosen = (optimizer or (lambda p: torch.optim.SGD(p, lr=1e-3)))(model.parameters())
    scaled = dtype == FP16 if scaled is None else scaled
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=scaled)

    def step() -> None:
        chosen.zero_grad()
        with low(dtype):
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.step(chosen)
        scaler.update()
        if after is not None:
            after()

    return Program(model, step, scaler if scaled else None)


class Between(nn.Module):
    """Layers around the module `fault`, under test."""

    def __init__(self, fault: nn.Module, width: int = 16, outputs: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.fault = fault
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fault(self.first(x)))


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def between(function: Callable[[Tensor], Tensor], dtype: torch.dtype, scaled: bool | None = None, rows: int = 32) -> Program:
    model = Between(Call(function))
    x, y = noise(rows, 16), noise(rows, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), dtype, scaled=scaled)


# range


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


# zeros


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


# masks, singular points, data


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


# flushed gradients


@fault("flush", "grad_underflow_no_scaling", "first last fault op:mse_loss op:to_copy")
def gradients_without_scaler(fixed: bool) -> Program:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y) * 1e-6, FP16, scaled=fixed and None)


# rounding


@fault("cancellation", "catastrophic_cancellation", "fault")
def variance_of_squares(fixed: bool) -> Program:
    def normalise(x: Tensor) -> Tensor:
        x = x * 0.3 + 3
        wide = x.float() if fixed else x
        mean = wide.mean(-1, keepdim=True)
        variance = wide.var(-1, keepdim=True, correction=0) if fixed else (wide * wide).mean(-1, keepdim=True) - mean**2
        return (wide - mean) / (variance.abs() + 1e-3).sqrt()

    return between(normalise, BF16)


@fault("absorption", "scale_imbalance_absorption", "fault")
def large_offset(fixed: bool) -> Program:
    model = nn.Sequential()
    torch.manual_seed(0)
    model.add_module("first", nn.Linear(16, 16))
    model.add_module("fault", Call(lambda x: x + (0.0 if fixed else 1000.0)))
    model.add_module("norm", nn.LayerNorm(16))
    model.add_module("last", nn.Linear(16, 4))
    x, y = noise(32, 16), noise(32, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), BF16)


@fault("absorption", "low_precision_output_head", "last")
def logits_with_offset(fixed: bool) -> Program:
    model = Between(nn.ReLU(), outputs=10)
    with torch.no_grad():
        model.last.bias.fill_(0.0 if fixed else 300.0)
    x, y = noise(64, 16), torch.randint(0, 10, (64,), generator=torch.Generator().manual_seed(3))
    return training(model, lambda: F.cross_entropy(model(x), y), BF16)


@fault("cancellation absorption amplification", "logprob_rounding", "op:sub op:sum")
def preference_of_sums(fixed: bool) -> Program:
    model = Between(nn.Tanh(), outputs=50)
    x, ids = noise(8, 64, 16), torch.randint(0, 50, (8, 64), generator=torch.Generator().manual_seed(4))

    def step_loss() -> Tensor:
        logits = model(x)
        logits = logits.float() if fixed else logits
        logs = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1).sum(-1)
        return -F.logsigmoid(logs[:4] - logs[4:]).mean()

    return training(model, step_loss, BF16)


@fault("accumulator absorption amplification accumulation", "absorption_in_accumulator", "fault")
def running_sum(fixed: bool) -> Program:
    def total(x: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32 if fixed else x.dtype)
        for _ in range(600):
            out = out + torch.ones_like(out)
        return x * (out / 600).to(x.dtype)

    return between(total, BF16)


@fault("residual", "residual_absorption", "blocks.0 blocks.1")
def deaf_residual_stream(fixed: bool) -> Program:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            branch = self.fc(x * 1e-3) * 0.05
            return x + (branch.float() if fixed else branch)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(16, 16)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.last = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) * 500
            for block in self.blocks:
                x = block(x)
            return self.last(x / 500)

    model = Net()
    x, y = noise(32, 16), noise(32, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), BF16)


# kernels that add up in 16 bits


@fault("accumulation", "kernel_low_precision_accumulation", "norm norm.bias norm.weight")
def layer_norm_over_many_rows(fixed: bool) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 8))
    model.add_module("norm", nn.LayerNorm(8))
    x = noise(64 if fixed else 8192, 4)
    return training(model, lambda: model(x).float().mean(), BF16)


@fault("accumulation", "low_precision_scatter_add", "embed embed.weight")
def embedding_with_many_hits(fixed: bool) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(4, 8, dtype=torch.float32 if fixed else BF16))
    model.add_module("last", nn.Linear(8, 2))
    ids = torch.zeros(4096, dtype=torch.long)
    return training(model, lambda: model(ids).float().mean() * 10, BF16, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


@fault("accumulation gradient_sum", "low_precision_grad_accumulation", "weight op:add last.weight last")
def parameter_used_many_times(fixed: bool) -> Program:
    class Gains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, dtype=torch.float32 if fixed else BF16))

        def forward(self, x: Tensor) -> Tensor:
            return sum((self.weight * row).float().mean() for row in x)

    model = Gains()
    x = (1 + 0.1 * noise(600, 8)).to(torch.float32 if fixed else BF16)
    return training(model, lambda: model(x), None)


# whole numbers and decisions


@fault("phase integers", "position_precision_loss", "fault")
def rotary_positions(fixed: bool) -> Program:
    def rotate(x: Tensor) -> Tensor:
        dtype = torch.float32 if fixed else x.dtype
        position = torch.arange(4000, 4000 + x.shape[0], dtype=dtype)
        angle = position[:, None] * torch.tensor([0.7, 0.3, 0.1, 0.03] * 4, dtype=dtype)
        return x * angle.cos().to(x.dtype) + x.flip(-1) * angle.sin().to(x.dtype)

    return between(rotate, BF16)


@fault("integers decision", "integer_in_low_precision", "fault")
def ids_in_half(fixed: bool) -> Program:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2000, 16)

        def forward(self, x: Tensor) -> Tensor:
            ids = torch.arange(1000, 1000 + x.shape[0], dtype=torch.float32 if fixed else BF16)
            return x + self.table(ids.long())

    model = Between(Lookup())
    x, y = noise(64, 16), noise(64, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), BF16)


@fault("decision absorption", "router_low_precision", "fault fault.gate")
def router_with_ties(fixed: bool) -> Program:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            with torch.no_grad():
                self.gate.bias.fill_(40.0)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False) if fixed else contextlib.nullcontext():
                scores = self.gate(x.float())
            choice = scores.argmax(-1)
            parts = torch.stack([e(x) for e in self.experts], 1)
            return parts[torch.arange(len(x)), choice]

    model = Between(Router())
    x, y = noise(128, 16), noise(128, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), BF16)


# state


@fault("update_lost", "bf16_update_lost", "first.weight last.weight first.bias last.bias optimizer")
def updates_in_bf16(fixed: bool) -> Program:
    model = Between(nn.Tanh()).to(torch.float32 if fixed else BF16)
    x, y = noise(32, 16), noise(32, 4, seed=2)
    dtype = next(model.parameters()).dtype
    return training(
        model, lambda: F.mse_loss(model(x.to(dtype)).float(), y), BF16 if fixed else None,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-4),
    )  # fmt: skip


@fault("average state_still", "ema_stagnation", "loop:ema")
def average_in_bf16(fixed: bool) -> Program:
    model = Between(nn.Tanh())
    averages = [(p.detach() * 1.05).to(torch.float32 if fixed else BF16) for p in model.parameters()]
    x, y = noise(32, 16), noise(32, 4, seed=2)

    def average() -> None:
        with torch.no_grad():
            for mean, p in zip(averages, model.parameters()):
                mean.mul_(0.9995).add_(p.to(mean.dtype), alpha=0.0005)

    return training(model, lambda: F.mse_loss(model(x).float(), y), BF16, after=average)


@fault("gradient_sum accumulation", "low_precision_grad_accumulation", "first.weight last.weight first.bias last.bias")
def micro_batches_in_bf16(fixed: bool) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("last", nn.Linear(4, 2, dtype=torch.float32 if fixed else BF16))
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = 1 + noise(8, 4).to(dtype), 3 + noise(8, 2, seed=2)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(400):
            (F.mse_loss(model(x).float(), y) / 400).backward()
        optimizer.step()

    return Program(model, step)


# what the loop does


@fault("overflow", "grad_norm_overflow_fp16", "loop:clip")
def clipping_by_a_norm_in_half(fixed: bool) -> Program:
    model = Between(nn.ReLU()).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, y = noise(32, 16).half(), 4000 * noise(32, 4, seed=2)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x).float(), y).backward()
        grads = [p.grad for p in model.parameters()]
        wide = torch.float32 if fixed else FP16
        norm = sum((g.to(wide) ** 2).sum() for g in grads).sqrt()
        for g in grads:
            g.mul_((2000 / (norm + 1e-6)).clamp(max=1.0).to(g.dtype))
        optimizer.step()

    return Program(model, step)


@fault("given_nonfinite", "stale_inf_grads", "loop:zero_grad")
def gradients_left_from_a_bad_step(fixed: bool) -> Program:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, seed=2)
    if not fixed:
        for p in model.parameters():
            p.grad = torch.full_like(p, math.inf)

    def step() -> None:
        with low(BF16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()

    return Program(model, step)


@fault("given_nonfinite", "bn_stats_poisoned", "fault")
def poisoned_statistics(fixed: bool) -> Program:
    model = Between(nn.BatchNorm1d(16))
    model.fault.running_var.fill_(1.0 if fixed else math.inf)
    x, y = noise(8, 16), noise(8, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), FP16)


@fault("overflow", "static_loss_scale_overflow", "last fault op:mul op:to_copy op:mse_loss_backward")
def loss_scaled_by_hand(fixed: bool) -> Program:
    model = Between(nn.ReLU())
    x, y = noise(8, 16), noise(8, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y) * (128.0 if fixed else 2.0**22), FP16, scaled=False)


@fault("decay_lost", "weight_decay_lost", "first.weight last.weight first.bias last.bias")
def decay_that_rounds_to_one(fixed: bool) -> Program:
    model = Between(nn.Tanh()).to(torch.float32 if fixed else BF16)
    dtype = next(model.parameters()).dtype
    x, y = noise(32, 16).to(dtype), noise(32, 4, seed=2)
    return training(
        model, lambda: F.mse_loss(model(x).float(), y), BF16 if fixed else None,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    )  # fmt: skip


@fault("state_still", "ema_stagnation", "optimizer")
def second_moment_that_cannot_fall(fixed: bool) -> Program:
    model = Between(nn.Tanh()).to(torch.float32 if fixed else BF16)
    dtype = next(model.parameters()).dtype
    x, y = noise(32, 16).to(dtype), noise(32, 4, seed=2)
    adam = torch.optim.Adam(model.parameters(), lr=0.02, foreach=False)
    program = training(model, lambda: F.mse_loss(model(x).float(), y), BF16 if fixed else None, optimizer=lambda _: adam)
    program.step()
    for state in adam.state.values():
        state["exp_avg_sq"].fill_(1.0)
        state["step"].fill_(500.0)
        state["exp_avg"].fill_(0.5)
    return program


@fault("decision absorption", "target_in_low_precision", "op:argmax op:addmm op:linear teacher")
def labels_of_a_rounded_teacher(fixed: bool) -> Program:
    torch.manual_seed(1)
    model = nn.ModuleDict({"student": Between(nn.ReLU(), outputs=6), "teacher": nn.Linear(16, 6)}).requires_grad_(True)
    model["teacher"].requires_grad_(False)
    with torch.no_grad():
        model["teacher"].weight.mul_(0.05)
        model["teacher"].bias.fill_(30.0)
    x = noise(128, 16)

    def step_loss() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=not fixed, dtype=BF16):
            labels = model["teacher"](x).argmax(-1)
        return F.cross_entropy(model["student"](x), labels)

    return training(model, step_loss, BF16)


@fault("saturation", "fp8_scale_stale", "fault")
def scale_of_yesterday(fixed: bool) -> Program:
    def quantised(x: Tensor) -> Tensor:
        scale = 448 / (x.abs().max() if fixed else x.abs().max() / 8)
        return x + ((x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x).detach()

    return between(quantised, BF16)
