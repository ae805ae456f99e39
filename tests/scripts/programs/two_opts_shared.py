import torch
from torch import nn
torch.manual_seed(5)
trunk, a, b = nn.Linear(32, 64), nn.Linear(64, 3), nn.Linear(64, 1)
oa = torch.optim.Adam([*trunk.parameters(), *a.parameters()], lr=1e-3)
ob = torch.optim.Adam([*trunk.parameters(), *b.parameters()], lr=5e-4)
c, w = torch.randn(3, 32), torch.randn(32, 1) / 6
for s in range(240):
    y = torch.randint(0, 3, (32,)); x = c[y] + torch.randn(32, 32)
    la = nn.functional.cross_entropy(a(trunk(x).relu()), y)
    oa.zero_grad(); la.backward(); oa.step()
    lb = nn.functional.mse_loss(b(trunk(x).relu()), x @ w)
    ob.zero_grad(); lb.backward(); ob.step()
    if s % 60 == 0: print(s, la.item(), lb.item())
