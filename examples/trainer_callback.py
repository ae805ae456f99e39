"""The transformers Trainer with the nanny: a block of this tiny model overflows in float16, and is named.

python examples/trainer_callback.py          # with the callback
python examples/trainer_callback.py --fixed  # weights that float16 can hold
nanny run examples/trainer_callback.py       # the same answer, also for a script without it
"""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from transformers import Trainer, TrainingArguments

from nanny.integrations.transformers import NannyCallback


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.head = torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)
        self.encode.weight.data *= 1.0 if "--fixed" in sys.argv else 1e6  # beyond 65504 in float16; FP32 would not mind

    def forward(self, x, labels):
        with torch.autocast("cpu", torch.float16):
            out = self.head(torch.nn.functional.normalize(self.encode(x), dim=-1))
        return {"loss": torch.nn.functional.mse_loss(out.float(), labels)}


torch.manual_seed(0)
x = torch.randn(256, 16)
rows = [{"x": a, "labels": a[:1].tanh()} for a in x]
arguments = TrainingArguments(
    "trainer_output", max_steps=16, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
)
nanny = NannyCallback()
Trainer(Net(), arguments, train_dataset=rows, callbacks=[nanny]).train()
print(nanny.nanny.verdict("finished").text)
