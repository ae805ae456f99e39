import torch
from torch import nn

torch.manual_seed(18)
G = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
D = nn.Sequential(nn.Linear(2, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
og = torch.optim.Adam(G.parameters(), lr=5e-4, betas=(0.5, 0.9))
od = torch.optim.Adam(D.parameters(), lr=5e-4, betas=(0.5, 0.9))
bce = nn.functional.binary_cross_entropy_with_logits
for it in range(250):
    ang = torch.rand(64) * 6.283
    real = torch.stack([ang.cos(), ang.sin()], 1) * 2 + 0.05 * torch.randn(64, 2)
    fake = G(torch.randn(64, 16))
    ld = bce(D(real), torch.ones(64, 1)) + bce(D(fake.detach()), torch.zeros(64, 1))
    od.zero_grad(); ld.backward(); od.step()
    lg = bce(D(G(torch.randn(64, 16))), torch.ones(64, 1))
    og.zero_grad(); lg.backward(); og.step()
    if it % 50 == 0:
        print(it, ld.item(), lg.item(), fake.norm(dim=1).mean().item())
