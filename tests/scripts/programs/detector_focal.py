"""Tiny anchor-free detector head with a hand-made focal loss, float16."""
import torch
from torch import nn

torch.manual_seed(55)
EPS = 1e-8


class Head(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.stem = nn.Conv2d(1, c, 3, padding=1)
        self.conv = nn.Conv2d(c, c, 3, padding=1)
        self.heat = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.heat(torch.relu(self.conv(x))).sigmoid()


def focal(p, y, gamma=2.0):
    pos = -((1 - p) ** gamma) * torch.log(p + EPS) * y
    neg = -(p ** gamma) * torch.log(1 - p + EPS) * (1 - y)
    return (8.0 * pos + neg).float().mean()


def scene(n=8):
    x = 0.1 * torch.randn(n, 1, 16, 16)
    y = torch.zeros(n, 1, 16, 16)
    for i in range(n):
        a, b = torch.randint(1, 15, (2,)).tolist()
        x[i, 0, a - 1:a + 2, b - 1:b + 2] += 3.0
        y[i, 0, a, b] = 1
    return x, y


net = Head()
opt = torch.optim.Adam(net.parameters(), lr=0.03)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(100):
    x, y = scene()
    with torch.autocast("cpu", dtype=torch.float16):
        p = net(x)
    loss = focal(p, y.half())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 15 == 0 or step == 99:
        print(step, loss.item(), scaler.get_scale())
