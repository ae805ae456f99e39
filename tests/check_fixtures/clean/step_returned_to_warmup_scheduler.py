import torch
import torch.nn as nn


class Warmup:
    def __init__(self, optimizer, base, steps):
        self.optimizer, self.base, self.steps, self.n = optimizer, base, steps, 0

    def step(self):
        self.n += 1
        for g in self.optimizer.param_groups:
            g["lr"] = self.base * min(1.0, self.n / self.steps)

    def update(self):
        return self.optimizer.param_groups[0]["lr"]


def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = Warmup(optimizer, 1e-3, 500)
    scaler = torch.amp.GradScaler("cuda", init_scale=65536.0)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        schedule.update()
        optimizer.zero_grad(set_to_none=True)
