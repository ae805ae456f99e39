"""Models that several programs share: ordinary architectures, and ordinary layers around a fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corpus import Example, Training
from corpus.draws import noise, seed_torch
from corpus.loops import network, repeated


class SelfAttention(nn.Module):
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
        self.attn = SelfAttention(width, heads)
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


def class_loss(out, y):
    return F.cross_entropy(out, y)


def token_loss(out, ids):
    return F.cross_entropy(out.flatten(0, 1), ids.flatten())


class Between(nn.Module):
    """Layers around the module `fault`, under test."""

    def __init__(self, fault: nn.Module, width: int = 16, outputs: int = 4) -> None:
        super().__init__()
        seed_torch(0)
        self.first = nn.Linear(width, width)
        self.fault = fault
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fault(self.first(x)))


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def between(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, scaled: bool | None = None, rows: int = 32, width: int = 16
) -> Training:
    model = Between(Call(function), width)
    x, y = noise(rows, width), noise(rows, 4, key=2)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out.float(), target)

    training = repeated(model, lambda: loss(model(x), y), dtype, scaled=scaled)
    training.example = Example((x,), loss, y)
    return training


class Attention(nn.Module):
    def __init__(self, gain: float, mask: Tensor | None = None, mask_value: float = -math.inf) -> None:
        super().__init__()
        seed_torch(3)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.gain, self.mask, self.mask_value = gain, mask, mask_value

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q(x) * self.gain) @ (self.k(x) * self.gain).transpose(-2, -1)
        if self.mask is not None:
            scores = (
                scores.masked_fill(self.mask, self.mask_value)
                if math.isinf(self.mask_value)
                else scores + self.mask.to(scores.dtype) * self.mask_value
            )
        return scores.softmax(-1) @ self.v(x)


def attending(attention: Attention, dtype: torch.dtype) -> Training:
    model = Between(attention)
    x, y = noise(2, 6, 16), noise(2, 6, 4, key=2)
    return repeated(model, lambda: F.mse_loss(model(x).float(), y), dtype)


class Sandwich(nn.Module):
    def __init__(self, fault: nn.Module, after: nn.Module | None = None, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.act = nn.GELU()
        self.fault = fault
        self.after = after or nn.LayerNorm(width)
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        return self.last(self.after(self.fault(self.act(self.first(x)))))


def sandwich(fault: nn.Module, dtype: torch.dtype, after: nn.Module | None = None, rows: int = 6, width: int = 24) -> Training:
    seed_torch()
    return network(Sandwich(fault, after, width), noise(rows, 16, key=4), None, None, dtype)
