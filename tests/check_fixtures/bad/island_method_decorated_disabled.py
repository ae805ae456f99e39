import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import autocast


class Mahalanobis(nn.Module):
    """Distance to class centres, meant to run in fp32."""

    def __init__(self, dim, classes):
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.centres = nn.Parameter(torch.randn(classes, dim))

    @autocast("cuda", enabled=False)
    def distance(self, z):
        diff = z.unsqueeze(1) - z.mean(0)  # expect: REGION_ISLAND_STILL_HALF
        return diff.float().pow(2).sum(-1) + (self.centres**2).sum(-1)

    def forward(self, x):
        z = self.proj(x)
        return -self.distance(z)


def train(loader, dim=64, classes=10):
    net = Mahalanobis(dim, classes).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(x.cuda()), y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
