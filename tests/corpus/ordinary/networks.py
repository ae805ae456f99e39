"""Healthy networks of many kinds at their initial weights: none may be accused."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from corpus import BF16, BOTH, Training, healthy
from corpus.architectures import ConvNet, Patches, Recurrent, Transformer, Variational, token_loss
from corpus.draws import noise, whole
from corpus.loops import network


def transformer(dtype: torch.dtype = BF16, layers: int = 6, width: int = 32, vocabulary: int = 50) -> Training:
    ids = whole(vocabulary, 4, 16)
    return network(Transformer(layers, width, vocabulary), ids, token_loss, ids, dtype)


def convnet(dtype: torch.dtype = BF16) -> Training:
    return network(ConvNet(), noise(4, 3, 12, 12, key=4), F.cross_entropy, whole(10, 4), dtype)


def recurrent(dtype: torch.dtype = BF16) -> Training:
    ids = whole(30, 4, 10)
    return network(Recurrent(), ids, token_loss, ids, dtype)


def vision(dtype: torch.dtype = BF16) -> Training:
    return network(Patches(), noise(4, 3, 16, 16, key=4), F.cross_entropy, whole(10, 4), dtype)


def _vae_loss(out, x):
    divergence = -0.5 * (1 + out["logvar"] - out["mean"] ** 2 - out["logvar"].exp()).mean()
    return F.mse_loss(out["reconstruction"], x) + divergence


def variational(dtype: torch.dtype = BF16) -> Training:
    x = noise(8, 48, key=4)
    return network(Variational(), x, _vae_loss, x, dtype)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def rotated(self, x, angles):
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(x.dtype)

    def forward(self, x, angles):
        b, t, w = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(self.rotated(q, angles), self.rotated(k, angles), v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).reshape(b, t, w))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Rotary positions in FP32, gated feed-forward, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(60, 32)
        nn.init.normal_(self.token.weight, std=0.02)
        self.blocks = nn.ModuleList(LlamaBlock(32, 4) for _ in range(4))
        self.norm = RmsNorm(32)

    def forward(self, ids):
        rates = 10000.0 ** (-torch.arange(4) / 4)
        angles = torch.arange(ids.shape[1])[:, None].float() * rates
        x = self.token(ids)
        for block in self.blocks:
            x = block(x, angles)
        return F.linear(self.norm(x), self.token.weight)


def llama(dtype: torch.dtype = BF16) -> Training:
    ids = whole(60, 3, 20)
    return network(Llama(), ids, token_loss, ids, dtype)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def block(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU(), nn.Conv2d(b, b, 3, padding=1))

        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down1, self.down2, self.mid = block(1, 16), block(16, 16), block(16, 16)
        self.up2, self.up1, self.out = block(32, 16), block(32, 16), nn.Conv2d(16, 1, 1)

    def forward(self, x, t):
        rates = torch.exp(-math.log(1000.0) * torch.arange(8) / 8)
        angles = t.float()[:, None] * rates
        emb = self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        a = self.down1(x)
        b = self.down2(F.avg_pool2d(a, 2)) + emb
        m = F.interpolate(self.mid(F.avg_pool2d(b, 2)), scale_factor=2)
        return self.out(self.up1(torch.cat([F.interpolate(self.up2(torch.cat([m, b], 1)), scale_factor=2), a], 1)))


def unet_that_denoises(dtype: torch.dtype = BF16) -> Training:
    return network(
        UNet(), (noise(4, 1, 8, 8, key=4), torch.tensor([1, 250, 600, 999])), F.mse_loss, noise(4, 1, 8, 8, key=4), dtype
    )


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.cell, self.head = nn.Embedding(20, 12), nn.GRUCell(12, 16), nn.Linear(16, 20)

    def forward(self, ids):
        h, out = torch.zeros(len(ids), 16), []
        for t in range(ids.shape[1]):
            h = self.cell(self.token(ids[:, t]), h)
            out.append(self.head(h))
        return torch.stack(out, 1)


def gru(dtype: torch.dtype = BF16) -> Training:
    ids = whole(20, 4, 15)
    return network(Gru(), ids, token_loss, ids, dtype)


class Mixture(nn.Module):
    """A router in FP32 and weighted experts."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.router = nn.Linear(8, 16), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = F.gelu(self.lift(x))
        with torch.autocast("cpu", enabled=False):
            weights = self.router(x.float()).softmax(-1)
        out = sum(weights[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        return self.head(x + out)


def weighted_experts(dtype: torch.dtype = BF16) -> Training:
    return network(Mixture(), noise(16, 8, key=4), F.cross_entropy, whole(3, 16), dtype)


class Clicks(nn.Module):
    """Embedding bags, pairwise dot products, a binary loss on logits."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.dense = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids, numbers):
        parts = torch.stack([self.dense(numbers), *(bag(ids[:, i]) for i, bag in enumerate(self.bags))], 1)
        i, j = torch.triu_indices(4, 4, 1)
        dots = (parts @ parts.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([parts[:, 0], dots], 1))[:, 0]


def clicks(dtype: torch.dtype = BF16) -> Training:
    y = (noise(16, key=4) > 0).float()
    return network(Clicks(), (whole(50, 16, 3, 4), noise(16, 5, key=4)), F.binary_cross_entropy_with_logits, y, dtype)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def gather(self, h, edges):
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]) / 4

    def forward(self, x, edges):
        h = F.relu(self.gather(self.first(x), edges))
        return self.head(F.relu(self.gather(self.second(h), edges)) + h)


def graph_sums(dtype: torch.dtype = BF16) -> Training:
    return network(Graph(), (noise(30, 6, key=4), whole(30, 2, 120)), F.cross_entropy, whole(3, 30), dtype)


class Contrast(nn.Module):
    """Normalised embeddings of two towers and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16))
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, text):
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return a @ b.t() * self.temperature.exp()


