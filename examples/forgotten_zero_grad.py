"""FP32, and the gradients are never cleared: each step also takes all the steps before it. The loss falls, and then swings.

nanny run examples/forgotten_zero_grad.py
nanny run examples/forgotten_zero_grad.py --fixed
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    x = torch.randn(64, 16)
    if "--fixed" in sys.argv:
        optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")
