import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(13)


class Corridor:
    def __init__(self, n=6):
        self.n = n

    def reset(self):
        self.pos, self.t = 1, 0
        return self.obs()

    def obs(self):
        o = torch.zeros(self.n)
        o[self.pos] = 1
        return o

    def step(self, a):
        self.pos = max(0, min(self.n - 1, self.pos + (1 if a else -1)))
        self.t += 1
        done = self.pos == self.n - 1 or self.t >= 12
        return self.obs(), (1.0 if self.pos == self.n - 1 else -0.05), done


env, pi = Corridor(), nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
opt = torch.optim.Adam(pi.parameters(), lr=1e-2)
baseline = 0.0
for ep in range(90):
    o, logps, rewards, done = env.reset(), [], [], False
    while not done:
        dist = Categorical(logits=pi(o))
        a = dist.sample()
        logps.append(dist.log_prob(a))
        o, r, done = env.step(a.item())
        rewards.append(r)
    G, returns = 0.0, []
    for r in reversed(rewards):
        G = r + 0.97 * G
        returns.insert(0, G)
    baseline = 0.9 * baseline + 0.1 * returns[0]
    loss = -(torch.stack(logps) * (torch.tensor(returns) - baseline)).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("return", returns[0])
