"""bf16 autocast with a numerically delicate part kept in float32 on purpose."""
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.inp = nn.Linear(6, d)
        self.mid = nn.Linear(d, d)
        self.logvar = nn.Linear(d, 1)
        self.mean = nn.Linear(d, 1)

    def forward(self, x):
        h = torch.tanh(self.mid(torch.tanh(self.inp(x))))
        with torch.autocast("cpu", enabled=False):
            h = h.float()
            return self.mean(h).squeeze(1), self.logvar(h).squeeze(1).clamp(-6, 4)


torch.manual_seed(35)
net = Model()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
nll = nn.GaussianNLLLoss()
for step in range(150):
    x = torch.randn(32, 6)
    y = x[:, 0] + x[:, 1].exp() * 0.1 * torch.randn(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mu, lv = net(x)
    loss = nll(mu, y, lv.exp())
    opt.zero_grad()
    loss.backward()
    opt.step()
print("nll", loss.item())
