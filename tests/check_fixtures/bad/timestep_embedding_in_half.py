import math

import torch
import torch.nn as nn


def timestep_embedding(t, dim, dtype):
    freqs = torch.exp(-math.log(10_000) * torch.arange(dim // 2, dtype=torch.float32, device=t.device) / (dim // 2))
    args = t.to(torch.bfloat16)[:, None] * freqs[None]  # expect: NUM_POSITIONS
    return torch.cat([args.cos(), args.sin()], dim=-1).to(dtype)


class Denoiser(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.time = nn.Linear(dim, dim)
        self.net = nn.Linear(dim, dim)

    def forward(self, x, t):
        return self.net(x + self.time(timestep_embedding(t, x.size(-1), x.dtype)))


def train(model, loader, T=1000):
    model = model.cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x in loader:
        x = x.cuda()
        t = torch.randint(0, T, (len(x),), device="cuda")
        noise = torch.randn_like(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x + noise, t), noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
