"""A small transformer in FP16 whose attention forgets 1/sqrt(d). It trains until the scores pass 65,504, and is NaN from then on.

nanny run examples/unscaled_attention.py
nanny run examples/unscaled_attention.py --fixed    # q and k normalised
"""

import sys

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if "--fixed" in sys.argv:
            q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        scores = q @ k.transpose(-1, -2)
        return self.out(scores.softmax(dim=-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


torch.manual_seed(0)
model = nn.Sequential()  # the next value of eight sensors from the last twelve
model.add_module("embed", nn.Linear(8, 32))
model.add_module("blocks", nn.Sequential(Block(32), Block(32), Block(32)))
model.add_module("head", nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(120):
    x = torch.randn(16, 12, 8) * (1 + 2 * step)  # the sensors get louder
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), x[..., :1].sign())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(f"step {step:3d}  loss {loss.item():.4g}  loss scale {scaler.get_scale():g}")
