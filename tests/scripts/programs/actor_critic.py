import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

torch.manual_seed(7)


class LineWorld:
    def __init__(self, size=7):
        self.size = size

    def reset(self):
        self.pos, self.t = self.size // 2, 0
        self.goal = int(torch.randint(0, 2, (1,))) * (self.size - 1)
        return self.obs()

    def obs(self):
        o = torch.zeros(self.size + 1)
        o[self.pos] = 1.0
        o[-1] = 1.0 if self.goal else -1.0
        return o

    def step(self, a):
        self.pos = min(self.size - 1, max(0, self.pos + (1 if a else -1)))
        self.t += 1
        done = self.pos == self.goal or self.t >= 12
        return self.obs(), (1.0 if self.pos == self.goal else -0.05), done


class Actor(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, s):
        return Categorical(logits=self.body(s))


class Critic(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, s):
        return self.body(s).squeeze(-1)


env = LineWorld()
actor, critic = Actor(8), Critic(8)
opt_actor = torch.optim.Adam(actor.parameters(), lr=5e-3)
opt_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
scores = []
for episode in range(150):
    s, done = env.reset(), False
    states, acts, rews = [], [], []
    while not done:
        with torch.no_grad():
            a = actor(s).sample()
        states.append(s)
        acts.append(a)
        s, r, done = env.step(int(a))
        rews.append(r)
    ret, R = [], 0.0
    for r in reversed(rews):
        R = r + 0.97 * R
        ret.insert(0, R)
    S, A, G = torch.stack(states), torch.stack(acts), torch.tensor(ret)
    v = critic(S)
    adv = (G - v).detach()
    dist = actor(S)
    actor_loss = -(dist.log_prob(A) * adv).mean() - 0.01 * dist.entropy().mean()
    critic_loss = F.smooth_l1_loss(v, G)
    opt_actor.zero_grad()
    actor_loss.backward()
    opt_actor.step()
    opt_critic.zero_grad()
    critic_loss.backward()
    scores.append(sum(rews))
    if (episode + 1) % 25 == 0:
        print(f"ep {episode + 1} loss {actor_loss.item():.4f} value {critic_loss.item():.4f} score {sum(scores[-25:]) / 25:.3f}")
