"""Planted overflow of products and squares: areas, distances, hand-written norms, clipping in half."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from corpus import WIDE, Training, planted
from corpus.draws import noise
from corpus.loops import usual


class Detector(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(24, width), nn.ReLU())
        self.box = nn.Linear(width, 4)

    def forward(self, x):
        return F.softplus(self.box(self.backbone(x)))


def overlap_of_boxes(a, b):
    """IoU of boxes that share their upper left corner: (width, height) in pixels."""
    shared = torch.minimum(a, b)
    inner = shared[..., 0] * shared[..., 1]
    return inner / (a[..., 0] * a[..., 1] + b[..., 0] * b[..., 1] - inner)


def box_area_in_pixels(fixed: bool = False, dtype: torch.dtype = torch.float16, rows: int = 16, width: int = 32) -> Training:
    """Boxes of 640 x 480 pixels have an area of 307,200: inf in fp16, and inf / inf is NaN."""
    model = Detector(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def data(i):
        size = noise(rows, 2, key=(18, i)).sigmoid() * 300 + torch.tensor([400.0, 300.0])
        return size.repeat(1, 12) / 640 + 0.05 * noise(rows, 24, key=(19, i)), size

    def loss_of(x, size):
        predicted = model(x)[:, :2] * (1.0 if fixed else 640.0)
        wanted = size.to(predicted.dtype) / (640.0 if fixed else 1.0)
        return 1 - overlap_of_boxes(predicted, wanted).float().mean()

    return usual(model, optimizer, data, loss_of, dtype)


class Relation(nn.Module):
    """Pairwise squared distances of projected points, in metres of a city-wide frame."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.project = nn.Linear(3, 3)
        self.wide = wide

    def forward(self, points):
        p = self.project(points)
        gap = (p.float() if self.wide else p).unsqueeze(2) - (p.float() if self.wide else p).unsqueeze(1)
        return torch.log1p((gap * gap).amax(-1))


class PointNet(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16))
        self.relation = Relation(wide)
        self.head = nn.Linear(16 + 8, 4)

    def forward(self, points):
        near = self.relation(points).mean(1)
        return self.head(torch.cat([self.lift(points / 500).amax(1), near.to(points.dtype)], -1))


def squared_distances_in_a_point_cloud(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Scans grow from 60 m to 900 m across; from step 7 on, squared gaps leave fp16 inside `relation`."""
    model = PointNet(wide=fixed)
    with torch.no_grad():
        model.relation.project.weight.copy_(torch.eye(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def data(i):
        label = torch.arange(12) % 4
        size = 20.0 + 50 * max(0, i - 6)
        points = noise(12, 8, 3, key=(20, i)) * size * (0.3 + label[:, None, None] / 4)
        return points, label

    def loss_of(points, label):
        return F.cross_entropy(model(points), label)

    return usual(model, optimizer, data, loss_of, dtype)


class HandNorm(nn.Module):
    def __init__(self, width: int, wide: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.wide = wide

    def forward(self, x):
        seen = x.float() if self.wide else x
        return (seen * torch.rsqrt(seen.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight.to(x.dtype)


class GptBlock(nn.Module):
    def __init__(self, width: int, wide: bool) -> None:
        super().__init__()
        self.norm = HandNorm(width, wide)
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.norm(x)
        h = torch.cat([h[:, :1], (h[:, 1:] + h[:, :-1]) / 2], 1)
        return x + self.down(F.gelu(self.up(self.mix(h))))


class Gpt(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(30, 32)
        self.enter = nn.Linear(32, 32)
        self.layers = nn.ModuleList(GptBlock(32, wide) for _ in range(3))
        self.head = nn.Linear(32, 30)

    def forward(self, ids):
        x = self.enter(self.token(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def hand_written_rms_norm(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """One massive channel (300) leaves block 0: its square is inf in the next norm, rsqrt(inf) is 0, block 1 puts out nothing."""
    model = Gpt(wide=fixed)
    with torch.no_grad():
        model.layers[0].down.bias[3] = 300.0
        model.head.weight[:, 3] = 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def data(i):
        start = (noise(8, 1, key=(21, i)).abs() * 20).long()
        return ((start + torch.arange(13)) % 30,)

    def loss_of(ids):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return usual(model, optimizer, data, loss_of, dtype)


class UnitLength(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, x):
        x = x.float() if self.wide else x
        return x / (x * x).sum(-1, keepdim=True).sqrt()


class Twins(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))
        self.unit = UnitLength(wide)

    def forward(self, x):
        return self.unit(self.tower(x))


def contrastive_unit_length(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Spectra of a thousand counts: the squared length is inf, every embedding is 0 and the loss stays ln 16."""
    model = Twins(wide=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def data(i):
        base = noise(16, 20, key=(22, i)) * 1000
        return base, base + 300 * noise(16, 20, key=(23, i))

    def loss_of(one, two):
        alike = model(one) @ model(two).T / 0.2
        return F.cross_entropy(alike, torch.arange(16))

    return usual(model, optimizer, data, loss_of, dtype)


def clip_norm_in_half(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """A pure fp16 model whose gradients are clipped by hand: squares sum to inf, the coefficient is 0, nothing moves."""
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 8)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    relation = noise(16, 8, key=(24,)) * 20

    def step(i):
        x = noise(32, 16, key=(25, i))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.to(dtype)).float(), x @ relation, reduction="sum") / 8
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        squares = [(g.float() if fixed else g).pow(2).sum() for g in grads]
        norm = torch.stack(squares).sum().sqrt()
        for g in grads:
            g.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


