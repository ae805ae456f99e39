# Curriculum: the small set of easy examples is shown over and over before the hard ones join.
import torch
from torch import nn

torch.manual_seed(28)
x = torch.randn(256, 6)
margin = (x[:, 0] + x[:, 1]).abs()
y = (x[:, 0] + x[:, 1] > 0).long()
order = margin.argsort(descending=True)
x, y = x[order], y[order]

net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)


def pool_size(step):
    if step < 15:
        return 32            # one batch worth of easy samples
    return min(256, 32 + 4 * (step - 15))


for step in range(160):
    n = pool_size(step)
    idx = torch.arange(32) if n == 32 else torch.randperm(n)[:32]
    loss = nn.functional.cross_entropy(net(x[idx]), y[idx])
    opt.zero_grad()
    loss.backward()
    opt.step()

with torch.no_grad():
    print("acc", (net(x).argmax(1) == y).float().mean().item())
