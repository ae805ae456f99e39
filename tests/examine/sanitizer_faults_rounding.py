"""Numbers within the range whose digits are lost."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examine.sanitizer_programs import BF16, Between, Call, Program, between, fault, noise, training


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
