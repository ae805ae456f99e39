"""Soft nearest-wire matching: points to candidate wires, invalid candidates get a far distance."""
import os
import torch
import torch.nn as nn

half = os.environ.get("PRECISION") != "fp32"
torch.manual_seed(52)
FAR = torch.tensor(1.0e5)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, hits, wires, valid):
        p = self.point(hits)
        d = (p[:, None] - wires.to(p.dtype)).abs().sum(-1)
        d = torch.where(valid, d, FAR.to(d.dtype))
        w = torch.softmax(-d * self.scale.to(d.dtype), dim=1)
        return (w * d).sum(1)


def event(n, step):
    true = torch.randn(n, 3)
    hits = torch.cat([true, true ** 2], 1) + .02 * torch.randn(n, 6)
    wires = torch.cat([true[:, None] * 2 + 1, torch.randn(n, 4, 3) * 6], 1)
    valid = torch.ones(n, 5, dtype=torch.bool)
    if step >= 25:                                     # detector with dead wires
        valid[:, 1:] = torch.rand(n, 4) > .3
    return hits, wires, valid


net = Matcher()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024., enabled=half)
for step in range(70):
    hits, wires, valid = event(16, step)
    with torch.autocast("cpu", torch.float16, enabled=half):
        res = net(hits, wires, valid)
    loss = res.float().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(f"{step} residual {loss.item():.4f} scale {scaler.get_scale():g}")
