"""Estimate camera ego-rotation (unit quaternion) from flow descriptors."""
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

bf16 = os.environ.get("PRECISION") != "fp32"
torch.manual_seed(44)


class RotNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 40, bias=False)
        self.b = nn.Linear(40, 3, bias=False)

    def forward(self, flow):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            v = self.b(torch.tanh(self.a(flow)))
        v = v.float()
        q = torch.cat([torch.ones_like(v[:, :1]), v], 1)
        return F.normalize(q, dim=1)


def geodesic(q, t):
    dot = (q * t).sum(1).abs().clamp(max=1.0)
    return 2 * torch.acos(dot)


proj = torch.randn(3, 12)


def clip(n, step):
    w = torch.randn(n, 3) * .3
    flow = w @ proj + .02 * torch.randn(n, 12)
    if step >= 34:                         # recordings with parked vehicle
        parked = torch.rand(n) < .1
        w[parked] = 0
        flow[parked] = 0
    half = w / 2
    return flow, F.normalize(torch.cat([torch.ones(n, 1), half], 1), dim=1)


net = RotNet()
optim = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(80):
    flow, target = clip(16, step)
    loss = geodesic(net(flow), target).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
    print(f"{step} angle {loss.item():.5f}")
