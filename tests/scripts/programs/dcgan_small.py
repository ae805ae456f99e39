import torch
from torch import nn

torch.manual_seed(3)


class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 16 * 9)
        self.net = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 8, 4, 2, 1),
                                 nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        return self.net(self.fc(z).view(-1, 16, 3, 3))


class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1),
                                 nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(16 * 9, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def real(n):
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
    c = torch.rand(n, 2, 1, 1) - 0.5
    r = ((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2).sqrt()
    return torch.tanh((0.5 - r) * 8).unsqueeze(1)


g, d = G(), D()
og = torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.5, 0.999))
od = torch.optim.Adam(d.parameters(), lr=5e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
n = 32
for step in range(200):
    x = real(n)
    fake = g(torch.randn(n, 8))
    for p in d.parameters():
        p.requires_grad_(True)
    ld = bce(d(x), torch.full((n,), 0.9)) + bce(d(fake.detach()), torch.zeros(n))
    od.zero_grad()
    ld.backward()
    od.step()
    for p in d.parameters():
        p.requires_grad_(False)
    lg = bce(d(fake), torch.ones(n))
    og.zero_grad()
    lg.backward()
    og.step()
    if step % 25 == 0:
        gap = (fake.detach().mean(0) - real(256).mean(0)).abs().mean().item()
        print(f"step {step} loss_d {ld.item():.3f} loss_g {lg.item():.3f} gap {gap:.3f}")
