import torch
import torch.nn.functional as F


class Accumulator:
    def __init__(self, model, optimizer, steps=8, clip=1.0):
        self.model, self.optimizer = model, optimizer
        self.steps, self.clip = steps, clip
        self.scaler = torch.amp.GradScaler("cuda")
        self.micro = 0

    def feed(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(self.model(x), y) / self.steps
        self.scaler.scale(loss).backward()
        self.micro += 1
        if self.micro == self.steps:
            self.flush()
        return loss.item() * self.steps

    def flush(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.micro = 0


def main(model, loader):
    acc = Accumulator(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    for x, y in loader:
        acc.feed(x.cuda(), y.cuda())
