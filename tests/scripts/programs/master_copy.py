"""bf16 model weights with fp32 master copies held by a small wrapper optimizer."""
import argparse
import torch
import torch.nn as nn

ap = argparse.ArgumentParser(); ap.add_argument("--fp32", action="store_true")
DT = torch.float32 if ap.parse_args().fp32 else torch.bfloat16
torch.manual_seed(91)


class MasterAdam:
    def __init__(self, params, **kw):
        self.model_params = [p for p in params if p.requires_grad]
        self.master = [p.detach().float().clone().requires_grad_(True) for p in self.model_params]
        self.inner = torch.optim.AdamW(self.master, **kw)

    def zero_grad(self):
        for p in self.model_params:
            p.grad = None

    def step(self):
        for m, p in zip(self.master, self.model_params):
            m.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.model_params):
                p.copy_(m)


class Gated(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.inp = nn.Linear(10, d)
        self.w1, self.w2, self.w3 = nn.Linear(d, 64), nn.Linear(d, 64), nn.Linear(64, d)
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = self.inp(x)
        n = self.norm(h)
        return self.out(h + self.w3(nn.functional.silu(self.w1(n)) * self.w2(n))).squeeze(-1)


model = Gated().to(DT)
opt = MasterAdam(model.parameters(), lr=1.5e-3)
for step in range(110):
    x = torch.randn(32, 10)
    y = x[:, 0] * x[:, 1] + torch.sin(x[:, 2])
    loss = (model(x.to(DT)).float() - y).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        print(f"{step}: {loss.item():.4f}")
