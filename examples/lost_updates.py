"""Weights kept in BF16: at this learning rate an update is less than half the distance to the next number, and is rounded away.

nanny run examples/lost_updates.py
nanny run examples/lost_updates.py --fixed    # weights in FP32, BF16 by autocast
"""

import sys

import torch
from torch import nn

fixed = "--fixed" in sys.argv
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
if not fixed:
    model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(200):
    x = torch.randn(64, 16)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fixed):
        out = model(x if fixed else x.bfloat16())
    loss = nn.functional.mse_loss(out.float(), x[:, :1].sin())
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
