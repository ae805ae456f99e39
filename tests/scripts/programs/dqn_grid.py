import random
from collections import deque
import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(21)
torch.manual_seed(21)
N = 6


def obs(p):
    v = torch.zeros(N)
    v[p] = 1.0
    return v


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(N, 32), nn.Linear(32, 2)

    def forward(self, s):
        return self.l2(F.relu(self.l1(s)))


class Agent:
    def __init__(self):
        self.q, self.target = QNet(), QNet()
        self.target.load_state_dict(self.q.state_dict())
        self.target.requires_grad_(False)
        self.opt = torch.optim.Adam(self.q.parameters(), lr=5e-3)
        self.buf = deque(maxlen=2000)
        self.updates = 0

    def act(self, s, eps):
        if random.random() < eps:
            return random.randrange(2)
        with torch.no_grad():
            return int(self.q(s).argmax())

    def learn(self):
        s, a, r, s2, d = zip(*random.sample(self.buf, 32))
        s, s2 = torch.stack(s), torch.stack(s2)
        a, r, d = torch.tensor(a), torch.tensor(r), torch.tensor(d, dtype=torch.float32)
        q = self.q(s).gather(1, a[:, None]).squeeze(1)
        with torch.no_grad():
            y = r + 0.9 * (1 - d) * self.target(s2).max(1).values
        loss = F.smooth_l1_loss(q, y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.updates += 1
        if self.updates % 50 == 0:
            self.target.load_state_dict(self.q.state_dict())
        return loss.item()


agent, pos, t, wins, episodes, total = Agent(), 0, 0, 0, 0, 400
for step in range(total):
    s = obs(pos)
    a = agent.act(s, max(0.1, 1 - step / 150))
    pos2 = max(0, pos + (1 if a else -1))
    t += 1
    done = pos2 == N - 1
    agent.buf.append((s, a, 1.0 if done else 0.0, obs(pos2), done))
    pos = pos2
    if done or t > 20:
        wins, episodes = wins + done, episodes + 1
        pos, t = 0, 0
    if step >= 100:
        loss = agent.learn()
        if step % 50 == 0:
            print(f"step {step} td {loss:.5f} success {wins}/{episodes}")
print([round(v, 2) for v in agent.q(torch.eye(N)).max(1).values.tolist()])
