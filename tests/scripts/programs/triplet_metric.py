import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(32)
centers = torch.randn(8, 10) * 0.8


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 6))

    def forward(self, x):
        return F.normalize(self.f(x), dim=-1)


def sample(n=24):
    c = torch.randint(0, 8, (n,))
    neg = (c + torch.randint(1, 8, (n,))) % 8
    noise = lambda: 0.6 * torch.randn(n, 10)
    return centers[c] + noise(), centers[c] + noise(), centers[neg] + noise()


net = Embed()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
crit = nn.TripletMarginLoss(margin=0.5)
hist = []
for step in range(150):
    a, p, n = sample()
    loss = crit(net(a), net(p), net(n))
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
print("mean loss, last 20:", sum(hist[-20:]) / 20)