def contrast(dtype: torch.dtype = BF16) -> Training:
    return network(Contrast(), (noise(12, 20, key=4), noise(12, 12, key=4)), F.cross_entropy, torch.arange(12), dtype)


class Seq2Seq(nn.Module):
    """torch's own encoder and decoder layers, with causal and padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(30, 32)
        self.net = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, 30)

    def forward(self, source, target):
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = torch.zeros_like(source, dtype=torch.bool)
        padding[:, -2:] = True
        return self.head(self.net(self.token(source), self.token(target), tgt_mask=causal, src_key_padding_mask=padding))


def translation(dtype: torch.dtype = BF16) -> Training:
    ids = whole(30, 3, 9)
    return network(Seq2Seq(), (ids, ids), token_loss, ids, dtype)


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, 16, 1)
        make = nn.utils.parametrizations.weight_norm
        self.filters = nn.ModuleList(make(nn.Conv1d(16, 16, 2, dilation=2**i)) for i in range(4))
        self.gates = nn.ModuleList(make(nn.Conv1d(16, 16, 2, dilation=2**i)) for i in range(4))
        self.head = nn.Conv1d(16, 1, 1)

    def forward(self, x):
        x = self.lift(x)
        for f, g in zip(self.filters, self.gates):
            step = F.pad(x, (f.dilation[0], 0))
            x = x + torch.tanh(f(step)) * torch.sigmoid(g(step))
        return self.head(x)


def wave(dtype: torch.dtype = BF16) -> Training:
    return network(WaveNet(), noise(3, 1, 40, key=4), F.smooth_l1_loss, noise(3, 1, 40, key=4), dtype)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x):
        logdet = torch.zeros(len(x))
        for i, net in enumerate(self.nets):
            a, b = (x[:, :4], x[:, 4:]) if i % 2 else (x[:, 4:], x[:, :4])
            shift, scale = net(a).chunk(2, -1)
            scale = torch.tanh(scale.float())
            b = b * scale.exp() + shift
            logdet = logdet + scale.sum(-1)
            x = torch.cat([a, b] if i % 2 else [b, a], -1)
        return x, logdet


def coupling_flow(dtype: torch.dtype = BF16) -> Training:
    return network(Flow(), noise(16, 8, key=4), lambda out: (0.5 * out[0].float().square().sum(-1) - out[1]).mean(), None, dtype)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(5))
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(2))
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for i in range(2):
            x = x + self.tokens[i](self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x).mean(1))


def mixer(dtype: torch.dtype = BF16) -> Training:
    return network(Mixer(), noise(6, 3, 16, 16, key=4), F.cross_entropy, whole(10, 6), dtype)


class Mobile(nn.Module):
    """Depthwise convolutions, squeeze and excitation, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.depth = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1), nn.Hardsigmoid()
        )
        self.point = nn.Sequential(nn.Conv2d(16, 24, 1, bias=False), nn.BatchNorm2d(24))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(24, 10))

    def forward(self, x):
        x = self.depth(self.stem(x))
        return self.head(self.point(x * self.squeeze(x)))


