"""Small models, healthy and broken, for the tests of single operations."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from nanny.watch import op_stream


class WrongKernel(TorchDispatchMode):
    """A device whose kernel for one operation is wrong, from its `after`th call on; below the stream, as devices are."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __init__(self, name, change, after=0):
        super().__init__()
        self.name, self.change, self.left = name, change, after

    def __enter__(self):
        self._run = op_stream._run
        op_stream._run = lambda func, args, kwargs: self.spoil(func, args, self._run(func, args, kwargs))
        return super().__enter__()

    def __exit__(self, *exc):
        op_stream._run = self._run
        super().__exit__(*exc)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        streams = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, op_stream._OpStream)]
        return out if streams else self.spoil(func, args, out)

    def spoil(self, func, args, out):
        if func.overloadpacket.__name__ != self.name:
            return out
        self.left -= 1
        if self.left >= 0:
            return out
        if out is None:  # _foreach_*_ and fused optimizers write their first argument
            for tensor in args[0]:
                self.change(tensor)
        else:
            self.change(out[0] if isinstance(out, (tuple, list)) else out)
        return out


class Attention(nn.Module):
    def __init__(self, width=16, heads=2, mask="-inf"):
        super().__init__()
        self.qkv, self.out, self.heads, self.mask = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, mask

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        above = torch.ones(t, t, dtype=torch.bool).triu(1)
        low = float("-inf") if self.mask == "-inf" else torch.finfo(scores.dtype).min
        scores = scores.masked_fill(above, low)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width=16, mask="-inf"):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(width, mask=mask)
        self.up, self.act, self.down, self.dropout = (
            nn.Linear(width, 32),
            nn.ReLU(inplace=True),
            nn.Linear(32, width),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        x = x + self.dropout(self.attn(self.norm(x)))
        return x + self.down(self.act(self.up(x)))


class TinyGpt(nn.Module):
    def __init__(self, vocabulary=20, width=16, layers=2, mask="-inf"):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, mask) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.conv2, self.gn, self.head = nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(F.relu(self.bn(self.conv(x)), inplace=True))
        return self.head(F.silu(self.gn(self.conv2(x))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 12), nn.Linear(12, 5)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 12)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


def language(model=None):
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (4, 9))
    return model or TinyGpt(), ids[:, :-1], ids[:, 1:]


def images():
    torch.manual_seed(0)
    return Cnn(), torch.randn(6, 3, 12, 12), torch.randint(0, 5, (6,))


def series():
    torch.manual_seed(0)
    return Recurrent(), torch.randn(5, 7, 6), torch.randint(0, 5, (5,))


def optimizer_for(model, kind="AdamW"):
    if kind in ("fused", "foreach"):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, **{kind: True})
    return getattr(torch.optim, kind)(model.parameters(), lr=1e-2)


def train(model, x, y, steps=2, amp=None, optimizer=None, scaler=False, after_step=lambda: None, low_weights=None):
    """Losses of a few ordinary training steps."""
    if low_weights is not None:
        model.to(low_weights)
        x = x.to(low_weights) if x.is_floating_point() else x
    optimizer = optimizer or optimizer_for(model)
    scaling = torch.amp.GradScaler("cpu", enabled=scaler, init_scale=256.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=amp) if amp is not None else contextlib.nullcontext():
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, -2).float(), y.flatten())
        scaling.scale(loss).backward()
        scaling.step(optimizer)
        scaling.update()
        losses.append(loss.item())
        after_step()
    return losses
