import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(13)


class MasterAdam:
    def __init__(self, params, lr):
        self.params = list(params)
        self.master = [p.detach().float().clone().requires_grad_(True) for p in self.params]
        self.opt = torch.optim.AdamW(self.master, lr=lr)

    def step(self):
        for m, p in zip(self.master, self.params):
            m.grad = p.grad.float()
        self.opt.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.params):
                p.copy_(m)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 3)).bfloat16()
opt = MasterAdam(model.parameters(), 2e-3)
W = torch.randn(12, 3)
hist = []
for step in range(200):
    x = torch.randn(16, 12)
    y = (x @ W).argmax(1)
    loss = F.cross_entropy(model(x.bfloat16()).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
    if (step + 1) % 25 == 0:
        print(f"step {step + 1} loss {sum(hist[-25:]) / 25:.4f}")
