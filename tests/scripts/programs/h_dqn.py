import copy, random
from collections import deque
import torch
from torch import nn

torch.manual_seed(4); random.seed(4)


class Line:
    """walk on a line of 12 cells to the right end."""
    def reset(self):
        self.p, self.t = random.randrange(6), 0
        return self.obs()

    def obs(self):
        return torch.nn.functional.one_hot(torch.tensor(self.p), 12).float()

    def step(self, a):
        self.p = max(0, min(11, self.p + (1 if a else -1))); self.t += 1
        return self.obs(), float(self.p == 11), self.p == 11 or self.t > 30


q = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 2))
target = copy.deepcopy(q)
opt = torch.optim.Adam(q.parameters(), lr=1e-3)
buf, env = deque(maxlen=2000), Line()
s = env.reset()
for it in range(600):
    a = random.randrange(2) if random.random() < max(0.1, 1 - it / 300) else q(s).argmax().item()
    s2, r, d = env.step(a)
    buf.append((s, a, r, s2, d))
    s = env.reset() if d else s2
    if len(buf) > 64:
        b = random.sample(buf, 32)
        S = torch.stack([x[0] for x in b]); A = torch.tensor([x[1] for x in b]); R = torch.tensor([x[2] for x in b])
        S2 = torch.stack([x[3] for x in b]); D = torch.tensor([float(x[4]) for x in b])
        with torch.no_grad():
            y = R + 0.95 * (1 - D) * target(S2).max(1).values
        loss = nn.functional.smooth_l1_loss(q(S).gather(1, A[:, None])[:, 0], y)
        opt.zero_grad(); loss.backward(); opt.step()
    if it % 50 == 0:
        target.load_state_dict(q.state_dict())
    if it % 150 == 149:
        print(it, loss.item())
