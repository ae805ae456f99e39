"""Ordinary training steps of many kinds, in bf16 and in fp16 with a GradScaler: the sanitizer must have nothing to say."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from diff.diff_gallery import ConvNet, Patches, Transformer, Variational
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint

from examine.sanitizer_programs import FP16, Between, Program, low, noise, training

HEALTHY: dict[str, Callable[[torch.dtype], Program]] = {}


def healthy(build: Callable[[torch.dtype], Program]) -> Callable[[torch.dtype], Program]:
    HEALTHY[build.__name__] = build
    return build


def whole(top: int, *shape: int, seed: int = 3) -> Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed))


def adamw(p):
    return torch.optim.AdamW(p, lr=1e-3)


@healthy
def transformer(dtype):
    torch.manual_seed(0)
    model, ids = Transformer(layers=3), whole(50, 4, 16)
    return training(model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()), dtype, adamw)


@healthy
def convnet(dtype):
    torch.manual_seed(0)
    model, x, y = ConvNet(), noise(8, 3, 12, 12), whole(10, 8)
    return training(model, lambda: F.cross_entropy(model(x), y), dtype, adamw)


@healthy
def vision_transformer(dtype):
    torch.manual_seed(0)
    model, x, y = Patches(), noise(4, 3, 16, 16), whole(10, 4)
    return training(model, lambda: F.cross_entropy(model(x), y), dtype, adamw)


@healthy
def variational(dtype):
    torch.manual_seed(0)
    model, x = Variational(), noise(16, 48)

    def loss():
        out = model(x)
        divergence = -0.5 * (1 + out["logvar"] - out["mean"] ** 2 - out["logvar"].exp()).mean()
        return F.mse_loss(out["reconstruction"].float(), x) + divergence

    return training(model, loss, dtype, adamw)


class Lstm(nn.Module):
    """By hand: oneDNN has no 16-bit LSTM on every CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(30, 16), nn.LSTMCell(16, 16), nn.Linear(16, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x, state, out = self.embed(ids), None, []
        for t in range(ids.shape[1]):
            state = self.cell(x[:, t], state)
            out.append(self.head(state[0]))
        return torch.stack(out, 1)


@healthy
def lstm(dtype):
    torch.manual_seed(0)
    model, ids = Lstm(), whole(30, 8, 12)
    return training(model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()), dtype, adamw)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            weights = self.gate(x.float()).softmax(-1)
        top, index = weights.topk(2, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = (index == e).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, (expert(x[rows]) * top[rows, slot, None]).to(x.dtype))
        return out


@healthy
def mixture_of_experts(dtype):
    model = Between(Mixture())
    x, y = noise(64, 16), noise(64, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw)


@healthy
def adversarial_pair(dtype):
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "g": nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2)),
        "d": nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    })  # fmt: skip
    g, d = (torch.optim.Adam(model[k].parameters(), lr=2e-3) for k in "gd")
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=dtype == FP16)
    real, latent = noise(32, 2) * 0.5 + 1, noise(32, 4, seed=5)

    def step():
        d.zero_grad()
        with low(dtype):
            fake = model["g"](latent)
            right, wrong = model["d"](real), model["d"](fake.detach())
            loss = F.binary_cross_entropy_with_logits(right, torch.ones_like(right)) + F.softplus(wrong).mean()
        scaler.scale(loss).backward()
        scaler.step(d)
        g.zero_grad()
        with low(dtype):
            loss = F.softplus(-model["d"](fake)).mean()
        scaler.scale(loss).backward()
        scaler.step(g)
        scaler.update()

    return Program(model, step, scaler if dtype == FP16 else None)


@healthy
def contrastive(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    x = noise(32, 16)

    def loss():
        a, b = (F.normalize(model(x + 0.1 * noise(32, 16, seed=s)).float(), dim=-1) for s in (5, 6))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(32))

    return training(model, loss, dtype, adamw)


@healthy
def diffusion(dtype):
    torch.manual_seed(0)

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.net = nn.Linear(16, 32), nn.Sequential(nn.Linear(48, 64), nn.SiLU(), nn.Linear(64, 16))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            angles = t[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
            return self.net(torch.cat([x, self.time(torch.cat([angles.sin(), angles.cos()], -1))], -1))

    model, x0, t = Denoiser(), noise(32, 16), whole(1000, 32)
    keep = torch.cos(t / 1000 * math.pi / 2)[:, None]

    def loss():
        drawn = torch.randn_like(x0)
        return F.mse_loss(model(keep * x0 + (1 - keep**2).sqrt() * drawn, t).float(), drawn)

    return training(model, loss, dtype, adamw)


@healthy
def causal_attention_with_minus_infinity(dtype):
    torch.manual_seed(0)

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-2, -1) / 4
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return self.head(x + scores.masked_fill(hidden, -math.inf).softmax(-1) @ v)

    model, ids = Causal(), whole(20, 4, 10)
    return training(model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()), dtype, adamw)


@healthy
def padding_with_a_large_negative_number(dtype):
    """-1e9 is -inf in fp16; no row is masked throughout, so that nothing happens."""
    torch.manual_seed(0)
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, 5:] = True

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.transpose(-2, -1) / 4 + mask[:, None].to(q.dtype) * -1e9
            return self.head(scores.softmax(-1) @ v)

    model, x, y = Padded(), noise(4, 8, 16), noise(4, 8, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw)


@healthy
def fused_attention_and_checkpointing(dtype):
    torch.manual_seed(0)

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)}) for _ in range(2))
            self.head = nn.Linear(16, 4)

        def _block(self, block: nn.ModuleDict, x: Tensor) -> Tensor:
            q, k, v = (t.view(*t.shape[:2], 2, 8).transpose(1, 2) for t in block["qkv"](x).chunk(3, -1))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            return x + F.dropout(block["out"](attended), 0.1)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(self._block, block, x, use_reentrant=False)
            return self.head(x)

    model, x, y = Fused(), noise(2, 8, 16), noise(2, 8, 4, seed=2)
    return training(model, lambda: F.mse_loss(model(x).float(), y), dtype, adamw)
