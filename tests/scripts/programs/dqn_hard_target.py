import random
from collections import deque
import torch
import torch.nn as nn

random.seed(26)
torch.manual_seed(26)
N = 8


def onehot(i):
    v = torch.zeros(N)
    v[i] = 1.
    return v


q = nn.Sequential(nn.Linear(N, 20), nn.ReLU(), nn.Linear(20, 2))
target = nn.Sequential(nn.Linear(N, 20), nn.ReLU(), nn.Linear(20, 2))
target.load_state_dict(q.state_dict())
opt = torch.optim.Adam(q.parameters(), lr=3e-3)
buf = deque(maxlen=500)
s, updates = 0, 0
for t in range(230):
    eps = max(0.1, 1 - t / 150)
    with torch.no_grad():
        a = random.randrange(2) if random.random() < eps else q(onehot(s)).argmax().item()
    s2 = min(N - 1, s + 1) if a == 1 else max(0, s - 1)
    done = s2 == N - 1
    buf.append((s, a, float(done), s2, float(done)))
    s = 0 if done else s2
    if len(buf) < 30:
        continue
    b = random.sample(list(buf), 16)
    S = torch.stack([onehot(e[0]) for e in b])
    S2 = torch.stack([onehot(e[3]) for e in b])
    A = torch.tensor([e[1] for e in b])
    R, Dn = torch.tensor([e[2] for e in b]), torch.tensor([e[4] for e in b])
    with torch.no_grad():
        y = R + 0.95 * (1 - Dn) * target(S2).max(1).values
    loss = nn.functional.smooth_l1_loss(q(S).gather(1, A[:, None]).squeeze(1), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    updates += 1
    if updates % 25 == 0:
        target.load_state_dict(q.state_dict())
print("updates", updates, "td loss", loss.item())
