"""Planted overflow of what a layer puts out: activations and attention scores."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from corpus import Training, planted
from corpus.draws import noise
from corpus.loops import usual


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.gain


class FeedForward(nn.Module):
    """The T5 way: two gates and a wide way back; `careful` leaves the way back in fp32."""

    def __init__(self, width: int, hidden: int, careful: bool) -> None:
        super().__init__()
        self.careful = careful
        self.wi_0, self.wi_1 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.wo = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        hidden = F.gelu(self.wi_0(x)) * self.wi_1(x)
        if not self.careful:
            return self.wo(hidden)
        with torch.autocast("cpu", enabled=False):
            return self.wo(hidden.float())


class EncoderBlock(nn.Module):
    def __init__(self, width: int, careful: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attn = nn.Linear(width, width, bias=False)
        self.ffn = FeedForward(width, 2 * width, careful)

    def forward(self, x):
        mixed = self.attn(self.norm1(x))
        x = x + mixed.mean(1, keepdim=True)
        return x + self.ffn(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, careful: bool) -> None:
        super().__init__()
        self.shared = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList(EncoderBlock(32, careful) for _ in range(4))
        self.final = RMSNorm(32)
        self.lm_head = nn.Linear(32, 40, bias=False)

    def forward(self, ids):
        x = self.shared(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.final(x))


def t5_way_back_overflows(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The feed-forward part of block 2 has grown over a long run; its way back puts out more than 100,000."""
    model = Encoder(careful=fixed)
    with torch.no_grad():
        for p in model.blocks[2].ffn.parameters():
            p.mul_(80)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def data(i):
        return ((noise(8, 12, key=(1, i)).abs() * 15).long().clamp(max=39),)

    def loss_of(ids):
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return usual(model, optimizer, data, loss_of, dtype)


class Houses(nn.Module):
    """Prices in dollars from square metres; the head's bias begins at the mean price, as one does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


def prices_grow_out_of_range(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Healthy at first: the predictions learn their way from 55,000 towards 90,000 and leave fp16 after about ten steps."""
    model = Houses()
    mean, unit = (55_000.0, 10_000.0) if fixed else (0.0, 1.0)  # repaired: everything is standardised
    with torch.no_grad():
        model.head.bias.fill_((55_000.0 - mean) / unit)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if fixed else 0.1)
    worth = torch.tensor([300.0, 40.0, 150.0, 20.0, 90.0, 60.0])

    def data(i):
        x = noise(32, 6, key=(2, i)).abs() * 60
        return x / (60 if fixed else 1), (x @ worth + 30_000 - mean) / unit

    def loss_of(x, price):
        return F.mse_loss(model(x) * (unit / 1000), price * (unit / 1000))  # thousands of dollars, squared

    return usual(model, optimizer, data, loss_of, dtype)


