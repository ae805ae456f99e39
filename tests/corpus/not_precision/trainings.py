"""Trouble that looks like low precision and is not: the same program fails in fp32."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from corpus import Training, planted
from corpus.draws import generator
from corpus.loops import Run, ends_above, supervised


def digits(draw: torch.Generator, label: Tensor) -> Tensor:
    """Noisy pictures of two patterns."""
    stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(8, 8)
    return torch.stack([stripes, stripes.t()])[label][:, None] + 0.5 * torch.randn(len(label), 1, 8, 8, generator=draw)


def hot_convnet(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A CNN at learning rate 2.2 with momentum: the third loss is a million times the first."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if fixed else 2.2, momentum=0.9)
    code = torch.randn(2, 4, generator=generator(71)) * 2

    def batch(i: int) -> list[Tensor]:
        draw = generator(72, i)
        label = torch.randint(2, (16,), generator=draw)
        return [digits(draw, label), code[label]]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


def warm_up_too_far(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """A linear warm-up that does not stop: after some twenty good steps the rate is beyond what the problem bears."""
    model = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
    relation = torch.randn(12, 1, generator=generator(73))

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 12, generator=generator(74, i))
        return [x, x @ relation]

    training = supervised(model, optimizer, batch, F.mse_loss, dtype, scaler)
    train = training.step

    def step(i: int) -> Tensor:
        optimizer.param_groups[0]["lr"] = 0.005 * min(i + 1, 8 if fixed else 10**6) * (1 if fixed else 1 + i / 4)
        return train(i)

    training.step = step
    return training


def milestones_per_batch(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Milestones that count epochs, stepped after every batch: the rate is a hundredth of its start at the fourth."""
    model = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4], gamma=0.1)
    relation = torch.randn(12, 1, generator=generator(75))

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 12, generator=generator(76, i))
        return [x, x @ relation]

    training = supervised(model, optimizer, batch, F.mse_loss, dtype)
    train = training.step

    def step(i: int) -> Tensor:
        loss = train(i)
        if not fixed or i % 30 == 29:
            scheduler.step()
        return loss

    training.step = step
    return training


class Recurrence(nn.Module):
    """h <- relu(U h + W x), the plainest recurrent net."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.cell = nn.ModuleDict({"input": nn.Linear(3, 16), "recurrent": nn.Linear(16, 16, bias=False)})
        self.readout = nn.Linear(16, 1)
        nn.init.orthogonal_(self.cell["recurrent"].weight, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 16)
        for t in range(x.shape[1]):
            h = torch.relu(self.cell["recurrent"](h) + self.cell["input"](x[:, t]))
        return self.readout(h).squeeze(-1)


def plain_rnn(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """A recurrent weight of gain 2.5 over 40 steps: the state, and with it loss and gradient, grow by powers."""
    model = Recurrence(0.9 if fixed else 2.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(16, 40, 3, generator=generator(75, i))
        return [x, x[:, -3:].mean((1, 2))]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class DeepStack(nn.Module):
    def __init__(self, gain: float, depth: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.out = nn.Linear(16, 1)
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
        return self.out(x).squeeze(-1)


def deep_stack(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Sixteen layers initialised with gain 5: each multiplies the signal by three, forward and backward."""
    model = DeepStack(1.4 if fixed else 5.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    relation = torch.randn(16, generator=generator(76)) / 2

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 16, generator=generator(77, i))
        return [x, x @ relation]

    return supervised(model, optimizer, batch, F.smooth_l1_loss, dtype, clip=1.0)


