"""Weights and averages that stand still because bf16 cannot hold the small change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import Training, planted
from corpus.draws import generator
from corpus.loops import Run, low, named, supervised


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ffn(self.norm2(x))


class Chat(nn.Module):
    """A small language model."""

    def __init__(self, words: int = 24, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(words)))


def finetune(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A language model loaded in bf16 and tuned with AdamW at 1e-4: below half an ulp of every weight above 0.06."""
    model = Chat().to(torch.float32 if fixed else dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    follows = torch.randperm(24, generator=generator(61))

    def batch(i: int) -> list[Tensor]:
        words = torch.randint(24, (8, 12), generator=generator(62, i % 2))
        return [words, follows[words]]

    return supervised(model, optimizer, batch, lambda out, y: F.cross_entropy(out.flatten(0, 1).float(), y.flatten()), dtype)


class Calibrated(nn.Module):
    """A frozen backbone and a calibration of gain 1, stored in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.gain = nn.Parameter(torch.ones(128))
        self.head = nn.Linear(128, 1)
        self.backbone.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) * self.gain).squeeze(-1)


def recalibrate(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """SGD on bf16 weights of size 1 with steps near 1e-3: half an ulp is 2e-3 below 1 and 4e-3 above, so nothing ever changes."""
    model = Calibrated()
    nn.init.constant_(model.head.weight, 1.0)
    nn.init.constant_(model.head.bias, 8.0)
    model.to(torch.float32 if fixed else dtype)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2e-3)

    def batch(i: int) -> list[Tensor]:
        x = torch.rand(16, 1, 8, 8, generator=generator(63, i))
        return [x.to(model.gain.dtype), x.mean((1, 2, 3)) * 60 - 20]

    return supervised(model, optimizer, batch, lambda out, y: F.smooth_l1_loss(out.float(), y), dtype)


class Averaged(nn.Module):
    """A network and the running average of its weights, kept as buffers to be shipped."""

    def __init__(self, net: nn.Module, kept: torch.dtype) -> None:
        super().__init__()
        self.net = net
        self.ema = nn.Module()
        for name, p in net.named_parameters():
            self.ema.register_buffer(name.replace(".", "_"), p.detach().to(kept, copy=True))

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        for name, p in self.net.named_parameters():
            average = self.ema.get_buffer(name.replace(".", "_"))
            average.mul_(decay).add_(p.to(average.dtype), alpha=1 - decay)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def shipped_average(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """The averaged weights of a small generator are bf16 with decay 0.999: a thousandth of a change is below half an ulp."""
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = Averaged(net, torch.float32 if fixed else dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    relation = torch.randn(8, 4, generator=generator(64)) / 3

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 8, generator=generator(65, i))
        return [x, torch.tanh(x @ relation)]

    training = supervised(model, optimizer, batch, F.mse_loss, dtype)
    train = training.step

    def step(i: int) -> Tensor:
        loss = train(i)
        model.follow(0.999)
        return loss

    training.step = step
    return training


class MeanTeacher(nn.Module):
    """A student and its slowly following teacher, both part of the model."""

    def __init__(self, teacher: torch.dtype) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.teacher = copy.deepcopy(self.student).to(teacher).requires_grad_(False)

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        for old, new in zip(self.teacher.parameters(), self.student.parameters()):
            old.lerp_(new.to(old.dtype), 1 - decay)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def mean_teacher(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A teacher in bf16 with decay 0.998 does not follow; the consistency loss then holds the student back."""
    model = MeanTeacher(torch.float32 if fixed else dtype)
    optimizer = torch.optim.Adam(model.student.parameters(), lr=0.01)
    centres = torch.randn(3, 6, generator=generator(66)) * 2

    def step(i: int) -> Tensor:
        draw = generator(67, i)
        label = torch.randint(3, (32,), generator=draw)
        x = centres[label] + torch.randn(32, 6, generator=draw)
        optimizer.zero_grad()
        with low(dtype):
            with torch.no_grad():
                hint = model.teacher(x.to(model.teacher[0].weight.dtype)).float()
            out = model(x).float()
            loss = F.cross_entropy(out, label) + 0.1 * F.mse_loss(out, hint)
        loss.backward()
        optimizer.step()
        model.follow(0.998)
        return loss.detach()

    return Training(model, optimizer, step)


def stands_still(build: Callable[..., Training], part: str, share: float = 0.5) -> Callable[[Run], bool]:
    """That share of the elements of a part of the model is bit-identical to a fresh start."""

    def shows(run: Run) -> bool:
        torch.manual_seed(0)
        fresh = build().model.state_dict()
        now = {name: t for name, t in run.training.model.state_dict().items() if name.startswith(part)}
        same = sum(int((t.float() == fresh[name].float()).sum()) for name, t in now.items())
        return same > share * sum(t.numel() for t in now.values())

    return shows


AVERAGED = tuple(f"ema.{layer}_{kind}" for layer in (0, 2) for kind in ("weight", "bias"))
TEACHER = tuple(f"teacher.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias"))

PROGRAMS = [
    *planted(
        finetune,
        "update_lost",
        *named(Chat(), "optimizer", "optimizer.lr"),
        findings="LOST_UPDATE",
        hazards="update_lost",
        shows=stands_still(finetune, ""),
        steps=30,
    ),
    *planted(
        recalibrate,
        "update_lost",
        *("gain", "head.weight", "head.bias", "optimizer", "optimizer.lr"),
        findings="LOST_UPDATE",
        hazards="update_lost",
        shows=lambda run: run.all_still,
        steps=30,
    ),
    *planted(
        shipped_average,
        "ema_stagnation",
        *("ema", "loop:ema", *AVERAGED),
        hazards="average",
        fixed_names=True,
        shows=stands_still(shipped_average, "ema"),
        steps=40,
    ),
    *planted(
        mean_teacher,
        "ema_stagnation",
        *("teacher", "teacher.0", "teacher.2", "loop:ema", *TEACHER),
        hazards="average",
        shows=stands_still(mean_teacher, "teacher"),
        steps=40,
    ),
]
