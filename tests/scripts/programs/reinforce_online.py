import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(12)


class Policy(nn.Module):
    def __init__(self, contexts=4, arms=5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(contexts, 32), nn.Tanh(), nn.Linear(32, arms))

    def forward(self, c):
        return Categorical(logits=self.net(c))


class ContextBandit:
    def __init__(self):
        self.best = torch.tensor([0, 3, 1, 4])

    def observe(self):
        self.c = int(torch.randint(0, 4, (1,)))
        o = torch.zeros(1, 4)
        o[0, self.c] = 1.0
        return o

    def reward(self, arm):
        return 1.0 if arm == self.best[self.c] else 0.0


env, policy = ContextBandit(), Policy()
opt = torch.optim.Adam(policy.parameters(), lr=2e-2)
baseline, wins = 0.2, []
for step in range(300):
    obs = env.observe()
    dist = policy(obs)
    arm = dist.sample()
    r = env.reward(int(arm))
    loss = -(r - baseline) * dist.log_prob(arm).sum() - 0.01 * dist.entropy().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    baseline = 0.98 * baseline + 0.02 * r
    wins.append(r)
    if (step + 1) % 50 == 0:
        print(f"step {step + 1} loss {loss.item():.4f} reward {sum(wins[-50:]) / 50:.2f}")