def dead_layer(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """The third layer of an MLP was left with a bias of -12 by an earlier accident: no unit of it ever fires."""
    model = nn.Sequential()
    for width in (8, 24, 24, 24):
        model.append(nn.Linear(width, 24))
        model.append(nn.ReLU())
    model.append(nn.Linear(24, 1))
    if not fixed:
        nn.init.constant_(model[4].bias, -12.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    relation = torch.randn(8, generator=generator(78))

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 8, generator=generator(79, i))
        return [x, torch.tanh(x @ relation)]

    return supervised(model, optimizer, batch, lambda out, y: F.mse_loss(out.squeeze(-1), y), dtype)


class Generator(nn.Module):
    """A small autoencoder of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, stride=4), nn.ReLU())
        self.decoder = nn.ConvTranspose2d(8, 1, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def raw_pixels(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Pixels from 0 to 255 were fed with weights that learned on -1..1 and lean to the negative: every encoder unit is off."""
    model = Generator()
    model.encoder[0].weight.data.sub_(0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def batch(i: int) -> list[Tensor]:
        draw = generator(80, i)
        x = digits(draw, torch.randint(2, (16,), generator=draw))
        seen = x if fixed else (x + 3) * 42
        return [seen, x]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


def broken_sensor(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """One row of the seventh batch has a missing reading, which the file reader turned into NaN."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    relation = torch.randn(6, generator=generator(81))

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 6, generator=generator(82, i))
        y = torch.tanh(x @ relation)[:, None]
        if i == 7:
            x[5, 2] = math.nan
        keep = x.isfinite().all(1) if fixed else torch.ones(32, dtype=torch.bool)
        return [x[keep], y[keep]]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


def infinite_label(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Targets are logarithms of counts, and one count is 0: every epoch meets -inf."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scaler = GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
    relation = torch.randn(6, generator=generator(83))

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 6, generator=generator(84, i % 4))
        counts = (x @ relation).abs() + 1
        if i % 4 == 2:
            counts[11] = 0
        return [x, (torch.log1p(counts) if fixed else torch.log(counts))[:, None]]

    return supervised(model, optimizer, batch, F.mse_loss, dtype, scaler)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.tower(a) - self.tower(b)


def identical_pair(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Metric learning: from step 5 on a batch holds a duplicate, whose distance is sqrt(0)."""
    model = Siamese()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def batch(i: int) -> list[Tensor]:
        draw = generator(85, i)
        a, b = torch.randn(32, 6, generator=draw), torch.randn(32, 6, generator=draw)
        same = torch.arange(32) < 16
        b[same] = a[same] + 0.1 * b[same]
        if i >= 5:
            b[3] = a[3]
        return [a, b, same.float()]

    def criterion(gap: Tensor, same: Tensor) -> Tensor:
        gap = gap.float()
        distance = torch.linalg.vector_norm(gap, dim=-1) if fixed else gap.square().sum(-1).sqrt()
        return (same * distance + (1 - same) * F.relu(2 - distance)).mean()

    return supervised(model, optimizer, batch, criterion, dtype)


class Standardize(nn.Module):
    """Divides by the standard deviation over the channels."""

    def __init__(self, safe: bool) -> None:
        super().__init__()
        self.safe = safe

    def forward(self, x: Tensor) -> Tensor:
        centred = x.float() - x.float().mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + 1e-5) if self.safe else centred / (torch.sqrt(variance) + 1e-5)


class PaddedText(nn.Module):
    """Padding has a zero embedding that stays zero, and so has no spread."""

    def __init__(self, safe: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.lift = nn.Linear(8, 8, bias=False)
        self.scale = Standardize(safe)
        self.out = nn.Linear(8, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.scale(self.lift(self.embed(words))).mean(1))


def padded_text(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """The spread of a constant row is sqrt(0), whose derivative is inf: the padding makes every gradient before it NaN."""
    model = PaddedText(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def batch(i: int) -> list[Tensor]:
        draw = generator(86, i)
        label = torch.randint(2, (16,), generator=draw)
        words = torch.randint(1, 11, (16, 10), generator=draw) + 9 * label[:, None]
        words[::3, 7:] = 0
        return [words, label]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype)


class SigmoidTower(nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(14))
        self.out = nn.Linear(16, 2)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sigmoid(layer(F.layer_norm(x, (16,)))) if self.residual else torch.sigmoid(layer(x))
        return self.out(F.layer_norm(x, (16,)) if self.residual else x)


def sigmoid_tower(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """Fourteen sigmoid layers: a gradient of 1e-1 at the end is 1e-13 at the beginning, in fp32 as well."""
    model = SigmoidTower(fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    relation = torch.randn(16, generator=generator(87))

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 16, generator=generator(88, i))
        return [x, (x @ relation > 0).long()]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype)


class Attend(nn.Module):
    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.scaled:
            q, k = F.layer_norm(q.float(), q.shape[-1:]), F.layer_norm(k.float(), k.shape[-1:])
        scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5 if self.scaled else 1)
        return scores.softmax(-1) @ v


class Reader(nn.Module):
    """Two steps per token, an attention between them, and an answer read off the first token."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.trunk = nn.ModuleList([nn.Linear(16, 16), Attend(16, scaled), nn.Linear(16, 16)])
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.trunk:
            x = x + layer(x)
        return self.out(x[:, 0]).squeeze(-1)


def one_hot_attention(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """An attention with large weights and no 1/sqrt(d): scores of several hundred make it one-hot, so it cannot average."""
    model = Reader(fixed)
    model.trunk[1].qkv.weight.data[:32].mul_(12)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 12, 4, generator=generator(89, i))
        return [x, x.mean((1, 2)) * 3]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


def grows(run: Run) -> bool:
    """The loss ends not finite, or a thousand times above where it began."""
    return not run.losses[-1] < 1000 * run.losses[0]


def not_finite(run: Run) -> bool:
    return not (run.finite and run.weights_finite)


LR = ("optimizer.lr", "optimizer")
TOWER = ("op:sigmoid", *(f"layers.{i}{kind}" for i in range(10) for kind in ("", ".weight", ".bias")))

PROGRAMS = [
    *planted(hot_convnet, "lr_too_high", *LR, findings="GRAD_EXPLOSION", shows=grows, precision_caused=False),
    *planted(warm_up_too_far, "lr_too_high", *LR, findings="GRAD_EXPLOSION", shows=grows, precision_caused=False, steps=40),
    *planted(
        milestones_per_batch,
        "lr_spent_early",
        "optimizer.lr",
        tools="diagnose",
        shows=ends_above(1.0),
        steps=60,
        precision_caused=False,
    ),
    *planted(
        plain_rnn,
        "exploding_recurrence",
        *("cell", "cell.recurrent", "cell.recurrent.weight", "op:relu", "op:add"),
        findings="GRAD_EXPLOSION",
        shows=ends_above(1e6),
        precision_caused=False,
    ),
    *planted(
        deep_stack,
        "exploding_recurrence",
        *(f"layers.{i}{kind}" for i in range(16) for kind in ("", ".weight")),
        findings="GRAD_EXPLOSION",
        shows=ends_above(1e3),
        precision_caused=False,
    ),
    *planted(dead_layer, "dead_relu", *("4", "5", "4.weight", "4.bias"), shows=ends_above(0.3), precision_caused=False, steps=40),
    *planted(
        raw_pixels,
        "dead_relu",
        *("encoder.0", "encoder.1", "encoder.0.weight", "encoder.0.bias", "data:input"),
        shows=ends_above(0.5),
        precision_caused=False,
        steps=40,
    ),
    *planted(
        broken_sensor,
        "data_nan",
        *("data:input", "data"),
        findings="INPUT_NONFINITE WEIGHT_NONFINITE",
        hazards="given_nonfinite",
        examined=7,
        shows=not_finite,
        precision_caused=False,
    ),
    *planted(
        infinite_label,
        "data_nan",
        *("data:target", "data", "op:log"),
        findings="INF",
        hazards="singular_backward",
        examined=2,
        shows=lambda run: sum(not math.isfinite(loss) for loss in run.losses) >= 5,
        precision_caused=False,
    ),
    *planted(
        identical_pair,
        "singular_gradient",
        "op:sqrt",
        findings="NAN WEIGHT_NONFINITE",
        hazards="singular_backward",
        examined=5,
        shows=not_finite,
        precision_caused=False,
    ),
    *planted(
        padded_text,
        "singular_gradient",
        *("scale", "op:sqrt"),
        findings="NAN WEIGHT_NONFINITE",
        hazards="singular_backward",
        shows=not_finite,
        precision_caused=False,
    ),
    *planted(
        sigmoid_tower,
        "vanishing_architecture",
        *TOWER,
        findings="GRAD_VANISH",
        shows=ends_above(0.66),
        precision_caused=False,
        steps=40,
    ),
    *planted(
        one_hot_attention,
        "attention_entropy_collapse",
        *("trunk.1", "trunk.1.qkv", "trunk.1.qkv.weight"),
        shows=ends_above(0.1),
        precision_caused=False,
        steps=40,
    ),
]
