import torch
from torch import nn

torch.manual_seed(12)


def pairwise(a):
    sq = (a * a).sum(-1)
    d2 = sq[:, :, None] + sq[:, None, :] - 2 * a @ a.transpose(1, 2)
    return d2.sqrt()


class EdgeNet(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(1, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU())
        self.out = nn.Linear(h, 1)

    def forward(self, xyz):
        d = pairwise(xyz)
        m = self.edge(d[..., None]).mean((1, 2))
        return self.out(m)


def clouds(n=8, pts=24):
    size = torch.rand(n, 1, 1) * 2 + 0.5
    pts = torch.randn(n, pts, 3) * size
    return pts + torch.tensor([30.0, -20.0, 12.0]), size[:, :, 0]     # scanner frame, metres


net = EdgeNet().to(torch.bfloat16)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(6):
    for _ in range(10):
        xyz, size = clouds()
        pred = net(xyz.to(torch.bfloat16))
        loss = nn.functional.mse_loss(pred.float(), size)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("epoch", epoch, loss.item())
