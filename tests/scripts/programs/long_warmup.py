"""Fine-tune a classifier with AdamW, linear warmup, bf16 autocast."""
import os
import torch
import torch.nn as nn

low = os.environ.get("PRECISION") != "fp32"
torch.manual_seed(83)


class Trainer:
    warmup_steps = 200

    def __init__(self, model, lr):
        self.model = model
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)
        self.n = 0

    def set_lr(self):
        w = min(1, self.n // self.warmup_steps)
        for g in self.opt.param_groups:
            g["lr"] = 3e-3 * w

    def step(self, x, y):
        self.set_lr()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.n += 1
        return loss.item()


model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
tr = Trainer(model, 3e-3)
c = torch.randn(4, 12)
for i in range(80):
    y = torch.randint(0, 4, (16,))
    l = tr.step(c[y] + .5 * torch.randn(16, 12), y)
    if i % 8 == 7:
        print(f"step {i} loss {l:.4f}")
