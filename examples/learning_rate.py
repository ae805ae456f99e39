"""BF16, and the loss explodes: but FP32 explodes just so. The learning rate is too high, and precision is not the reason.

nanny run examples/learning_rate.py
nanny run examples/learning_rate.py --fixed    # a hundredth of it
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 if "--fixed" in sys.argv else 2.0)
for step in range(60):
    x = torch.randn(64, 16)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), x[:, :1].sin())
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss.item():.4g}")
