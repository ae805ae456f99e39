"""Gradients are clipped while they still carry the loss scale of 65,536: every step is clipped to almost nothing.

nanny check examples/clipped_too_early.py            # says so before anything runs, and --diff shows the cure
nanny run examples/clipped_too_early.py
nanny run examples/clipped_too_early.py --fixed
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    x = torch.randn(64, 16)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), x[:, :1].sin())
    scaler.scale(loss).backward()
    if "--fixed" in sys.argv:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")
