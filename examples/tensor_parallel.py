"""Each of two processes holds half of every wide layer; the second block overflows in float16, and is named with the operation.

torchrun --standalone --nproc-per-node 2 -m nanny run examples/tensor_parallel.py
nanny diagnose                      # --fixed behind tensor_parallel.py: the factor is left out
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width, gain):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gain = gain

    def forward(self, x):
        wide = self.up(self.norm(x) * self.gain)  # beyond 65504 in float16; FP32 would not mind
        return x + self.down(torch.relu(wide) / self.gain)


mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), Block(32, 1.0), Block(32, 1.0 if "--fixed" in sys.argv else 2e5), nn.Linear(32, 1))
for block in (model[1], model[2]):
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))  # the same on both
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    nn.functional.mse_loss(out.float(), x[:, :1].tanh()).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
