import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(14, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 4))

    def forward(self, x):
        return self.net(x)


class EMA:
    def __init__(self, model, decay, dtype):
        self.module = copy.deepcopy(model).to(dtype).eval()
        for p in self.module.parameters():
            p.requires_grad_(False)
        self.decay, self.dtype = decay, dtype

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p.to(self.dtype), alpha=1 - self.decay)

    @torch.no_grad()
    def __call__(self, x):
        return self.module(x.to(self.dtype)).float()


def main(steps=300, decay=0.995, ema_dtype=torch.bfloat16):
    torch.manual_seed(10)
    W = torch.randn(14, 4)
    model = Classifier()
    ema = EMA(model, decay, ema_dtype)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        x = torch.randn(32, 14)
        y = (x @ W).argmax(1)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(model)
        if step % 50 == 49:
            xv = torch.randn(256, 14)
            yv = (xv @ W).argmax(1)
            print(f"step {step + 1} loss {loss.item():.4f} ema loss {F.cross_entropy(ema(xv), yv).item():.4f}")


main()
