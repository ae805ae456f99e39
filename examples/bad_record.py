"""One record of the data is not a number. It looks like an overflow of FP16, and no precision would help.

nanny run examples/bad_record.py
nanny run examples/bad_record.py --fixed    # records are checked when they are loaded
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
records = torch.randn(60, 64, 16)
records[35, 7, 3] = float("nan")  # a sensor that was switched off
if "--fixed" in sys.argv:
    records = torch.where(records.isfinite(), records, 0.0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step, x in enumerate(records):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), x[:, 1:2].sin())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")
