"""VAE with KL warmup and free bits, fp16 autocast + GradScaler."""
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser(); ap.add_argument("--fp32", action="store_true")
amp = not ap.parse_args().fp32
torch.manual_seed(18)


class VAE(nn.Module):
    def __init__(self, x=24, h=40, z=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(x, h), nn.ReLU())
        self.mu, self.logvar = nn.Linear(h, z), nn.Linear(h, z)
        nn.init.zeros_(self.logvar.weight); nn.init.zeros_(self.logvar.bias)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, x))

    def forward(self, x):
        h = self.enc(x)
        mu, lv = self.mu(h).float(), self.logvar(h).float().clamp(-10, 6)
        z = mu + torch.randn_like(mu) * torch.exp(.5 * lv)
        return self.dec(z), mu, lv


W = torch.randn(3, 24)
vae = VAE()
opt = torch.optim.Adam(vae.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", enabled=amp)
for step in range(110):
    x = torch.randn(32, 3) @ W + .2 * torch.randn(32, 24)
    beta = min(1.0, step / 70)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        rec, mu, lv = vae(x)
    nll = F.mse_loss(rec.float(), x, reduction="sum") / 32 * 2
    kl = .5 * (mu ** 2 + lv.exp() - 1 - lv)
    kl = kl.mean(0).clamp(min=.1).sum()
    loss = nll + beta * kl
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 9:
        print(f"{step} elbo-loss {loss.item():.3f} nll {nll.item():.3f} kl {kl.item():.3f} beta {beta:.2f} scale {scaler.get_scale():g}")
