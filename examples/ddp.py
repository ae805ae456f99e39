"""Two processes train one model; a broken record reaches the second one, and the average spreads its NaN to both.

torchrun --standalone --nproc-per-node 2 -m nanny run examples/ddp.py
nanny diagnose                      # --fixed behind ddp.py: empty fields are 0
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
draw = torch.Generator().manual_seed(rank)

for step in range(60):
    x = torch.randn(32, 8, generator=draw)
    y = x.sum(1, keepdim=True).tanh()
    if rank == 1 and step == 40:
        x[5, 2] = float("nan")  # an empty field of a table
    if "--fixed" in sys.argv:
        x = x.nan_to_num()  # empty fields are 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x), y.bfloat16())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

dist.destroy_process_group()
