"""After the first look at the validation set the model stays in evaluation mode: dropout is off for the rest of the training.

nanny run examples/sleeping_dropout.py
nanny run examples/sleeping_dropout.py --fixed
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
held_out = torch.randn(64, 16)
for step in range(60):
    x = torch.randn(64, 16)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        model.eval()
        with torch.no_grad():
            seen = nn.functional.mse_loss(model(held_out), held_out[:, :1].sin())
        print(f"step {step:2d}  loss {loss.item():.4f}  held out {seen.item():.4f}")
        if "--fixed" in sys.argv:
            model.train()
