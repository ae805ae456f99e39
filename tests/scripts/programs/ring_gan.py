"""GAN on a ring of Gaussians, hinge loss, spectral norm discriminator."""
import os
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm as sn

AC = dict(device_type="cpu", dtype=torch.bfloat16, enabled=os.environ.get("PRECISION") != "fp32")
torch.manual_seed(25)
G = nn.Sequential(nn.Linear(8, 48), nn.LeakyReLU(.2), nn.Linear(48, 48), nn.LeakyReLU(.2), nn.Linear(48, 2))
D = nn.Sequential(sn(nn.Linear(2, 48)), nn.LeakyReLU(.2), sn(nn.Linear(48, 48)), nn.LeakyReLU(.2), nn.Linear(48, 1))
og = torch.optim.Adam(G.parameters(), 2e-3, betas=(.0, .9))
od = torch.optim.Adam(D.parameters(), 4e-3, betas=(.0, .9))


def ring(n):
    a = torch.randint(0, 6, (n,)) * (2 * math.pi / 6)
    return 2 * torch.stack([a.cos(), a.sin()], 1) + .1 * torch.randn(n, 2)


for step in range(100):
    with torch.autocast(**AC):
        fake = G(torch.randn(32, 8)).detach()
        ld = F.relu(1 - D(ring(32)).float()).mean() + F.relu(1 + D(fake).float()).mean()
    od.zero_grad()
    ld.backward()
    od.step()
    for p in D.parameters():
        p.requires_grad_(False)
    with torch.autocast(**AC):
        lg = -D(G(torch.randn(32, 8))).float().mean()
    og.zero_grad()
    lg.backward()
    og.step()
    for p in D.parameters():
        p.requires_grad_(True)
    if step % 10 == 9:
        with torch.no_grad():
            rad = G(torch.randn(256, 8)).norm(dim=1).mean().item()
        print(f"{step} D {ld.item():.3f} G {lg.item():.3f} mean radius {rad:.3f}")
