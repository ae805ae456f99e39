import torch
import torch.nn as nn


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(10)
G = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
print("parameters", count_parameters(G))
D = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1, bias=False))
og = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.9))
od = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.9))
modes = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0]])


def real(n=64):
    return modes[torch.randint(0, 4, (n,))] + 0.15 * torch.randn(n, 2)


def penalty(x, f):
    e = torch.rand(len(x), 1)
    m = (e * x + (1 - e) * f).requires_grad_(True)
    g, = torch.autograd.grad(D(m).sum(), m, create_graph=True)
    return ((g.norm(2, dim=1) - 1) ** 2).mean()


for step in range(300):
    for _ in range(4):
        x, f = real(), G(torch.randn(64, 4)).detach()
        ld = D(f).mean() - D(x).mean() + 5 * penalty(x, f)
        od.zero_grad()
        ld.backward()
        od.step()
    lg = -D(G(torch.randn(64, 4))).mean()
    og.zero_grad()
    lg.backward()
    og.step()
    if step % 25 == 0 or step == 299:
        with torch.no_grad():
            s = G(torch.randn(400, 4))
            d = torch.cdist(s, modes).min(1).values.mean().item()
        print(f"step {step} critic {ld.item():.3f} gen {lg.item():.3f} distance to modes {d:.3f}")
