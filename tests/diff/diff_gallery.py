"""Small models for the tests of `auto_diff`: healthy ones of many kinds, and ones with a single planted fault."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(w // self.heads)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, w))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int = 6, width: int = 32, vocabulary: int = 50, length: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.token(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.body = nn.Sequential(Residual(16), Residual(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(30, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, ids):
        return self.head(self.lstm(self.token(ids))[0])


class Patches(nn.Module):
    """A vision transformer in miniature."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))
        self.position = nn.Parameter(torch.randn(1, 17, 32) * 0.02)
        self.blocks = nn.Sequential(*(Block(32, 4) for _ in range(3)))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, 32), nn.ReLU())
        self.mean, self.logvar = nn.Linear(32, 8), nn.Linear(32, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 48))

    def forward(self, x):
        h = self.encoder(x)
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return {"reconstruction": self.decoder(z), "mean": mean, "logvar": logvar}


def _ids(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(3))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def _token_loss(out, ids):
    return F.cross_entropy(out.flatten(0, 1), ids.flatten())


def _vae_loss(out, x):
    divergence = -0.5 * (1 + out["logvar"] - out["mean"] ** 2 - out["logvar"].exp()).mean()
    return F.mse_loss(out["reconstruction"], x) + divergence


def transformer(layers: int = 6):
    ids = _ids(50, 4, 16)
    return Transformer(layers), ids, _token_loss, ids


def convnet():
    return ConvNet(), _noise(4, 3, 12, 12), F.cross_entropy, _ids(10, 4)


def recurrent():
    ids = _ids(30, 4, 10)
    return Recurrent(), ids, _token_loss, ids


def vision():
    return Patches(), _noise(4, 3, 16, 16), F.cross_entropy, _ids(10, 4)


def variational():
    x = _noise(8, 48)
    return Variational(), x, _vae_loss, x


HEALTHY = {f.__name__: f for f in (transformer, convnet, recurrent, vision, variational)}


# One fault each, always in the module named `fault`, between ordinary layers.


class VarianceOfSquares(nn.Module):
    """Cancellation: the mean of the squares minus the square of the mean, of data far from zero."""

    def forward(self, x):
        x = x * 0.05 + 3
        return (x - x.mean(-1, keepdim=True)) / ((x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2).abs().sqrt()


class Offset(nn.Module):
    """Absorption: a large constant is added and the next layers only need what varies."""

    def forward(self, x):
        return x + 1000.0


class Overflow(nn.Module):
    def forward(self, x):
        return (x * 300) * (x * 300) / 90000


class TinyEps(nn.Module):
    """eps below what fp16 can hold, and a row that is zero."""

    def forward(self, x):
        x = torch.where(torch.arange(x.shape[0])[:, None] == 1, torch.zeros_like(x), x)
        return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


class RoundedPositions(nn.Module):
    """Positions beyond 256 (bf16) and 2048 (fp16) made in the type of the activations."""

    def forward(self, x):
        position = torch.arange(4000, 4000 + x.shape[-1], dtype=x.dtype, device=x.device)
        return x + torch.sin(position * 0.7)


class HalfSoftmax(nn.Module):
    """A softmax over long rows whose sum is kept, piece by piece, in the type of the activations."""

    def forward(self, x):
        rows = (x[:, :1] * torch.linspace(-1, 1, 4000, dtype=x.dtype, device=x.device)).exp()
        total = torch.zeros_like(rows[:, 0])
        for part in rows.split(8, dim=1):
            total = total + part.sum(1)
        return x + torch.linspace(-1, 1, 24, dtype=x.dtype) * (rows[:, -1:] / total[:, None] * 1000)


class HandMadeDistances(nn.Module):
    """|a|^2 + |b|^2 - 2ab of points far from the origin."""

    def forward(self, x):
        y = x * 0.1 + 5
        distance = (y * y).sum(-1, keepdim=True) + (y * y).sum(-1)[None] - 2 * y @ y.t()
        return torch.cat([distance, x[:, distance.shape[1] :]], -1)


class LogOfOnePlus(nn.Module):
    def forward(self, x):
        return torch.log(1 + x * 1e-3) * 1000


class LargeStream(nn.Module):
    def forward(self, x):
        return (x + 2000) - 1999


class SumOutOfRange(nn.Module):
    """No infinity comes out: x / inf is 0."""

    def forward(self, x):
        w = (x.abs() + 1) * 8000
        return x * (w / w.sum(-1, keepdim=True)) * 24


class Underflow(nn.Module):
    def forward(self, x):
        return (x * 1e-4) * (x * 1e-4) * 1e8


class Sandwich(nn.Module):
    def __init__(self, fault: nn.Module, after: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.act = nn.GELU()
        self.fault = fault
        self.after = after or nn.LayerNorm(24)
        self.last = nn.Linear(24, 4)

    def forward(self, x):
        return self.last(self.after(self.fault(self.act(self.first(x)))))


class Unmean(nn.Module):
    def forward(self, x):
        return x - 1000.0


FAULTS = {
    "cancellation": (VarianceOfSquares, ("bfloat16", "float16")),
    "absorption": (Offset, ("bfloat16", "float16")),
    "overflow": (Overflow, ("float16",)),
    "eps": (TinyEps, ("float16",)),
    "positions": (RoundedPositions, ("bfloat16", "float16")),
    "softmax": (HalfSoftmax, ("bfloat16",)),
    "distances": (HandMadeDistances, ("bfloat16", "float16")),
    "log of 1 + x": (LogOfOnePlus, ("bfloat16", "float16")),
    "large stream": (LargeStream, ("bfloat16", "float16")),
    "sum out of range": (SumOutOfRange, ("float16",)),
    "underflow": (Underflow, ("float16",)),
}


def sandwich(fault: type[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Sandwich(fault(), Unmean() if fault is Offset else None)
    x = _noise(6, 16) * (6 if fault is Overflow else 1)
    return model, x
