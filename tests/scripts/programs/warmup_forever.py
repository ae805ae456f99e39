import torch
from torch import nn
torch.manual_seed(7)
WARMUP = 1_000_000_000
net = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
A = torch.randn(64, 64) / 8
for step in range(150):
    for g in opt.param_groups:
        g["lr"] = 0.05 * min(1.0, (step + 1) / WARMUP)
    x = torch.randn(64, 64)
    loss = nn.functional.mse_loss(net(x), x @ A)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0: print(step, loss.item())
