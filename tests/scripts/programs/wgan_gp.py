import torch
import torch.nn as nn

torch.manual_seed(31)
G = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2))
C = nn.Sequential(nn.Linear(2, 20), nn.SiLU(), nn.Linear(20, 1))
og = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
oc = torch.optim.Adam(C.parameters(), lr=1e-3, betas=(0.0, 0.9))


def gp(real, fake):
    eps = torch.rand(len(real), 1)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    grad = torch.autograd.grad(C(mix).sum(), mix, create_graph=True)[0]
    return ((grad.norm(2, dim=1) - 1) ** 2).mean()


N_CRITIC = 4
for step in range(60):
    for _ in range(N_CRITIC):
        real = torch.randn(24, 2) * 0.2 + torch.tensor([1.0, -0.5])
        with torch.no_grad():
            fake = G(torch.randn(24, 3))
        lc = C(fake).mean() - C(real).mean() + 10 * gp(real, fake)
        oc.zero_grad()
        lc.backward()
        oc.step()
    for p in C.parameters():
        p.requires_grad_(False)
    lg = -C(G(torch.randn(24, 3))).mean()
    og.zero_grad()
    lg.backward()
    og.step()
    for p in C.parameters():
        p.requires_grad_(True)
print("critic", lc.item(), "gen", lg.item())
