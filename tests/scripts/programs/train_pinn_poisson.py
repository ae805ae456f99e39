import torch
from torch import nn

torch.manual_seed(0)
DT = torch.bfloat16
H = 5e-3


class Field(nn.Module):
    """u(x) on [0, 1] with hard boundary values u(0)=u(1)=0."""

    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.body(x) * x * (1 - x) * 4


def residual(net, x):
    with torch.autocast("cpu", dtype=DT):
        up, u, um = net(x + H), net(x), net(x - H)
    lap = (up - 2 * u + um) / H**2
    return lap / torch.pi**2 + torch.sin(torch.pi * x)


def evaluate(net):
    x = torch.linspace(0, 1, 101).unsqueeze(1)
    with torch.no_grad():
        return ((net(x) - torch.sin(torch.pi * x)) ** 2).mean().sqrt().item()


net = Field()
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200)
for it in range(200):
    x = torch.rand(32, 1) * 0.98 + 0.01
    loss = residual(net, x).square().mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    sched.step()
    if it % 25 == 0 or it == 199:
        print(f"{it:4d} residual {loss.item():.5f}  rmse {evaluate(net):.5f}")
