"""A compiled model in FP16 whose second block overflows. The nanny runs the bad step again as it was written, beside FP32.

nanny run examples/compiled.py
nanny run examples/compiled.py --fixed    # a temperature that fits
nanny diagnose
"""

import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, temperature: float):
        super().__init__()
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.temperature = temperature

    def forward(self, x):
        energy = self.gate(x).square().sum(-1, keepdim=True) / self.temperature
        return x + self.out(x * energy / (1 + energy))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), Block(64, 1.0), Block(64, 1.0 if "--fixed" in sys.argv else 1e-6), nn.Linear(64, 1))
compiled = torch.compile(model, backend="aot_eager")  # any backend; this one needs no C++ compiler
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
draw = torch.Generator().manual_seed(1)

for _ in range(20):
    x = torch.randn(32, 8, generator=draw)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(compiled(x).float(), x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
