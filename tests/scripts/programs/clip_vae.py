import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, d=36, h=48, z=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.ReLU())
        self.mu, self.logvar = nn.Linear(h, z), nn.Linear(h, z)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, d))

    def forward(self, x):
        h = self.enc(x)
        mu, lv = self.mu(h), self.logvar(h).clamp(-8, 4)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return self.dec(z), mu, lv


def bars(n):
    img = torch.zeros(n, 6, 6)
    for i in range(n):
        k = int(torch.randint(0, 6, (1,)))
        if torch.rand(1) < 0.5:
            img[i, k] = 1
        else:
            img[i, :, k] = 1
    return img.flatten(1)


def main():
    torch.manual_seed(23)
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(250):
        x = bars(32)
        rec, mu, lv = model(x)
        bce = F.binary_cross_entropy_with_logits(rec, x, reduction="sum") / len(x)
        kl = -0.5 * (1 + lv - mu ** 2 - lv.exp()).sum(1).mean()
        beta = min(1.0, step / 150)
        loss = bce + beta * kl
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        if step % 25 == 0:
            print(f"step {step} bce {bce.item():.3f} kl {kl.item():.3f} beta {beta:.2f} norm {norm.item():.2f}")


main()
