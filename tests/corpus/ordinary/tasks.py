"""Healthy trainings of many kinds: recurrent, graph, flow, diffusion, contrastive, detection, reinforcement."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from corpus import Training, healthy
from corpus.draws import generator
from corpus.loops import low, supervised


class Tagger(nn.Module):
    """An LSTM over padded sentences, in fp32 because not every CPU has a bf16 kernel for it; the rest under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 16, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(32, 3)

    def forward(self, words: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            states = self.lstm(self.embed(words))[0]
        return self.tag(states).flatten(0, 1)


def lstm_with_padding(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Half of every sentence is padding, whose labels are ignored and whose embedding never moves."""
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def batch(i: int) -> list[Tensor]:
        words = torch.randint(1, 20, (8, 12), generator=generator(101, i))
        words[::2, 6:] = 0
        return [words, torch.where(words == 0, -100, words % 3).flatten()]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype, clip=1.0)


class Tied(nn.Module):
    """One matrix is the first and the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.mix = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.head(x + self.mix(x))


def tied_weights(dtype: torch.dtype = torch.float16) -> Training:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    follows = torch.randperm(24, generator=generator(102))

    def batch(i: int) -> list[Tensor]:
        words = torch.randint(24, (32,), generator=generator(103, i))
        return [words, follows[words]]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype, GradScaler("cpu", init_scale=2.0**12))


class ResidualConv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        nn.init.zeros_(self.bn2.weight)  # the branch begins at zero

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())))


def resnet(dtype: torch.dtype = torch.float16) -> Training:
    """Batch norm in fp16, zero-initialised last gain, dropout before the head, ReLU with half of its outputs zero."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        ResidualConv(8),
        nn.MaxPool2d(2),
        ResidualConv(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(8, 8)

    def batch(i: int) -> list[Tensor]:
        draw = generator(104, i)
        label = torch.randint(2, (16,), generator=draw)
        return [torch.stack([stripes, stripes.t()])[label][:, None] + torch.randn(16, 1, 8, 8, generator=draw), label]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype, GradScaler("cpu", init_scale=2.0**12))


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 8))
        self.decode = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.encode(x).float().chunk(2, -1)
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(-1).mean()
        return self.decode(mean + torch.randn_like(mean) * (0.5 * logvar).exp()), kl


def vae(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Log-variances and their divergence in fp32."""
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    basis = torch.randn(3, 10, generator=generator(105))

    def batch(i: int) -> list[Tensor]:
        x = torch.tanh(torch.randn(32, 3, generator=generator(106, i)) @ basis)
        return [x, x]

    return supervised(model, optimizer, batch, lambda out, x: F.mse_loss(out[0], x) + 1e-2 * out[1], dtype)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.out = nn.Linear(6, 16), nn.Linear(22, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        sent = self.message(x[source]).relu().float()
        received = torch.zeros(len(x), 16).index_add(0, target, sent)
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target))).clamp_min(1)
        return self.out(self.update(torch.cat([x, received / degree[:, None]], -1)).relu()).squeeze(-1)


def graph_with_a_hub(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Node 0 has 400 of 500 edges; messages are summed in fp32."""
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def batch(i: int) -> list[Tensor]:
        draw = generator(107, i)
        x = torch.randn(60, 6, generator=draw)
        edges = torch.randint(60, (2, 500), generator=draw)
        edges[1, :400] = 0
        return [x, edges, torch.tanh(x[:, 0] + x[:, 1])]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class Denoiser(nn.Module):
    """The timestep is an integer until its phase is taken in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(16, 16)
        self.net = nn.Sequential(nn.Linear(4 + 16, 48), nn.SiLU(), nn.Linear(48, 4))
        self.register_buffer("frequencies", torch.exp(-math.log(10000) * torch.arange(8) / 8))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        phase = t.float()[:, None] * self.frequencies
        return self.net(torch.cat([x, self.time(torch.cat([phase.sin(), phase.cos()], -1))], -1))


def diffusion(dtype: torch.dtype = torch.bfloat16) -> Training:
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    signal = torch.cos(torch.linspace(0, math.pi / 2, 1000)).square()

    def batch(i: int) -> list[Tensor]:
        draw = generator(108, i)
        clean = torch.randint(0, 2, (32, 4), generator=draw) * 2.0 - 1
        t, noise = torch.randint(1000, (32,), generator=draw), torch.randn(32, 4, generator=draw)
        a = signal[t][:, None]
        return [a.sqrt() * clean + (1 - a).sqrt() * noise, t, noise]

    return supervised(model, optimizer, batch, F.mse_loss, dtype)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16))
        self.log_scale = nn.Parameter(torch.tensor(math.log(20.0)))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = F.normalize(self.image(image).float(), dim=-1), F.normalize(self.text(text).float(), dim=-1)
        return self.log_scale.exp().clamp(max=100.0) * (a @ b.t())


