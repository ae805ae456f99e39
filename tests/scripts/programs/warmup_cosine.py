import math, torch
from torch import nn
torch.manual_seed(9)
net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
sch = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(s / 60, 0.5 * (1 + math.cos(math.pi * max(0, s - 60) / 190))))
c = torch.randn(8, 32)
for s in range(250):
    y = torch.randint(0, 8, (32,))
    loss = nn.functional.cross_entropy(net(c[y] + torch.randn(32, 32)), y)
    opt.zero_grad(); loss.backward(); opt.step(); sch.step()
    if s % 50 == 0: print(s, loss.item(), sch.get_last_lr())
