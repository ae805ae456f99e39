import torch
from torch import nn

torch.manual_seed(12)


class PointAE(nn.Module):
    def __init__(self, k=24, d=32):
        super().__init__()
        self.k = k
        self.point = nn.Sequential(nn.Linear(3, d), nn.ReLU(), nn.Linear(d, d))
        self.dec = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, k * 3))

    def forward(self, p):
        z = self.point(p / 100.0).max(1)[0]
        return self.dec(z).view(-1, self.k, 3) * 100.0


def chamfer(a, b):
    aa = (a * a).sum(-1)
    bb = (b * b).sum(-1)
    d = aa[:, :, None] + bb[:, None, :] - 2 * torch.bmm(a, b.transpose(1, 2))
    return d.min(2)[0].mean() + d.min(1)[0].mean()


def scans(n=8, k=24):
    centre = torch.randn(n, 1, 3) * 60 + torch.tensor([120.0, 0.0, 40.0])
    dirs = nn.functional.normalize(torch.randn(n, k, 3), dim=-1)
    return centre + dirs * (20 + 30 * torch.rand(n, 1, 1))


model = PointAE()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(120):
    pts = scans()
    with torch.autocast("cpu", dtype=torch.float16):
        rec = model(pts)
        loss = chamfer(rec, pts.to(rec.dtype)) / 1000
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    opt.step()
    if step % 12 == 0 or step == 119:
        print(f"step {step} chamfer {loss.item():.4f}")