class Friends(nn.Module):
    """Two rounds of messages over a graph, all in one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(nn.Linear(24, 12) for _ in range(2))
        self.age = nn.Linear(12, 1)

    def forward(self, x, near):
        for layer in self.rounds:
            x = torch.tanh(layer(torch.cat([x, near @ x], -1)))
        return self.age(x).squeeze(-1)


def library_clip_of_half_gradients(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Pure fp16 and a scale of 2,048 by hand: the norm of the scaled gradients passes 65,504, so clip_grad_norm_ gets inf."""
    model = Friends().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    scale = 4.0 if fixed else 2048.0

    def step(i):
        x = noise(30, 12, key=(26, i))
        near = (noise(30, 30, key=(27, i)) > 1).to(dtype) / 5
        age = 30 + 10 * x[:, 0]
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(model(x.to(dtype), near).float(), age, reduction="sum")
        (loss * scale).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0 * scale)
        for p in model.parameters():
            p.grad.div_(scale)
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


PROGRAMS = [
    *planted(
        box_area_in_pixels,
        "product_overflow_fp16",
        "op:mul",
        findings="OVERFLOW SCALE_COLLAPSE",
        sizes=WIDE,
        hazards="overflow",
        shows=lambda run: run.stuck,
    ),
    *planted(
        squared_distances_in_a_point_cloud,
        "product_overflow_fp16",
        "relation",
        findings="INF NAN OVERFLOW SCALE_COLLAPSE SCALE_DECLINE",
        hazards="overflow",
        examined=7,
        shows=lambda run: run.stuck,
        steps=24,
    ),
    *planted(
        hand_written_rms_norm,
        "norm_square_overflow_fp16",
        "layers.1.norm",
        "layers.2.norm",
        findings="UNDERFLOW",
        hazards="overflow",
        examined=12,
        shows=lambda run: {"layers.1.mix.weight", "layers.2.mix.weight"} <= run.still and run.finite,
    ),
    *planted(
        contrastive_unit_length,
        "norm_square_overflow_fp16",
        "unit",
        findings="UNDERFLOW",
        hazards="overflow",
        shows=lambda run: run.all_still and run.finite,
    ),
    *planted(
        library_clip_of_half_gradients,
        "grad_norm_overflow_fp16",
        "loop:clip",
        hazards="overflow",
        shows=lambda run: run.all_still and run.finite,
    ),
    *planted(
        clip_norm_in_half,
        "grad_norm_overflow_fp16",
        "loop:clip",
        hazards="overflow",
        shows=lambda run: run.all_still and run.finite,
    ),
]
