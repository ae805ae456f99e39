"""FP16 without a GradScaler: the gradients of a small loss are below 6e-8 and become 0. Nothing is learned. No NaN, no warning.

nanny run examples/vanishing_gradients.py
nanny run examples/vanishing_gradients.py --fixed    # with a GradScaler
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", enabled="--fixed" in sys.argv)
for step in range(60):
    x = torch.randn(256, 16)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = 1e-5 * nn.functional.mse_loss(model(x).float(), x[:, :1].sin())  # a term with a small weight
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss.item():.2e}")
