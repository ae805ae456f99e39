"""Planted overflow that comes with the data: glaring samples that poison BatchNorm, features beyond the range."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from corpus import Training, planted
from corpus.draws import noise
from corpus.loops import usual
from corpus.overflow.layers import images


class Hdr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.down(self.stem(x)).mean((2, 3)))


def one_glaring_photo_poisons_batch_norm(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Step 9 brings a photo with a sun of 60,000: the scaler skips the step, the running statistics keep the inf."""
    model = Hdr()
    with torch.no_grad():
        model.stem[0].weight.mul_(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def data(i):
        x, label = images(i)
        if i == 9:
            x[3, :, 4:8, 4:8] = 60_000.0
        return (x.clamp(-10, 10) if fixed else x), label

    def loss_of(x, label):
        return F.cross_entropy(model(x), label)

    return usual(model, optimizer, data, loss_of, dtype)


class Voices(nn.Module):
    """Filters, their power, and a convolution with BatchNorm over it."""

    def __init__(self) -> None:
        super().__init__()
        self.mel = nn.Conv1d(8, 12, 3, padding=1)
        self.trunk = nn.Sequential(nn.ReLU(), nn.Conv1d(12, 12, 3, padding=1))
        self.tail = nn.ModuleList([nn.Conv1d(12, 12, 3, padding=1), nn.BatchNorm1d(12)])
        self.speaker = nn.Linear(12, 4)

    def forward(self, x):
        x = self.trunk(self.mel(x))
        x = self.tail[1](self.tail[0](x * x))
        return self.speaker(F.relu(x).mean(-1))


def loud_clips_in_the_first_steps_poison_a_late_norm(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The first two batches hold a click of 4,000; its power overflows, and the norm behind the last convolution keeps it."""
    model = Voices()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def data(i):
        who = torch.arange(12) % 4
        x = noise(12, 8, 20, key=(8, i)) + F.one_hot(who, 8)[:, :, None]
        if i < 2:
            x[5, :, 9] = 4000.0
        return (x.clamp(-8, 8) if fixed else x), who

    def loss_of(x, who):
        return F.cross_entropy(model(x), who)

    return usual(model, optimizer, data, loss_of, dtype)


class Credit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Embedding(12, 8)
        self.numeric = nn.Linear(5, 24)
        self.norm = nn.BatchNorm1d(24)
        self.tower = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, numbers, branch):
        joint = torch.cat([self.norm(self.numeric(numbers).float()).relu(), self.branch(branch)], -1)
        return self.tower(joint).squeeze(-1)


def balances_in_dollars(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Account balances up to millions go into the first layer as they are: autocast turns them into inf."""
    model = Credit()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def data(i):
        z = noise(32, 5, key=(6, i))
        numbers = z * torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])
        numbers[:, 3] = 20_000 * torch.exp(1.5 * z[:, 3])
        default = (z[:, 3] < 0).float()
        if fixed:
            numbers[:, 3] = torch.log(numbers[:, 3]) - 10
        return numbers, torch.arange(32) % 12, default

    def loss_of(numbers, branch, default):
        return F.binary_cross_entropy_with_logits(model(numbers, branch), default)

    return usual(model, optimizer, data, loss_of, dtype)


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale_in = nn.Linear(3, 16)
        self.norm = nn.LayerNorm(16)
        self.cell = nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, series):
        return self.out(self.cell(self.norm(self.scale_in(series)))[0][:, -1]).squeeze(-1)


def traded_volumes_appear_at_listing(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Until step 8 the volumes are those of small shares; then a large one is listed: 250,000 pieces a day."""
    model = Volumes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def data(i):
        z = noise(16, 8, 3, key=(7, i))
        series = z * torch.tensor([1.0, 0.5, 1.0])
        series[..., 2] = 900 * torch.exp(0.5 * z[..., 2])
        if i >= 8:
            series[0, :, 2] += 250_000
        if fixed:
            series[..., 2] = torch.log(series[..., 2]) - 7
        return series, torch.tanh(z[:, -1, 0])

    def loss_of(series, target):
        return F.smooth_l1_loss(model(series), target)

    return usual(model, optimizer, data, loss_of, dtype)


PROGRAMS = [
    *planted(
        one_glaring_photo_poisons_batch_norm,
        "bn_stats_poisoned",
        "stem.1",
        "stem.1.running_var",
        "stem.1.running_mean",
        findings="BUFFER_NONFINITE OVERFLOW",
        survives=False,
        hazards="given_nonfinite",
        examined=10,
        shows=lambda run: run.weights_finite and not run.buffers_finite and run.skipped[9] and run.losses[-1] < run.losses[0],
    ),
    *planted(
        loud_clips_in_the_first_steps_poison_a_late_norm,
        "bn_stats_poisoned",
        "tail.1",
        "tail.1.running_var",
        "tail.1.running_mean",
        findings="BUFFER_NONFINITE OVERFLOW",
        survives=False,
        hazards="given_nonfinite",
        examined=2,
        shows=lambda run: run.weights_finite and not run.buffers_finite and run.losses[-1] < 1.4,
    ),
    *planted(
        balances_in_dollars,
        "input_out_of_range_fp16",
        "data:input",
        "data",
        "numeric",
        findings="BUFFER_NONFINITE NAN OVERFLOW SCALE_COLLAPSE",
        survives=False,
        hazards="overflow",
        shows=lambda run: run.stuck,
    ),
    *planted(
        traded_volumes_appear_at_listing,
        "input_out_of_range_fp16",
        "data:input",
        "data",
        "scale_in",
        findings="NAN OVERFLOW SCALE_DECLINE",
        survives=False,
        hazards="overflow",
        examined=8,
        shows=lambda run: run.stuck,
    ),
]
