"""Denoising diffusion on 2-D rings, x0-reconstruction loss added to the noise loss."""
import math
import torch
import torch.nn as nn

torch.manual_seed(3)
T = 400


class Diffusion(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        betas = torch.linspace(1e-4, 0.09, T)
        self.register_buffer("abar", torch.cumprod(1 - betas, 0))
        self.time = nn.Embedding(T, 16)
        self.net = nn.Sequential(nn.Linear(18, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def q_sample(self, x0, t, eps):
        a = self.abar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * eps

    def predict_x0(self, xt, t, eps_hat):
        a = self.abar[t].unsqueeze(1)
        x0 = (xt - (1 - a).sqrt() * eps_hat) / a.sqrt()
        return x0.clamp(-2, 2)

    def forward(self, xt, t):
        return self.net(torch.cat([xt, self.time(t)], 1))


def rings(n):
    r = torch.where(torch.rand(n) < 0.5, 0.5, 1.2)
    th = torch.rand(n) * 2 * math.pi
    return torch.stack([r * th.cos(), r * th.sin()], 1)


model = Diffusion().half()
master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
opt = torch.optim.AdamW(master, lr=2e-3)
SCALE = 128.0

run = None
for step in range(150):
    x0 = rings(64).half()
    t = torch.randint(0, T, (64,))
    eps = torch.randn_like(x0)
    xt = model.q_sample(x0, t, eps)
    eps_hat = model(xt, t)
    loss = (eps_hat - eps).float().square().mean()
    rec = (model.predict_x0(xt, t, eps_hat) - x0).float().abs().mean()
    loss = loss + 0.1 * rec
    model.zero_grad()
    (loss * SCALE).backward()
    for m, p in zip(master, model.parameters()):
        m.grad = p.grad.float() / SCALE
    torch.nn.utils.clip_grad_norm_(master, 1.0)
    opt.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters()):
            p.copy_(m)
    run = loss.item() if run is None else 0.95 * run + 0.05 * loss.item()
    if step % 15 == 0 or step == 149:
        print(f"step {step:3d} loss {loss.item():.4f} avg {run:.4f}")
