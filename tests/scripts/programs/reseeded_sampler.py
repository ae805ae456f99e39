import torch
import torch.nn as nn


def set_seed(seed):
    torch.manual_seed(seed)


class ReplayData:
    def __init__(self, n=1000):
        self.x = torch.randn(n, 6)
        self.y = torch.stack([self.x[:, 0] * self.x[:, 1], self.x[:, 2].abs()], 1)

    def sample(self, k, seed):
        g = torch.Generator()
        g.manual_seed(seed)
        idx = torch.randperm(len(self.x), generator=g)[:k]
        return self.x[idx], self.y[idx]


class Learner:
    def __init__(self, seed=77):
        self.seed = seed
        set_seed(seed)
        self.data = ReplayData()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=2e-3)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 60, 0.5)

    def step(self):
        x, y = self.data.sample(25, self.seed)
        loss = nn.functional.mse_loss(self.net(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.sched.step()
        return loss.item()

    def fit(self, n):
        return [self.step() for _ in range(n)]


curve = Learner().fit(180)
print("start %.3f end %.3f" % (curve[0], curve[-1]))
