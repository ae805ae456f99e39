"""Planted trouble in Adam's denominator: states that are zero in fp16, an eps that outweighs the gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from corpus import Training, planted
from corpus.draws import noise
from corpus.loops import usual


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.site = nn.Embedding(30, 12)
        self.deep = nn.Sequential(nn.Linear(18, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, site, numbers):
        return self.deep(torch.cat([self.site(site), numbers], -1)).squeeze(-1)


def model_half_with_adam(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """model.half() and Adam with its default eps: v = g**2 and eps = 1e-8 are both 0 in fp16, and m / 0 is inf."""
    model = Clicks().to(torch.float32 if fixed else dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    kind = next(model.parameters()).dtype

    def step(i):
        numbers = noise(32, 6, key=(71, i))
        site = torch.arange(32) % 30
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fixed):
            logit = model(site, numbers.to(kind))
        loss = F.binary_cross_entropy_with_logits(logit.float(), (numbers[:, 0] + (site > 15) > 0.5).float())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


class Lora(nn.Module):
    """A frozen layer with a small trained way around it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def adapters_kept_in_half(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Adapters loaded in fp16 beside a frozen fp16 base; AdamW(eps=1e-8) on them gives inf at the first step."""
    model = nn.Sequential(Lora(24, 4), Lora(24, 4), nn.Linear(24, 5))
    model.to(dtype)
    if fixed:
        for name, p in model.named_parameters():
            p.data = p.data.float()
            p.requires_grad_(".a." in name or ".b." in name or name.startswith("2."))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def data(i):
        x = noise(20, 24, key=(72, i))
        return x, x[:, :5].argmax(-1)

    def loss_of(x, label):
        return F.cross_entropy(model(x if fixed else x.to(dtype)).float(), label)

    return usual(model, optimizer, data, loss_of, dtype if fixed else torch.float32)


class Diffuser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 16)
        self.net = nn.Sequential(nn.Linear(24, 32), nn.SiLU(), nn.Linear(32, 8))

    def forward(self, x, t):
        return self.net(torch.cat([x, torch.sin(self.time(t))], -1))


def tiny_loss_weight_and_default_eps(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """The loss is weighted by 1e-9, so sqrt(v) is 1e-11 beside eps = 1e-8: updates are a thousandth of lr, in fp32 as well."""
    model = Diffuser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    weight = 1.0 if fixed else 1e-9

    def data(i):
        t = torch.linspace(0.1, 0.9, 24)[:, None]
        clean, added = torch.tanh(noise(24, 1, key=(73, i)).repeat(1, 8)), noise(24, 8, key=(74, i))
        return clean * (1 - t) + added * t, t, added

    def loss_of(x, t, added):
        return weight * F.mse_loss(model(x, t), added)

    return usual(model, optimizer, data, loss_of, dtype)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(4, 12, 3, padding=1)
        self.norm = nn.BatchNorm1d(12)
        self.heads = nn.ModuleDict({"task": nn.Linear(12, 3)})

    def forward(self, x):
        return self.heads["task"](F.relu(self.norm(self.front(x))).mean(-1))


def large_eps_taken_from_a_recipe(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """eps = 1 from a recipe for another model, gradients of 1e-2: Adam is an SGD with a hundredth of the step."""
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-8 if fixed else 1.0)

    def data(i):
        label = torch.arange(18) % 3
        return noise(18, 4, 12, key=(75, i)) + (label - 1)[:, None, None], label

    def loss_of(x, label):
        return F.cross_entropy(model(x), label)

    return usual(model, optimizer, data, loss_of, dtype)


PROGRAMS = [
    *planted(
        model_half_with_adam,
        "adam_eps_underflow_fp16",
        "optimizer.eps",
        "optimizer",
        findings="EPS_UNDERFLOW NAN WEIGHT_NONFINITE",
        hazards="constant_lost",
        shows=lambda run: not run.weights_finite,
    ),
    *planted(
        adapters_kept_in_half,
        "adam_eps_underflow_fp16",
        "optimizer.eps",
        "optimizer",
        findings="EPS_UNDERFLOW WEIGHT_NONFINITE",
        hazards="constant_lost",
        shows=lambda run: not run.weights_finite,
    ),
    *planted(
        tiny_loss_weight_and_default_eps,
        "adam_eps_dominates",
        "optimizer.eps",
        "optimizer",
        findings="GRAD_VANISH",
        shows=lambda run: run.flat,
        precision_caused=False,
    ),
    *planted(
        large_eps_taken_from_a_recipe,
        "adam_eps_dominates",
        "optimizer.eps",
        "optimizer",
        shows=lambda run: run.flat,
        precision_caused=False,
    ),
]