def mobile(dtype: torch.dtype = BF16) -> Training:
    return network(
        Mobile(), noise(8, 3, 16, 16, key=4), lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), whole(10, 8), dtype
    )


class Scan(nn.Module):
    """A linear recurrence whose state is kept in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.gate, self.head = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x):
        u, a = self.lift(x).float(), torch.sigmoid(self.gate(x).float() + 2)
        state, out = torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            state = a[:, t] * state + (1 - a[:, t]) * u[:, t]
            out.append(state)
        return self.head(torch.stack(out, 1))


def scan(dtype: torch.dtype = BF16) -> Training:
    return network(Scan(), noise(4, 60, 4, key=4), F.mse_loss, noise(4, 60, 2, key=4), dtype)


class Reward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.ELU())
        self.score = nn.Linear(32, 1)

    def forward(self, better, worse):
        return self.score(self.body(better)) - self.score(self.body(worse))


def reward(dtype: torch.dtype = BF16) -> Training:
    return network(
        Reward(), (noise(16, 16, key=4), noise(16, 16, key=4).flip(0)), lambda out: -F.logsigmoid(out.float()).mean(), None, dtype
    )


class Tabular(nn.Module):
    """Whole-number features beyond 256 (ages in days, prices), standardised inside by a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.body = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.body(self.norm(x))


def tabular(dtype: torch.dtype = BF16) -> Training:
    return network(Tabular(), (noise(32, 6, key=4).abs() * 3000).round(), F.huber_loss, noise(32, 1, key=4), dtype)


def integer_features(dtype: torch.dtype = BF16) -> Training:
    """The same features, divided by 1000 after a first layer took them as they are."""
    model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
    return network(model, (noise(32, 6, key=4).abs() * 3000).round(), F.mse_loss, noise(32, 1, key=4), dtype)


class Critic(nn.Module):
    """A Wasserstein critic: the loss is a difference of two means and may be near 0."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(16, 32)), nn.LeakyReLU(0.2),
            nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)), nn.LeakyReLU(0.2), nn.Linear(32, 1),
        )  # fmt: skip

    def forward(self, real, fake):
        return self.net(real), self.net(fake)


def critic(dtype: torch.dtype = BF16) -> Training:
    return network(
        Critic(), (noise(16, 16, key=4), noise(16, 16, key=4).flip(0) * 0.9), lambda out: (out[0] - out[1]).mean(), None, dtype
    )


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.codes = nn.Parameter(torch.randn(16, 8))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, x):
        z = self.encoder(x)
        weights = torch.softmax(torch.einsum("bchw,kc->bhwk", z, self.codes), -1)
        return self.decoder(torch.einsum("bhwk,kc->bchw", weights, self.codes) + z)


def autoencoder(dtype: torch.dtype = BF16) -> Training:
    return network(Autoencoder(), noise(4, 1, 16, 16, key=4), F.l1_loss, noise(4, 1, 16, 16, key=4), dtype)


PROGRAMS = [
    *healthy(
        transformer,
        tools="diagnose monitor examine diff whatif",
        dtypes=BOTH,
        steps=8,
        sizes=({"layers": 24}, {"layers": 1, "width": 512}, {"layers": 2, "width": 128, "vocabulary": 5000}),
    ),
    *healthy(convnet, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(recurrent, tools="diff", dtypes=BOTH),
    *healthy(vision, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(variational, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(llama, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(unet_that_denoises, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(gru, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(weighted_experts, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(clicks, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(graph_sums, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(contrast, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(translation, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(wave, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(coupling_flow, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(mixer, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(mobile, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(scan, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(reward, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(tabular, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(integer_features, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(critic, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
    *healthy(autoencoder, tools="diagnose monitor examine diff whatif", dtypes=BOTH, steps=8),
]
