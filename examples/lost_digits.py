"""Points up to 1000 m ahead and 1 m to the side, in BF16: the metre is lost beside the kilometre. Nothing is NaN, only worse.

nanny run examples/lost_digits.py
nanny run examples/lost_digits.py --fixed    # both axes in one scale
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
scale = torch.tensor([1e-3, 1.0] if "--fixed" in sys.argv else [1.0, 1.0])
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(300):
    ahead, side = (2 * torch.rand(512, 1) - 1) * 1000, 2 * torch.rand(512, 1) - 1
    points = torch.cat([ahead, side], dim=1) * scale
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(points)
    loss = nn.functional.mse_loss(out.float(), side + 0.3 * torch.sin(ahead / 400))
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step:3d}  loss {loss.item():.4f}")