def contrastive(dtype: torch.dtype = torch.float16) -> Training:
    """Cosines times 20 and more: sharp logits, norms in fp32."""
    model = TwoTowers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    see, read = torch.randn(5, 8, generator=generator(109)), torch.randn(5, 6, generator=generator(110))

    def batch(i: int) -> list[Tensor]:
        meaning = torch.randn(16, 5, generator=generator(111, i))
        return [meaning @ see, meaning @ read, torch.arange(16)]

    return supervised(model, optimizer, batch, F.cross_entropy, dtype, GradScaler("cpu", init_scale=2.0**12))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.score, self.box = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 2, 1)
        nn.init.constant_(self.score.bias, -4.0)  # nearly all places are empty

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)
        return self.score(features).squeeze(1), self.box(features)


def detector_of_rare_objects(dtype: torch.dtype = torch.float16) -> Training:
    """One of 64 places holds an object; box gradients are zero in all others, and some batches are empty."""
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def batch(i: int) -> list[Tensor]:
        draw = generator(112, i)
        x, target = 0.3 * torch.randn(8, 1, 8, 8, generator=draw), torch.zeros(8, 8, 8)
        for row in range(0 if i % 7 == 3 else 8):
            a, b = torch.randint(8, (2,), generator=draw).tolist()
            x[row, 0, a, b] += 3
            target[row, a, b] = 1
        return [x, target]

    def criterion(out: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        score, box = out
        objects = F.binary_cross_entropy_with_logits(score, target, pos_weight=torch.tensor(8.0))
        return objects + (target[:, None] * (box.float() - 0.5).abs()).sum() / target.sum().clamp_min(1)

    return supervised(model, optimizer, batch, criterion, dtype, GradScaler("cpu", init_scale=2.0**12))


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, -1)
        log_scale, shift = self.net(kept).float().chunk(2, -1)
        log_scale = torch.tanh(log_scale)
        return torch.cat([moved * log_scale.exp() + shift, kept], -1), log_scale.sum(-1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Log-likelihood, in fp32."""
        total = torch.zeros(len(x))
        for layer in self.layers:
            x, logdet = layer(x)
            total = total + logdet
        return total - 0.5 * x.square().sum(-1)


def flow(dtype: torch.dtype = torch.bfloat16) -> Training:
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def batch(i: int) -> list[Tensor]:
        x = torch.randn(32, 4, generator=generator(113, i))
        x = torch.stack([x[:, 0] * 3, x[:, 1] + x[:, 0], x[:, 2] * 0.3, x[:, 3]], -1)
        return [x, x]

    return supervised(model, optimizer, batch, lambda likelihood, x: -likelihood.mean(), dtype)


def q_learning(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Targets outside autocast, from a copy that is replaced every ten steps."""
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    def step(i: int) -> Tensor:
        draw = generator(114, i)
        state, action = torch.randn(32, 4, generator=draw), torch.randint(3, (32, 1), generator=draw)
        after = 0.9 * state + 0.1 * torch.randn(32, 4, generator=draw)
        with torch.no_grad():
            wanted = (state[:, :1] > 0).float() + 0.5 * target(after).amax(-1, keepdim=True)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.smooth_l1_loss(model(state).gather(-1, action), wanted)
        loss.backward()
        optimizer.step()
        if i % 10 == 9:
            target.load_state_dict(model.state_dict())
        return loss.detach()

    return Training(model, optimizer, step)


PROGRAMS = [
    *healthy(lstm_with_padding),
    *healthy(tied_weights, steps=30),
    *healthy(resnet),
    *healthy(vae, steps=30),
    *healthy(graph_with_a_hub, steps=30),
    *healthy(diffusion, steps=40),
    *healthy(contrastive),
    *healthy(detector_of_rare_objects, steps=24),
    *healthy(flow, steps=30),
    *healthy(q_learning, steps=40, fixed_names=True),
]
