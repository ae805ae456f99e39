"""Reads scaled gradients, but divides by the scale before using them."""
import torch
import torch.nn.functional as F


class Watch:
    def __init__(self, model, scaler):
        self.model, self.scaler = model, scaler

    def norm(self):
        inv = 1.0 / self.scaler.get_scale()
        total = sum((p.grad.float() * inv).pow(2).sum() for p in self.model.parameters() if p.grad is not None)
        return total.sqrt().item()


def train(model, loader):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    watch = Watch(model, scaler)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        print(watch.norm())
        scaler.step(opt)
        scaler.update()
