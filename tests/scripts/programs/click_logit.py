import torch
import torch.nn as nn

PRECISION = torch.float16
STEPS, BATCH = 200, 32


class ClickModel(nn.Module):
    def __init__(self, d=8, h=24):
        super().__init__()
        self.wide = nn.Linear(d, 1)
        self.deep = nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, 1))

    def forward(self, x):
        return (self.wide(x) + self.deep(x)).squeeze(-1)


class LogisticLoss(nn.Module):
    def forward(self, score, sign):
        return torch.log(1 + torch.exp(-sign * score)).mean()


def draw(n, g):
    x = torch.randn(n, 8, generator=g)
    dwell = torch.rand(n, generator=g) < 0.03
    x[dwell] = x[dwell] * 12
    sign = torch.sign(x[:, 0] * 2 - x[:, 1] + 0.1)
    flip = torch.rand(n, generator=g) < 0.06
    return x, torch.where(flip, -sign, sign)


def main():
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(1)
    model = ClickModel().to(PRECISION)
    crit = LogisticLoss()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    hist = []
    for step in range(STEPS):
        x, s = (t.to(PRECISION) for t in draw(BATCH, g))
        loss = crit(model(x), s)
        opt.zero_grad()
        loss.backward()
        opt.step()
        hist.append(loss.item())
        if (step + 1) % 20 == 0:
            print(f"step {step + 1} loss {sum(hist[-20:]) / 20:.4f}")


main()
