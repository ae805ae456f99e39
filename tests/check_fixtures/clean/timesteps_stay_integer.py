import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def sinusoid(t, dim):
    freq = torch.exp(-math.log(1e4) * torch.arange(dim // 2, device=t.device, dtype=torch.float32) / (dim // 2))
    angle = t.float()[:, None] * freq
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class Denoiser(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.t = nn.Sequential(nn.Linear(dim, dim), nn.SiLU())
        self.x = nn.Linear(dim, dim)

    def forward(self, x, t):
        return self.x(x) + self.t(sinusoid(t, x.size(-1)))


def train(model, loader, T=1000):
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T), 0).cuda()
    opt = torch.optim.AdamW(model.cuda().parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        x, t = x.cuda(), torch.randint(0, T, (len(x),), device="cuda")
        eps, a = torch.randn_like(x), abar[t][:, None]
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * eps, t), eps)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
