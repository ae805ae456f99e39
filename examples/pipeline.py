"""A model in two stages on two processes: a broken record enters the first one, and the loss of the second is NaN.

torchrun --standalone --nproc-per-node 2 -m nanny run examples/pipeline.py
nanny diagnose                      # --fixed behind pipeline.py: empty fields are 0
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
if rank == 0:
    part = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 48))
else:
    part = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(part.parameters(), lr=2e-3)
draw = torch.Generator().manual_seed(1)

for step in range(40):
    x = torch.randn(32, 16, generator=draw)
    y = x[:, :1].tanh()
    if step == 30:
        x[5, 2] = float("nan")  # an empty field of a table
    if "--fixed" in sys.argv:
        x = x.nan_to_num()  # empty fields are 0
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y)
    optimizer.step()
dist.destroy_process_group()
