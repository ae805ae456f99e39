"""Single steps with numbers within the range whose digits are lost."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import BF16, FP16, FP32, WIDE, Training, planted
from corpus.architectures import Between, Call, between
from corpus.draws import noise, plain_generator, seed_torch
from corpus.loops import repeated


def saturated_bce(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Identity(), outputs=1)
    x, y = noise(32, 16), (noise(32, 1, key=2) > 0).float()

    def step_loss() -> Tensor:
        logits = model(x) * 40
        if fixed:
            return F.binary_cross_entropy_with_logits(logits, y)
        return F.binary_cross_entropy(torch.sigmoid(logits), y)

    return repeated(model, step_loss, dtype)


def log_of_rounded_probability(fixed: bool = False, dtype: torch.dtype = FP16) -> Training:
    model = Between(nn.Identity(), outputs=5)
    x, y = noise(32, 16), torch.randint(0, 5, (32,), generator=plain_generator(3))

    def step_loss() -> Tensor:
        logits = model(x) * 40
        logs = logits.float().log_softmax(-1) if fixed else logits.softmax(-1).log()
        return -logs.gather(1, y[:, None]).mean()

    return repeated(model, step_loss, dtype)


def variance_of_squares(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def normalise(x: Tensor) -> Tensor:
        x = x * 0.3 + 3
        wide = x.float() if fixed else x
        mean = wide.mean(-1, keepdim=True)
        variance = wide.var(-1, keepdim=True, correction=0) if fixed else (wide * wide).mean(-1, keepdim=True) - mean**2
        return (wide - mean) / (variance.abs() + 1e-3).sqrt()

    return between(normalise, dtype, rows=rows, width=width)


def large_offset(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = nn.Sequential()
    seed_torch(0)
    model.add_module("first", nn.Linear(16, 16))
    model.add_module("fault", Call(lambda x: x + (0.0 if fixed else 1000.0)))
    model.add_module("norm", nn.LayerNorm(16))
    model.add_module("last", nn.Linear(16, 4))
    x, y = noise(32, 16), noise(32, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def logits_with_offset(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.ReLU(), outputs=10)
    with torch.no_grad():
        model.last.bias.fill_(0.0 if fixed else 300.0)
    x, y = noise(64, 16), torch.randint(0, 10, (64,), generator=plain_generator(3))
    return repeated(model, lambda: F.cross_entropy(model(x), y), dtype)


def preference_of_sums(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Tanh(), outputs=50)
    x, ids = noise(8, 64, 16), torch.randint(0, 50, (8, 64), generator=plain_generator(4))

    def step_loss() -> Tensor:
        logits = model(x)
        logits = logits.float() if fixed else logits
        logs = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1).sum(-1)
        return -F.logsigmoid(logs[:4] - logs[4:]).mean()

    return repeated(model, step_loss, dtype)


def running_sum(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def total(x: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=FP32 if fixed else x.dtype)
        for _ in range(600):
            out = out + torch.ones_like(out)
        return x * (out / 600).to(x.dtype)

    return between(total, dtype, rows=rows, width=width)


def deaf_residual_stream(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
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
            seed_torch(0)
            self.first = nn.Linear(16, 16)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.last = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) * 500
            for block in self.blocks:
                x = block(x)
            return self.last(x / 500)

    model = Net()
    x, y = noise(32, 16), noise(32, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def layer_norm_over_many_rows(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 8))
    model.add_module("norm", nn.LayerNorm(8))
    x = noise(64 if fixed else 8192, 4)
    return repeated(model, lambda: model(x).float().mean(), dtype)


def embedding_with_many_hits(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(4, 8, dtype=FP32 if fixed else dtype))
    model.add_module("last", nn.Linear(8, 2))
    ids = torch.zeros(4096, dtype=torch.long)
    return repeated(model, lambda: model(ids).float().mean() * 10, dtype, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def parameter_used_many_times(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    class Gains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, dtype=FP32 if fixed else dtype))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.weight * row for row in x]).float().mean(-1).sum()

    model = Gains()
    x = (1 + 0.1 * noise(600, 8)).to(FP32 if fixed else dtype)
    return repeated(model, lambda: model(x), None)


def rotary_positions(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def rotate(x: Tensor) -> Tensor:
        kept = FP32 if fixed else x.dtype
        position = torch.arange(4000, 4000 + x.shape[0], dtype=kept)
        angle = position[:, None] * torch.tensor([0.7, 0.3, 0.1, 0.03] * (width // 4), dtype=kept)
        return x * angle.cos().to(x.dtype) + x.flip(-1) * angle.sin().to(x.dtype)

    return between(rotate, dtype, rows=rows, width=width)


def ids_in_half(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2000, 16)

        def forward(self, x: Tensor) -> Tensor:
            ids = torch.arange(1000, 1000 + x.shape[0], dtype=FP32 if fixed else dtype)
            return x + self.table(ids.long())

    model = Between(Lookup())
    x, y = noise(64, 16), noise(64, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def router_with_ties(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
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
    x, y = noise(128, 16), noise(128, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


def micro_batches_in_bf16(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    seed_torch(0)
    model = nn.Sequential()
    model.add_module("last", nn.Linear(4, 2, dtype=FP32 if fixed else dtype))
    kept = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = 1 + noise(8, 4).to(kept), 3 + noise(8, 2, key=2)

    def step(i: int) -> None:
        optimizer.zero_grad()
        for _ in range(400):
            (F.mse_loss(model(x).float(), y) / 400).backward()
        optimizer.step()

    return Training(model, optimizer, step)


def labels_of_a_rounded_teacher(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    seed_torch(1)
    model = nn.ModuleDict({"student": Between(nn.ReLU(), outputs=6), "teacher": nn.Linear(16, 6)}).requires_grad_(True)
    model["teacher"].requires_grad_(False)
    with torch.no_grad():
        model["teacher"].weight.mul_(0.05)
        model["teacher"].bias.fill_(30.0)
    x = noise(128, 16)

    def step_loss() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=not fixed, dtype=dtype):
            labels = model["teacher"](x).argmax(-1)
        return F.cross_entropy(model["student"](x), labels)

    return repeated(model, step_loss, dtype)


def distances_by_expansion(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def kernel(x: Tensor) -> Tensor:
        x = x * 0.1 + 4
        wide = x.float() if fixed else x
        squares = (wide * wide).sum(-1)
        apart = (
            torch.cdist(wide, wide) if fixed else (squares[:, None] + squares[None] - 2 * wide @ wide.T).clamp_min(1e-3).sqrt()
        )
        return x * torch.exp(-apart).mean(-1, keepdim=True).to(x.dtype)

    return between(kernel, dtype, rows=rows, width=width)


def slope_by_a_small_step(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def slope(x: Tensor) -> Tensor:
        x = x.float() if fixed else x
        return (torch.sin(3 * (x + 0.01)) - torch.sin(3 * x)) / 0.01

    return between(slope, dtype, rows=rows, width=width)


def focal_loss_on_probabilities(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Identity(), outputs=1)
    x, y = noise(64, 16), (noise(64, 1, key=2) > 0).float()

    def step_loss() -> Tensor:
        logits = model(x) * 60
        with torch.autocast("cpu", enabled=False):
            if fixed:
                hit, miss = F.logsigmoid(logits.float()), F.logsigmoid(-logits.float())
                return -(y * miss.exp() ** 2 * hit + (1 - y) * hit.exp() ** 2 * miss).mean()
            p = torch.sigmoid(logits)
            wanted = y.to(p.dtype)
            hit, miss = torch.log(p + 1e-12), torch.log(1 - p + 1e-12)
            return -(wanted * (1 - p) ** 2 * hit + (1 - wanted) * p**2 * miss).mean().float()

    return repeated(model, step_loss, dtype)


def hits_counted_in_bf16(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def load(x: Tensor) -> Tensor:
        kept = FP32 if fixed else x.dtype
        hits = torch.zeros(4, dtype=kept).index_add(0, torch.zeros(4096, dtype=torch.long), torch.ones(4096, dtype=kept))
        return x * (hits[0] / 4096).to(x.dtype)

    return between(load, dtype, rows=rows, width=width)


def heights_above_sea_in_bf16(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = Between(nn.Identity(), outputs=1)
    x = noise(64, 16)
    heights = 2100 + x[:, :1]
    kept = FP32 if fixed else dtype

    def step_loss() -> Tensor:
        return F.l1_loss(model(x).float() * 3 + 2100, heights.to(kept).float())

    return repeated(model, step_loss, dtype)


def hours_rounded_before_their_angles(
    fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 64, width: int = 16
) -> Training:
    hours = torch.randint(0, 8760, (rows,), generator=plain_generator(3))

    def daytime(x: Tensor) -> Tensor:
        rounded = hours.float() if fixed else hours.to(dtype).float()
        return x * torch.cos(rounded * (2 * math.pi / 24))[:, None].to(x.dtype)

    return between(daytime, dtype, rows=rows, width=width)


def angles_of_many_frequencies(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 64, width: int = 16) -> Training:
    at = 700 * torch.rand(rows, generator=plain_generator(4))

    def waves(x: Tensor) -> Tensor:
        kept = FP32 if fixed else dtype
        speeds = 1000.0 ** -(torch.arange(x.shape[1]) / x.shape[1])
        return x * torch.sin(at[:, None].to(kept) * speeds.to(kept)).to(x.dtype)

    return between(waves, dtype, rows=rows, width=width)


def ids_kept_in_bf16(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    table = nn.Embedding(5000, 4)
    ids = torch.randint(300, 5000, (256,), generator=plain_generator(5))
    kept = ids if fixed else ids.to(dtype)

    def step_loss() -> Tensor:
        return table(kept.long().clamp(max=4999)).tanh().mean()

    return repeated(table, step_loss, dtype)


def one_word_for_all_behind_equal_weights(fixed: bool = False, dtype: torch.dtype = BF16) -> Training:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].to(FP32 if fixed else dtype)
    with torch.no_grad():
        model[2].weight.fill_(0.3).add_(noise(1, 8) * 1e-3)
    words = torch.zeros(4096, dtype=torch.long)

    def step_loss() -> Tensor:
        return (model(words).float() - 2).pow(2).mean()

    return repeated(model, step_loss, dtype)


def small_terms_after_a_large_start(fixed: bool = False, dtype: torch.dtype = BF16, rows: int = 32, width: int = 16) -> Training:
    def integrate(x: Tensor) -> Tensor:
        parts = F.softplus(x)
        total = torch.full_like(x, 300.0, dtype=FP32 if fixed else x.dtype)
        for i in range(24):
            total = total + parts.roll(i, 0)
        return ((total - 300) / 10).to(x.dtype)

    return between(integrate, dtype, rows=rows, width=width)


PROGRAMS = [
    *planted(
        saturated_bce,
        "saturated_probability_loss",
        "op:binary_cross_entropy",
        "op:binary_cross_entropy_backward",
        "op:rsub",
        "op:log",
        steps=8,
        hazards="saturated_probability",
    ),
    *planted(
        log_of_rounded_probability,
        "saturated_probability_loss",
        "op:log",
        "op:rsub",
        "op:sigmoid",
        "op:softmax",
        steps=8,
        hazards="saturated_probability",
        findings="INF",
    ),
    *planted(
        variance_of_squares,
        "catastrophic_cancellation",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="cancellation",
    ),
    *planted(large_offset, "scale_imbalance_absorption", "fault", steps=8, hazards="absorption"),
    *planted(logits_with_offset, "low_precision_output_head", "last", steps=8, hazards="absorption"),
    *planted(
        preference_of_sums,
        "logprob_rounding",
        "op:sub",
        "op:sum",
        steps=8,
        hazards="cancellation absorption amplification",
    ),
    *planted(
        running_sum,
        "absorption_in_accumulator",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="accumulator absorption amplification accumulation",
    ),
    *planted(deaf_residual_stream, "residual_absorption", "blocks.0", "blocks.1", steps=8, hazards="residual"),
    *planted(
        layer_norm_over_many_rows,
        "kernel_low_precision_accumulation",
        "norm",
        "norm.bias",
        "norm.weight",
        steps=8,
        hazards="accumulation",
    ),
    *planted(embedding_with_many_hits, "low_precision_scatter_add", "embed", "embed.weight", steps=8, hazards="accumulation"),
    *planted(
        parameter_used_many_times,
        "low_precision_grad_accumulation",
        "weight",
        "op:add",
        steps=8,
        hazards="accumulation gradient_sum",
    ),
    *planted(
        rotary_positions, "position_precision_loss", "fault", tools="diagnose diff", steps=8, sizes=WIDE, hazards="phase integers"
    ),
    *planted(ids_in_half, "integer_in_low_precision", "fault", steps=8, hazards="integers decision"),
    *planted(router_with_ties, "router_low_precision", "fault", "fault.gate", steps=8, hazards="decision absorption"),
    *planted(
        micro_batches_in_bf16,
        "low_precision_grad_accumulation",
        "last.weight",
        "last.bias",
        steps=8,
        twin="monitor examine",
        hazards="gradient_sum accumulation",
    ),
    *planted(
        labels_of_a_rounded_teacher,
        "target_in_low_precision",
        "op:argmax",
        "op:addmm",
        "op:linear",
        "teacher",
        steps=8,
        hazards="decision absorption",
    ),
    *planted(
        distances_by_expansion,
        "catastrophic_cancellation",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="cancellation absorption",
    ),
    *planted(
        slope_by_a_small_step,
        "catastrophic_cancellation",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="cancellation",
    ),
    *planted(
        focal_loss_on_probabilities,
        "saturated_probability_loss",
        "op:rsub",
        "op:log",
        "op:sigmoid",
        steps=8,
        hazards="saturated_probability",
    ),
    *planted(
        hits_counted_in_bf16,
        "low_precision_scatter_add",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="accumulation",
    ),
    *planted(heights_above_sea_in_bf16, "target_in_low_precision", "op:to", steps=8, hazards="absorption cancellation"),
    *planted(
        hours_rounded_before_their_angles,
        "integer_in_low_precision",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="integers",
    ),
    *planted(
        angles_of_many_frequencies,
        "position_precision_loss",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="phase",
    ),
    *planted(ids_kept_in_bf16, "integer_in_low_precision", "op:to", steps=8, hazards="integers"),
    *planted(one_word_for_all_behind_equal_weights, "low_precision_scatter_add", "0", tools="", steps=8, hazards="accumulation"),
    *planted(
        small_terms_after_a_large_start,
        "absorption_in_accumulator",
        "fault",
        tools="diagnose diff",
        steps=8,
        sizes=WIDE,
        hazards="accumulator absorption",
    ),
]
