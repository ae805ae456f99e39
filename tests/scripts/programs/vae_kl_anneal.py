import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, d=12, z=3):
        super().__init__()
        self.enc = nn.Linear(d, 20)
        self.mu, self.lv = nn.Linear(20, z), nn.Linear(20, z)
        self.dec = nn.Sequential(nn.Linear(z, 20), nn.ReLU(), nn.Linear(20, d))

    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, lv = self.mu(h), self.lv(h)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return self.dec(z), mu, lv


def beta(step):
    # pure autoencoder for a while, then the KL term is switched on
    return 0.0 if step < 40 else min(0.1, (step - 40) / 600)


torch.manual_seed(37)
vae = VAE()
opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
basis = torch.randn(3, 12)
for step in range(160):
    x = torch.randn(32, 3) @ basis
    rec, mu, lv = vae(x)
    kl = -0.5 * (1 + lv - mu ** 2 - lv.exp()).sum(1).mean()
    loss = F.mse_loss(rec, x) + beta(step) * kl
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item(), "kl", kl.item())
