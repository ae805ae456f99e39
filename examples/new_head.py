"""The head is replaced for a new task after the optimizer was made: it gets gradients and never moves.

nanny run examples/new_head.py
nanny run examples/new_head.py --fixed    # the optimizer is made afterwards
"""

import sys

import torch
from torch import nn

fixed = "--fixed" in sys.argv
torch.manual_seed(0)
model = nn.Sequential()
model.add_module("body", nn.Sequential(nn.Linear(16, 64), nn.Tanh()))
model.add_module("head", nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model.head = nn.Linear(64, 1)
if fixed:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(64, 16)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")
