"""FSDP2 on two processes with data of two kinds: their gradients nearly cancel, and are added in bfloat16.

torchrun --nproc-per-node 2 -m nanny run --trace-interval 5 examples/fsdp.py
nanny summary                       # reduce_dtype_low_precision; --fixed behind fsdp.py: added in float32
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if "--fixed" in sys.argv else torch.bfloat16)
for layer in (model[0], model[2]):
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(21):
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    side = 1 if dist.get_rank() else -1  # rank 0 has only examples far below, rank 1 only ones far above
    loss = (model(x) - x[:, :1].tanh() - 3e4 * side).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