class WaveBlock(nn.Module):
    def __init__(self, channels: int, dilation: int, normed: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.norm = nn.GroupNorm(4, channels) if normed else nn.Identity()

    def forward(self, x):
        return x + self.conv(F.relu(self.norm(x)))


class WaveNet(nn.Module):
    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.front = nn.Conv1d(1, 16, 5, padding=2)
        self.stack = nn.Sequential(*(WaveBlock(16, 2**n, normed) for n in range(6)))
        self.post = nn.GroupNorm(4, 16)
        self.classify = nn.Linear(16, 5)

    def forward(self, wave):
        return self.classify(self.post(self.stack(self.front(wave)).float()).mean(-1))


def residual_sum_of_16_bit_audio_overflows(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """16-bit samples (up to 32,767) through residual blocks without norm: the stream passes 65,504 in one of the later."""
    model = WaveNet(normed=fixed)
    with torch.no_grad():
        for block in model.stack:
            block.conv.weight.mul_(1.6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def data(i):
        label = torch.arange(10) % 5
        time = torch.arange(64) / 64
        wave = torch.sin(2 * math.pi * (label[:, None] * 3 + 2) * time) * 20_000 + noise(10, 64, key=(3, i)) * 500
        return wave[:, None] / (32_768 if fixed else 1), label

    def loss_of(wave, label):
        return F.cross_entropy(model(wave), label)

    return usual(model, optimizer, data, loss_of, dtype)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, careful: bool) -> None:
        super().__init__()
        self.heads, self.careful = heads, careful
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        if self.careful:
            q, k = F.normalize(q.float(), dim=-1) * 4, F.normalize(k.float(), dim=-1)
        scores = q @ k.transpose(-2, -1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, w))


class VitBlock(nn.Module):
    def __init__(self, width: int, careful: bool) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SelfAttention(width, 2, careful)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Vit(nn.Module):
    def __init__(self, careful: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.encoder = nn.ModuleList(VitBlock(32, careful) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.encoder:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def images(i: int, classes: int = 10, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    label = (torch.arange(16) + i) % classes
    return noise(16, 3, size, size, key=(4, i)) + (label / classes - 0.5)[:, None, None, None] * 3, label


def vit_scores_overflow(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Queries and keys of the second block have grown (no QK-norm, no 1/sqrt(d)): scores reach some 100,000."""
    model = Vit(careful=fixed)
    with torch.no_grad():
        model.encoder[1].attn.qkv.weight[:64].mul_(250)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(x, label):
        return F.cross_entropy(model(x), label)

    return usual(model, optimizer, images, loss_of, dtype)


class DotAttention(nn.Module):
    def __init__(self, width: int, careful: bool) -> None:
        super().__init__()
        self.careful, self.width = careful, width

    def forward(self, query, memory):
        if self.careful:
            query, memory = F.layer_norm(query, (self.width,)), F.layer_norm(memory, (self.width,))
        scores = torch.bmm(memory, query.unsqueeze(2)).squeeze(2)
        weights = torch.softmax(scores / (self.width**0.5 if self.careful else 1.0), dim=1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1)


class SensorReader(nn.Module):
    """A recurrent reader of sensor rows in physical units, attending over its own memory."""

    def __init__(self, careful: bool) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 48)
        self.rnn = nn.GRU(48, 48, batch_first=True)
        self.attention = DotAttention(48, careful)
        self.norm = nn.LayerNorm(96)
        self.out = nn.Linear(96, 3)

    def forward(self, rows):
        memory = self.lift(rows)
        state = self.rnn(memory)[0][:, -1]
        seen = self.attention(memory[:, -1], memory)
        return self.out(self.norm(torch.cat([state, seen], -1)))


def dot_attention_over_raw_units_overflows(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Unscaled dot products of 48 features of about 100 each (pressure in hPa) leave fp16; softmax(inf) is NaN."""
    model = SensorReader(careful=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def data(i):
        rows = noise(12, 10, 6, key=(5, i)) * torch.tensor([80.0, 40.0, 20.0, 5.0, 2.0, 1.0])
        rows[..., 0] += 300
        return rows, (rows[:, -1, 1] > 0).long() + (rows[:, -1, 1] > 20).long()

    def loss_of(rows, label):
        return F.cross_entropy(model(rows), label)

    return usual(model, optimizer, data, loss_of, dtype)


PROGRAMS = [
    *planted(
        t5_way_back_overflows,
        "activation_overflow_fp16",
        "blocks.2.ffn.wo",
        findings="NAN OVERFLOW SCALE_COLLAPSE",
        survives=False,
        hazards="overflow",
        shows=lambda run: run.stuck,
    ),
    *planted(
        prices_grow_out_of_range,
        "activation_overflow_fp16",
        "head",
        findings="INF NEAR_OVERFLOW OVERFLOW SCALE_COLLAPSE SCALE_DECLINE",
        survives=False,
        hazards="overflow",
        examined=14,
        shows=lambda run: math.isfinite(run.losses[5]) and sum(run.skipped[15:]) > 10,
        steps=30,
    ),
    *planted(
        residual_sum_of_16_bit_audio_overflows,
        "activation_overflow_fp16",
        *("stack.4", "stack.2"),  # the stream leaves the range in one of them, by the weights
        findings="NAN OVERFLOW SCALE_COLLAPSE",
        survives=False,
        hazards="overflow",
        shows=lambda run: run.stuck,
    ),
    *planted(
        vit_scores_overflow,
        "attention_logit_overflow_fp16",
        "encoder.1.attn",
        findings="OVERFLOW SCALE_COLLAPSE",
        hazards="overflow",
        shows=lambda run: run.stuck,
    ),
    *planted(
        dot_attention_over_raw_units_overflows,
        "attention_logit_overflow_fp16",
        "attention",
        findings="NAN OVERFLOW SCALE_COLLAPSE",
        hazards="overflow",
        shows=lambda run: run.stuck,
    ),
]
