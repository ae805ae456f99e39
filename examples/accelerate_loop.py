"""Accelerate with the nanny: one batch holds a NaN, and it is told as data, not as precision.

python examples/accelerate_loop.py
python examples/accelerate_loop.py --fixed    # records are checked when they are loaded
"""

import sys

import torch
from accelerate import Accelerator

from nanny.integrations.accelerate import watch

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
batches = [torch.randn(8, 16) for _ in range(40)]
batches[21][3, 5] = float("nan")
if "--fixed" in sys.argv:
    batches = [x[x.isfinite().all(1)] for x in batches]
with watch(accelerator) as nanny:
    for x in batches:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), x[:, :1].tanh())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
print(nanny.verdict("finished").text)
