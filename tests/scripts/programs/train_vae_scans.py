import torch
import torch.nn as nn

torch.manual_seed(6)
SIDE = 24


def scans(n):
    g = torch.linspace(-1, 1, SIDE)
    yy, xx = torch.meshgrid(g, g, indexing="ij")
    cx, cy, s = (torch.rand(3, n, 1, 1) - 0.5)
    img = torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / (0.1 + 0.1 * (s + 0.5)))
    return (img * 12.0).flatten(1)


class VAE(nn.Module):
    def __init__(self, z=6, h=48):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(SIDE * SIDE, h), nn.SiLU(), nn.Linear(h, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, h), nn.SiLU(), nn.Linear(h, SIDE * SIDE))

    def forward(self, x):
        mu, logvar = self.enc(x / 12.0).chunk(2, -1)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        return self.dec(z), mu, logvar


def elbo_terms(recon, x, mu, logvar):
    sse = (recon - x.to(recon.dtype)).pow(2).sum()
    rec = 0.5 * x.numel() * torch.log(sse.float() / x.numel())
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum()
    return rec, kl


def main():
    vae = VAE()
    opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(100):
        x = scans(16)
        with torch.autocast("cpu", dtype=torch.float16):
            recon, mu, logvar = vae(x)
            rec, kl = elbo_terms(recon, x, mu, logvar)
            loss = rec + kl
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 10 == 0 or step == 99:
            print(f"step {step} elbo {loss.item() / 16:.2f} mse {(recon.float() - x).pow(2).mean().item():.4f}")


main()
