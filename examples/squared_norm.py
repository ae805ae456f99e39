"""A norm written by hand: its squares pass 65,504 in FP16 although the vectors are far below it.

nanny run examples/squared_norm.py
nanny run examples/squared_norm.py --fixed    # the norm in FP32
"""

import sys

import torch
from torch import nn


class Unit(nn.Module):
    """Vectors of length one."""

    def forward(self, x):
        if "--fixed" in sys.argv:
            x = x.float()
        return x / (x * x).sum(-1, keepdim=True).sqrt()


torch.manual_seed(0)
model = nn.Sequential()
model.add_module("embed", nn.Linear(16, 128))
model.add_module("unit", Unit())
model.add_module("head", nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(60):
    x = torch.randn(64, 16) * (1 + step)  # the inputs get louder
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), x[:, :1].sign())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}  loss scale {scaler.get_scale():g}")
