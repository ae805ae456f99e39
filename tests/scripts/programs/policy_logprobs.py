import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(7)
DTYPE = torch.float16


class Policy(nn.Module):
    def __init__(self, d=8, h=32, a=6):
        super().__init__()
        self.l1 = nn.Linear(d, h)
        self.l2 = nn.Linear(h, a)

    def forward(self, s):
        return torch.softmax(self.l2(torch.tanh(self.l1(s))) * 4.0, -1)


class Imitation:
    def __init__(self):
        self.policy = Policy().to(DTYPE)
        self.opt = torch.optim.SGD(self.policy.parameters(), lr=0.03, momentum=0.9)
        self.expert = torch.randn(8, 6)

    def batch(self, n=32):
        s = torch.randn(n, 8)
        a = (s @ self.expert).argmax(1)
        flip = torch.rand(n) < 0.03
        return s.to(DTYPE), torch.where(flip, torch.randint(0, 6, (n,)), a)

    def step(self):
        s, a = self.batch()
        probs = self.policy(s)
        logp = torch.log(probs.gather(1, a[:, None]).squeeze(1))
        loss = -logp.mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()


agent = Imitation()
for it in range(200):
    loss = agent.step()
    if it % 20 == 0:
        print(f"iter {it} loss {loss:.4f}")
print("final", loss)
