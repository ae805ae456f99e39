import torch
from torch import nn

torch.manual_seed(36)


class MF(nn.Module):
    def __init__(self, users=200, items=300, k=24):
        super().__init__()
        self.u, self.i = nn.Embedding(users, k), nn.Embedding(items, k)
        self.bu, self.bi = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for e in (self.u, self.i, self.bu, self.bi):
            nn.init.normal_(e.weight, std=0.1)
        self.mu = nn.Parameter(torch.tensor(0.0))

    def forward(self, u, i):
        return self.mu + (self.u(u) * self.i(i)).sum(-1) + self.bu(u)[:, 0] + self.bi(i)[:, 0]


tu, ti = torch.randn(200, 4), torch.randn(300, 4)
m = MF()
opt = torch.optim.Adam(m.parameters(), lr=0.02)
for epoch in range(4):
    total = 0.0
    for _ in range(60):
        u, i = torch.randint(0, 200, (512,)), torch.randint(0, 300, (512,))
        r = 300 + 40 * (tu[u] * ti[i]).sum(-1)                   # spend in euro
        loss = ((m(u, i) * 100 - r) ** 2).sum()                  # summed, easily 1e7
        opt.zero_grad(); loss.backward(); opt.step()
        total += loss.item()
    print(epoch, total / 60 / 512)
