import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
TS = 1000
betas = torch.linspace(1e-4, 0.02, TS)
abar = torch.cumprod(1 - betas, 0)


def time_features(t, d=16):
    f = torch.exp(-torch.arange(d // 2) * 9.2 / (d // 2))
    a = t.float()[:, None] * f
    return torch.cat([a.sin(), a.cos()], 1)


class Denoiser(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.t = nn.Linear(16, h)
        self.x = nn.Linear(2, h)
        self.m1, self.m2 = nn.Linear(h, h), nn.Linear(h, h)
        self.out = nn.Linear(h, 2)

    def forward(self, x, t):
        h = self.x(x) + self.t(time_features(t))
        h = h + F.silu(self.m1(F.silu(h)))
        h = h + F.silu(self.m2(F.silu(h)))
        return self.out(h)


model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, total_steps=250)
hist = []
for step in range(250):
    a = torch.rand(16) * 6.283
    x0 = torch.stack([a.cos(), a.sin()], 1) * 1.5
    t = torch.randint(0, TS, (16,))
    eps = torch.randn_like(x0)
    ab = abar[t][:, None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(ab.sqrt() * x0 + (1 - ab).sqrt() * eps, t)
    loss = F.mse_loss(pred.float(), eps)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    hist.append(loss.item())
    if (step + 1) % 50 == 0:
        print(f"step {step + 1} mse {sum(hist[-50:]) / 50:.4f}")
