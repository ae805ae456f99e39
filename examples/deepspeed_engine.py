"""A DeepSpeed engine under the nanny: a NaN in the data is named, with the step at which it came.

deepspeed examples/deepspeed_engine.py       # or, on a CPU: torchrun --nproc-per-node 1 examples/deepspeed_engine.py
deepspeed examples/deepspeed_engine.py --fixed    # empty fields are 0
"""

import sys

import deepspeed
import torch

from nanny.integrations.deepspeed import watch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
settings = {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
with watch(engine) as nanny:
    for step in range(24):
        x = torch.randn(8, 16).bfloat16()
        if step == 11:
            x[3, 5] = float("nan")
        if "--fixed" in sys.argv:
            x = x.nan_to_num()
        loss = (engine(x) - x[:, :1].tanh()).float().square().mean()
        engine.backward(loss)
        engine.step()
print(nanny.verdict("finished").text)
