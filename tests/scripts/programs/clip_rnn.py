import torch
import torch.nn as nn

torch.manual_seed(19)


class Adder(nn.Module):
    def __init__(self, h=20):
        super().__init__()
        self.cell = nn.GRUCell(2, h)
        self.out = nn.Linear(h, 1)
        self.h = h

    def forward(self, x):
        s = x.new_zeros(x.size(0), self.h)
        for t in range(x.size(1)):
            s = self.cell(x[:, t], s)
        return self.out(s).squeeze(1)


def problem(n=24, T=10):
    v = torch.rand(n, T)
    m = torch.zeros(n, T)
    for r in range(n):
        i = torch.randperm(T)[:2]
        m[r, i] = 1
    return torch.stack([v, m], 2), (v * m).sum(1)


net = Adder()
opt = torch.optim.RMSprop(net.parameters(), lr=3e-3)
norms = []
for step in range(120):
    x, y = problem()
    loss = (net(x) - y).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.05).item())
    opt.step()
print("loss", loss.item(), "max norm", max(norms))
